"""A living server under mutated message streams: it goes on, and nobody else notices."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from fuzz.make_corpus import bodies
from lmcache_persist import protocol
from lmcache_persist.geometry import GroupKind
from lmcache_persist.protocol import GroupSpec
from lmcache_persist.server.state import NUM_READERS
from lmcache_persist.server.stores import MAX_FLUSHES_PER_SESSION
from lmcache_persist.shm import ClientLock, PoolPaths
from support.client_child import ClientProcess
from support.emulated import identity
from support.mutation import mutate
from support.raw import ask, hello, receive, send
from support.server import ServerProcess
from support.waiting import wait_until

BURSTS = 12
MESSAGES_PER_BURST = 250
MAX_GROWTH_BYTES = 48 << 20
OBJECT = 256 * 1024
GROUPS = [GroupSpec(GroupKind.FULL, 256, 256)]


def threads(pid: int) -> int:
    """Threads of a process."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def private_bytes(pid: int) -> int:
    """Memory of a process that is not shared."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon")


class Attacker:
    """A client with a lock of its own that mutates all it says."""

    def __init__(self, url: str, words: list[Any], draw: random.Random) -> None:
        self.draw, self.words = draw, words
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(url)
        self.sent = 0
        try:
            self.enter()
        except BaseException:
            self.close()
            raise

    def enter(self) -> None:
        """A fresh session; whatever the last burst said may have ended the one before."""
        first = hello(self.socket, "worker")
        assert first.pool is not None
        lock = ClientLock.of_process(PoolPaths(Path(first.pool.path)))
        message = protocol.Hello(
            proto_min=1, proto_max=1, kind="worker", lock=lock.token, session=first.session
        )
        welcome = ask(self.socket, message)
        assert isinstance(welcome, protocol.Welcome)
        bound = msgspec.json.decode(welcome.binding)["binding_id"] if welcome.binding else ""
        self.head = {"boot": welcome.boot, "session": welcome.session, "binding": bound}

    def templates(self) -> list[protocol.Request]:
        """What a client of the attacker's own engine would say."""
        head, draw = self.head, self.draw
        hashes = draw.randbytes(64)
        return [
            protocol.Bind(**head, groups=GROUPS, who="attacker"),
            protocol.Register(
                **head,
                engine="attacker",
                rank=0,
                world_size=1,
                identity=msgspec.json.encode(identity(weights="attacker")),
                layout=b"{}",
                groups=GROUPS,
                object_bytes=[OBJECT],
            ),
            protocol.Lookup(**head, lookup=1, engine="attacker", num_tokens=513, hashes=hashes),
            protocol.Release(**head, lookup=1),
            protocol.Reserve(**head, engine="attacker", rank=0, hashes=hashes, masks=[1, 1]),
            protocol.Commit(**head, reservations=[1, 2]),
            protocol.GiveBack(**head, reservations=[1]),
            protocol.Flush(**head, wait_ms=10_000),
            protocol.Ping(**head),
            protocol.Stats(**head),
            protocol.AdminInspect(**head, details=True),
            protocol.AdminObjects(**head, after=bytes(64), limit=5),
            protocol.AdminVerify(**head),
            protocol.AdminVerify(**head, repair=True),
            protocol.Hello(proto_min=1, proto_max=1, kind="worker"),
        ]

    def burst(self, count: int) -> None:
        """Send mutated and good messages, then see that a good one is answered."""
        templates = self.templates()
        for _ in range(count):
            # Seldom a bye: what comes after it is stale.
            bye = self.draw.random() < 0.005
            body = protocol.encode(
                protocol.Bye(**self.head) if bye else self.draw.choice(templates)
            )
            if self.draw.random() < 0.9:
                body = mutate(body, self.draw, self.words)
            frames = [self.sent.to_bytes(8, "little"), body]
            if self.draw.random() < 0.05:
                frames = [self.draw.randbytes(self.draw.choice((0, 1, 8, 9)))] * self.draw.choice(
                    (1, 2, 3, 9)
                )
            self.socket.send_multipart(frames)
            self.sent += 1
        self.enter()
        number = send(self.socket, protocol.Ping(**self.head))
        while True:
            answered, reply = receive(self.socket)
            if answered == number:
                assert isinstance(reply, protocol.Done)
                return

    def close(self) -> None:
        """End the connection."""
        self.socket.close(0)
        self.context.term()


MakeAttacker = Callable[..., Attacker]


