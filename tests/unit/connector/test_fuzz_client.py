"""A hostile server: mutated replies, impossible greetings, floods. The client outlives it."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_persist import protocol
from lmcache_persist.connector import CacheClient
from lmcache_persist.connector.transport import _MAX_RETIRED, Transport, _Call
from lmcache_persist.endpoint import parse_endpoint
from lmcache_persist.errors import (
    LeaseError,
    MalformedMessage,
    PersistError,
    RequestTimeout,
    UnsupportedVersion,
)
from lmcache_persist.protocol import Found, Grant, PoolInfo, Reserved, SlotRun
from support.fake_server import (
    BOOT_A,
    BOOT_B,
    GROUPS,
    OBJECT_BYTES,
    POOL_BYTES,
    REGISTRATION,
    FakeServer,
    binding_bytes,
    make_binding,
)
from support.mutation import mutate
from support.waiting import wait_until

Serve = Callable[..., FakeServer]
Connect = Callable[..., CacheClient]
ROUNDS = 250
KEYS = [b"k" * 32, b"l" * 32]


def hit(_: object) -> Found:
    """A good answer to the lookups made here."""
    return Found(tokens=128, runs=[SlotRun(0, 0, 0, OBJECT_BYTES, [0, OBJECT_BYTES])])


def grants(_: object) -> Reserved:
    """A good answer to the reserves made here."""
    return Reserved(grants=[Grant(0, 1, [0]), Grant(1, 2, [OBJECT_BYTES])])


def io_threads() -> int:
    """I/O threads of clients in this process."""
    return sum(thread.name == "lmcache-persist-io" for thread in threading.enumerate())


def use(client: CacheClient) -> int:
    """One of every call; what is promised is inside of the pool. How many calls succeeded."""
    handle = client.lookup(engine="engine", hashes=KEYS, num_tokens=129)
    futures: list[Any] = [
        client.reserve(engine="engine", rank=0, hashes=KEYS, masks=[1, 1]),
        client.commit([1, 2]),
    ]
    good = 0
    for call in (client.ping, client.stats, lambda: client.bind(GROUPS, timeout_s=0.3)):
        try:
            call()
            good += 1
        except PersistError:
            pass
    result = handle.wait(10)
    assert result is not None
    for run in result.runs:
        pool = client.pool(result.boot_id)
        if pool is not None:
            for offset in run.offsets:
                assert len(bytes(pool.view(offset, run.object_bytes))) == run.object_bytes
                good += 1
    handle.release()
    for future in futures:
        error = future.exception(10)
        assert error is None or isinstance(error, PersistError)
        good += error is None
    if futures[0].exception() is None:
        reply = futures[0].result()
        pool = client.pool(reply.boot)
        for grant in reply.grants:
            for offset in grant.offsets:
                if pool is not None:
                    pool.view(offset, OBJECT_BYTES)
    return good


def test_mutated_replies(serve: Serve, connect: Connect, seed: int) -> None:
    """Replies mutated at random end no thread, hang no caller and lead out of no pool."""
    draw = random.Random(seed)
    server = serve()
    server.on(protocol.Lookup, hit)
    server.on(protocol.Reserve, grants)
    # A bind without an answer is waited for as long as a start waits for its server.
    client = connect("client", reconnect_min_s=0.001, reconnect_max_s=0.005, connect_timeout_s=0.5)
    client.register(REGISTRATION)
    threads, plain, mutated = io_threads(), server.answer, 0

    def rate(message: protocol.Request) -> float:
        # Greetings too, but not so often that nothing else is ever said.
        return 0.1 if isinstance(message, protocol.Hello | protocol.Register) else 0.3

    def answer(message: protocol.Request) -> Any:
        nonlocal mutated
        reply = plain(message)
        if isinstance(reply, bytes | list) or reply is None or draw.random() > rate(message):
            return reply
        mutated += 1
        body = mutate(server.encode(reply), draw, [BOOT_A, BOOT_B, POOL_BYTES, -OBJECT_BYTES])
        kind = draw.random()
        if kind < 0.03:
            return None
        return [server.last[1], body, b"more"] if kind < 0.06 else body

    server.answer = answer  # type: ignore[method-assign]
    good = 0
    for _ in range(ROUNDS):
        wait_until(lambda: client.connected, "connected again")
        good += use(client)
    server.answer = plain  # type: ignore[method-assign]
    assert mutated > ROUNDS / 2
    assert good > ROUNDS  # it was connected in between, or nothing was tested
    assert io_threads() == threads
    # A hostile bind may have left it cold; a good one mends that.
    wait_until(lambda: client.connected, "connected at the end")
    client.bind(GROUPS, timeout_s=10)
    assert client.lookup(engine="engine", hashes=KEYS, num_tokens=129).wait(10) is not None
    client.commit([1]).result(10)
    print(f"seed {seed}: {mutated} mutated replies, {good} calls succeeded")


ELSEWHERE = [
    "",
    "/",
    ".",
    "relative.pool",
    "/etc/passwd",
    "/tmp/x.pool",
    "/a\0b.pool",
    f"/a\0/lmcache-persist-{'0' * 32}.pool",
    f"lmcache-persist-{'0' * 32}.pool",
    "/" + "x" * 5000,
]


@pytest.mark.parametrize("path", ELSEWHERE)
def test_a_pool_that_is_no_pool(serve: Serve, connect: Connect, path: str) -> None:
    """A server cannot name a file for the client to map, or a folder to make its lock in."""
    server = serve()
    plain = server.plain_answer

    def elsewhere(message: Any) -> Any:
        welcome = plain(message)
        return protocol.Welcome(
            proto=1,
            session=welcome.session,
            version="1",
            pool=PoolInfo(path=path, size_bytes=POOL_BYTES),
        )

    server.on(protocol.Hello, elsewhere)
    client = connect("client", wait=False)
    with pytest.raises(MalformedMessage, match="pool is at"):
        client.wait_connected(20)
    del server.handlers[protocol.Hello]
    wait_until(lambda: client.connected, "a good server is accepted after that")


def test_a_pool_that_is_no_file(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    """A folder in the pool's place is not mapped."""
    server = serve()
    server.paths.pool.unlink()
    server.paths.pool.mkdir()
    with pytest.raises(LeaseError):
        connect("client", wait=False).wait_connected(20)