@pytest.fixture
def attack(server: ServerProcess) -> Iterator[MakeAttacker]:
    """Makes attackers of the server, closed at the end."""
    made: list[Attacker] = []

    def make(words: Sequence[Any] = (), seed: int = 1) -> Attacker:
        made.append(Attacker(server.url, list(words), random.Random(seed)))
        return made[-1]

    yield make
    for attacker in made:
        attacker.close()


@pytest.fixture
def victim(server: ServerProcess) -> Iterator[ClientProcess]:
    """Another process with durable objects, a lease and reservations."""
    with ClientProcess(server.url) as client:
        client.call("join", "victim", OBJECT)
        assert client.call("store", 1, 8) == 8
        client.call("flush")
        assert client.call("hold", 1, 8) == 8
        yield client


def test_mutated_streams_harm_nobody(
    server: ServerProcess, attack: MakeAttacker, victim: ClientProcess, seed: int
) -> None:
    """After each burst a good message is answered, and what others have is as it was."""
    assert server.process is not None
    pid = server.process.pid
    reserved = victim.call("reserve", 2, 4)
    assert len(reserved) == 4
    victim.call("fill")
    words = [*reserved, *victim.call("lookup_ids"), "victim", reserved, OBJECT, b"h" * 32]
    attacker = attack(words, seed)
    attacker.burst(MESSAGES_PER_BURST)  # what is made lazily is made now
    before, memory = threads(pid), private_bytes(pid)
    for number in range(BURSTS):
        attacker.burst(MESSAGES_PER_BURST)
        assert victim.call("check") == 8, f"burst {number}"
    # A reader's thread is started when all others are busy, up to its number.
    assert before <= threads(pid) <= before + NUM_READERS
    assert private_bytes(pid) - memory < MAX_GROWTH_BYTES
    # Nobody took the reservations, and what was stored is found byte for byte.
    assert victim.call("commit") == []
    assert victim.call("lookup", 2, 4) == 4
    victim.call("release")
    assert victim.call("lookup", 1, 8) == 8
    assert "defect in the server" not in server.log()
    print(f"seed {seed}: {attacker.sent} messages")


def test_other_clients_slots_and_leases(
    server: ServerProcess, attack: MakeAttacker, victim: ClientProcess
) -> None:
    """What another client holds can be neither committed, given back nor released."""
    reserved = victim.call("reserve", 2, 4)
    victim.call("fill")
    attacker = attack()
    head = attacker.head
    for number in victim.call("lookup_ids"):
        ask(attacker.socket, protocol.Release(**head, lookup=number))
    reply = ask(attacker.socket, protocol.Commit(**head, reservations=reserved))
    assert isinstance(reply, protocol.Committed)
    assert reply.refused == reserved
    ask(attacker.socket, protocol.GiveBack(**head, reservations=reserved))
    reserve = protocol.Reserve(**head, engine="victim", rank=0, hashes=b"h" * 32, masks=[1])
    reply = ask(attacker.socket, reserve)
    assert isinstance(reply, protocol.ErrorReply)
    stats = ask(attacker.socket, protocol.Stats(**head))
    assert isinstance(stats, protocol.JsonReply)
    numbers = msgspec.json.decode(stats.body)
    assert (numbers["leased_bytes"], numbers["pool"]["reservations"]) == (8 * OBJECT, 4)
    assert victim.call("check") == 8
    assert victim.call("commit") == []
    assert victim.call("lookup", 2, 4) == 4


def test_the_corpus_harms_nobody(
    server: ServerProcess, attack: MakeAttacker, victim: ClientProcess
) -> None:
    """Every body of the corpus, sent as it is and to a living session, is survived."""
    attacker = attack()
    for body in bodies().values():
        attacker.socket.send_multipart([b"corpus..", body])
        try:
            value = msgspec.msgpack.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
        living = msgspec.msgpack.encode({**value, **attacker.head})
        attacker.socket.send_multipart([b"corpus..", living])
    attacker.enter()
    assert victim.call("check") == 8
    assert "defect in the server" not in server.log()


def identities() -> dict[str, tuple[bytes, str]]:
    """Identities that are no identity, with the code of the refusal."""
    model = msgspec.json.encode(identity(model="m"))
    return {
        "lone surrogate in a key": (b'{"\\ud800": 1}', "identity_unknown"),
        "nested": (b"[" * 5000, "identity_unknown"),
        "long number": (b'{"model": ' + b"1" * 5000 + b"}", "identity_unknown"),
        "no object": (b"[]", "identity_unknown"),
        "lone surrogate in the name": (model.replace(b'"m"', b'"\\ud800"'), ""),
        "name like a path": (model.replace(b'"m"', b'"../../x"'), ""),
        "endless name": (model.replace(b'"m"', b'"' + b"n" * 200_000 + b'"'), ""),
    }


@pytest.mark.parametrize("name", sorted(identities()))
def test_odd_identities_are_answered(
    server: ServerProcess, attack: MakeAttacker, root: Path, name: str
) -> None:
    """Whatever an identity says, there is an answer, and no path is made of it."""
    body, code = identities()[name]
    attacker = attack()
    ask(attacker.socket, protocol.Bind(**attacker.head, groups=GROUPS))
    attacker.enter()
    before = sorted(path.name for path in root.rglob("*"))
    for engine in ("one", "two"):
        reply = ask(
            attacker.socket,
            protocol.Register(
                **attacker.head,
                engine=engine,
                rank=0,
                world_size=1,
                identity=body,
                layout=b"{}",
                groups=GROUPS,
                object_bytes=[OBJECT],
            ),
        )
        found = reply.code if isinstance(reply, protocol.ErrorReply) else ""
        assert found == code
    for message in (protocol.Stats(**attacker.head), protocol.AdminInspect(**attacker.head)):
        reply = ask(attacker.socket, message)
        assert isinstance(reply, protocol.JsonReply), reply
    assert sorted(path.name for path in root.rglob("*")) == before
    assert "defect in the server" not in server.log()


def test_a_differing_surrogate_is_named(server: ServerProcess, attack: MakeAttacker) -> None:
    """A refusal that quotes what cannot be sent as text is sent all the same."""
    attacker = attack()
    ask(attacker.socket, protocol.Bind(**attacker.head, groups=GROUPS))
    attacker.enter()
    good = msgspec.json.encode(identity())
    for rank, body in enumerate((good, good[:-1] + b',"\\ud800":1}')):
        reply = ask(
            attacker.socket,
            protocol.Register(
                **attacker.head,
                engine="e",
                rank=rank,
                world_size=2,
                identity=body,
                layout=b"{}",
                groups=GROUPS,
                object_bytes=[OBJECT],
            ),
        )
    assert isinstance(reply, protocol.ErrorReply)
    assert (reply.code, "\\ud800" in reply.message) == ("identity_mismatch", True)


def test_a_flood_of_hellos_locks_nobody_out(
    server: ServerProcess, attack: MakeAttacker, victim: ClientProcess
) -> None:
    """More sessions than there may be: the silent lockless ones make room, others stay."""
    attacker = attack()
    body = protocol.encode(protocol.Hello(proto_min=1, proto_max=1, kind="cli"))
    for number in range(5000):
        attacker.socket.send_multipart([number.to_bytes(8, "little"), body])
        if number % 500 == 0:
            attacker.enter()
    attacker.enter()
    assert victim.call("check") == 8
    assert victim.call("lookup", 1, 8) == 8
    with ClientProcess(server.url) as newcomer:
        newcomer.call("join", "newcomer", OBJECT)


def test_a_flood_of_waits_takes_little(
    server: ServerProcess, attack: MakeAttacker, victim: ClientProcess
) -> None:
    """Flushes and polls that wait do not pile up, and others are answered meanwhile."""
    assert server.process is not None
    attacker = attack()
    memory = private_bytes(server.process.pid)
    head = attacker.head
    far = protocol.encode(protocol.Flush(**head, seq=2**62, wait_ms=10_000))
    done = protocol.encode(protocol.Flush(**head, seq=0, wait_ms=10_000))
    check = protocol.encode(protocol.AdminVerify(**head))
    at_once = 0
    for number in range(8000):
        body = far if number % 2 else check if number % 100 == 0 else done
        attacker.socket.send_multipart([number.to_bytes(8, "little"), body])
        if number % 200 != 199:
            continue
        # All are read, lest answers are dropped.
        last = send(attacker.socket, protocol.Ping(**head))
        while True:
            answered, reply = receive(attacker.socket)
            if answered == last:
                break
            at_once += isinstance(reply, protocol.NotYet)
    assert at_once == 4000 - MAX_FLUSHES_PER_SESSION
    assert victim.call("lookup", 1, 8) == 8
    assert private_bytes(server.process.pid) - memory < 16 << 20