def test_a_pool_that_changes(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    """One boot has one pool: another size under the same boot id is refused."""
    server = serve()
    client = connect("client")
    server.pool_bytes *= 2
    server.on(protocol.Commit, lambda _: b"junk")
    with pytest.raises(MalformedMessage):
        client.commit([1]).result(10)
    wait_until(lambda: not client.connected, "it starts over")
    with pytest.raises(MalformedMessage, match="as before"):
        client.wait_connected(5)
    pool = client.pool(BOOT_A)
    assert pool is not None and pool.size_bytes == POOL_BYTES


@pytest.mark.parametrize("proto", [0, 2, 2**40, -1])
def test_a_version_nobody_asked_for(serve: Serve, connect: Connect, proto: int) -> None:
    """A server that answers with a version the client does not speak is refused by version."""
    server = serve()
    server.on(
        protocol.Hello,
        lambda _: protocol.Welcome(proto=proto, session="c" * 32, version="9.9"),
    )
    with pytest.raises(UnsupportedVersion, match=r"9\.9.*protocol " + str(proto)):
        connect("client", wait=False).wait_connected(20)


@pytest.mark.parametrize("kind", ["welcome", "error"])
def test_a_later_server_is_understood(serve: Serve, connect: Connect, kind: str) -> None:
    """Fields that a later server adds to its greeting or refusal are passed over."""
    import msgspec

    server = serve()
    plain = server.plain_answer

    def later(message: Any) -> bytes:
        reply = plain(message)
        if kind == "error":
            reply = protocol.ErrorReply(code="unsupported_version", message="only 7 to 9")
        value = msgspec.msgpack.decode(server.encode(reply))
        return msgspec.msgpack.encode({**value, "added_later": [1]})

    server.on(protocol.Hello, later)
    client = connect("client", wait=False)
    if kind == "welcome":
        client.wait_connected(20)
    else:
        with pytest.raises(UnsupportedVersion, match="7 to 9"):
            client.wait_connected(20)


@pytest.mark.parametrize("number", ["9" * 4000, str(2**31), "0", "1.5", "true"])
def test_a_chunk_size_out_of_range(serve: Serve, connect: Connect, number: str) -> None:
    """A binding whose chunk size no prompt can have is not believed."""
    server = serve()
    body = json.dumps(make_binding().to_json())
    bad = body.replace('"chunk_size": 64', f'"chunk_size": {number}').encode()
    assert bad != binding_bytes(make_binding())
    client = connect("cli")
    server.on(protocol.Bind, lambda _: protocol.BindReply(outcome="bound", binding=bad))
    with pytest.raises(MalformedMessage, match="chunk_size"):
        client.bind(GROUPS)


def test_a_flood_on_a_given_up_connection(url: str) -> None:
    """Of a connection that timed out so many replies are read per turn, however many come."""
    owner: Any = SimpleNamespace(on_lost=lambda error: None)
    transport = Transport(parse_endpoint(url, what="server"), owner, 16)
    read = 0

    def receive() -> list[bytes]:
        nonlocal read
        read += 1
        if read > 10_000:
            raise AssertionError("the turn has no end")
        return [b"unknown.", b"x"]

    flooded: Any = SimpleNamespace(calls={b"expected": owner}, receive=receive, ended=lambda: False)
    transport._retired.append(flooded)
    transport._serve_retired(flooded)
    assert 0 < read < 1000
    assert transport._retired == [flooded]
    transport._retired.clear()
    transport.start()
    assert transport.stop(10)


def test_few_given_up_connections_are_kept(url: str) -> None:
    """Of connections that timed out the latest few are listened to; the others are closed."""
    owner: Any = SimpleNamespace(on_lost=lambda error: None)
    transport = Transport(parse_endpoint(url, what="server"), owner, 16)
    wires = []
    for number in range(3 * _MAX_RETIRED):
        transport.connect(1.0)
        wire = transport._wire
        assert wire is not None
        wire.connected = True
        wire.calls[bytes([number])] = _Call(lambda _: None, lambda _: None)
        wires.append(wire)
        transport.drop(RequestTimeout("no answer"), listen=True)
    closed = [wire.socket.closed for wire in wires]
    assert closed == [True] * 2 * _MAX_RETIRED + [False] * _MAX_RETIRED
    transport.start()
    assert transport.stop(10)
    assert all(wire.socket.closed for wire in wires)