def test_a_refused_reserve_takes_no_slot(server: ServerProcess, attack: MakeAttacker) -> None:
    """A reserve that is refused for its last mask holds nothing of its first ones."""
    attacker = attack()
    ask(attacker.socket, protocol.Bind(**attacker.head, groups=GROUPS))
    attacker.enter()
    register = attacker.templates()[1]
    assert isinstance(ask(attacker.socket, register), protocol.Registered)
    reserve = protocol.Reserve(
        **attacker.head, engine="attacker", rank=0, hashes=b"h" * 64, masks=[1, 2]
    )
    reply = ask(attacker.socket, reserve)
    assert isinstance(reply, protocol.ErrorReply)
    stats = ask(attacker.socket, protocol.Stats(**attacker.head))
    assert isinstance(stats, protocol.JsonReply)
    assert msgspec.json.decode(stats.body)["pool"]["reservations"] == 0


def test_an_engine_name_belongs_to_its_process(
    server: ServerProcess, victim: ClientProcess
) -> None:
    """Another process cannot take a living engine's name; a dead one's it can at once."""
    with ClientProcess(server.url) as other:
        with pytest.raises(RuntimeError, match="another living process"):
            other.call("join", "victim", OBJECT)
    assert victim.call("lookup", 1, 8) == 8
    victim.kill()
    with ClientProcess(server.url) as heir:
        heir.call("join", "victim", OBJECT)
        assert heir.call("lookup", 1, 8) == 8


def test_sizes_are_part_of_what_is_shared(
    server: ServerProcess, attack: MakeAttacker, victim: ClientProcess
) -> None:
    """The same identity with objects of another length shares nothing: offsets would lie."""
    attacker = attack()
    found = []
    for nbytes in (OBJECT, 2 * OBJECT):
        reply = ask(
            attacker.socket,
            protocol.Register(
                **attacker.head,
                engine=f"of {nbytes}",
                rank=0,
                world_size=1,
                identity=msgspec.json.encode(identity()),
                layout=msgspec.json.encode({"rank": 0, "bytes": OBJECT}),
                groups=GROUPS,
                object_bytes=[nbytes],
            ),
        )
        assert isinstance(reply, protocol.Registered)
        found.append(reply.fingerprint)
    stats = ask(attacker.socket, protocol.Stats(**attacker.head))
    assert isinstance(stats, protocol.JsonReply)
    engines = msgspec.json.decode(stats.body)["engines"]
    victims = next(one["fingerprint"] for one in engines if one["engine"] == "victim")
    assert found[0] == victims
    assert found[1] != victims


def test_a_lock_that_is_no_file_stops_nothing(
    server: ServerProcess, attack: MakeAttacker, victim: ClientProcess
) -> None:
    """A client lock that cannot be looked at is refused, and dead clients are noticed still."""
    attacker = attack()
    first = hello(attacker.socket, "worker")
    assert first.pool is not None
    folder = PoolPaths(Path(first.pool.path)).clients
    (folder / ("0" * 32)).symlink_to("/etc/passwd")
    (folder / ("1" * 32)).mkdir()
    for token in ("0" * 32, "1" * 32, "2" * 32):
        reply = ask(
            attacker.socket,
            protocol.Hello(
                proto_min=1, proto_max=1, kind="worker", lock=token, session=first.session
            ),
        )
        assert isinstance(reply, protocol.ErrorReply)
        assert reply.code == "lease"
    # One that was fine when it was named and is not any more.
    lock = ClientLock.of_process(PoolPaths(Path(first.pool.path)))
    path = PoolPaths(Path(first.pool.path)).client_lock(lock.token)
    path.unlink()
    path.mkdir()
    victim.kill()

    def stats() -> Any:
        cli = hello(attacker.socket)
        reply = ask(attacker.socket, protocol.Stats(boot=cli.boot, session=cli.session))
        assert isinstance(reply, protocol.JsonReply)
        return msgspec.json.decode(reply.body)

    wait_until(lambda: stats()["counters"]["dead_clients"] == 1, "the dead one is noticed")
    wait_until(lambda: stats()["leased_bytes"] == 0, "its leases are back")
    path.rmdir()


def test_a_large_message_takes_what_it_weighs(server: ServerProcess, attack: MakeAttacker) -> None:
    """A client that floods with the largest messages fills a bounded queue, no more."""
    assert server.process is not None
    attacker = attack()
    memory = private_bytes(server.process.pid)
    noise = b"\xc6" + (protocol.MAX_MESSAGE_BYTES - 5).to_bytes(4, "big")
    noise += bytes(protocol.MAX_MESSAGE_BYTES - 5)
    peak = 0
    for number in range(100):
        attacker.socket.send_multipart([number.to_bytes(8, "little"), noise])
        peak = max(peak, private_bytes(server.process.pid) - memory)
    attacker.enter()
    assert peak < 400 << 20
