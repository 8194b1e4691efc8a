"""A client and a server that behaves: the session, the calls, the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from lmcache_persist import protocol
from lmcache_persist.connector import CacheClient, Change, ClientOptions, PoolMap
from lmcache_persist.errors import (
    ConfigError,
    IncompatibleAlignment,
    LeaseError,
    RegistrationError,
    RequestTimeout,
    ServerUnreachable,
    UnexpectedChunkSize,
    UnsupportedVersion,
)
from support.fake_server import (
    BOOT_A,
    GROUPS,
    OBJECT_BYTES,
    POOL_BYTES,
    REGISTRATION,
    FakeServer,
    binding_bytes,
    make_binding,
)
from support.waiting import stays, wait_until

Serve = Callable[..., FakeServer]
Connect = Callable[..., CacheClient]
KEY = b"k" * 32


def bound(server: FakeServer | None, chunk_size: int) -> protocol.BindReply:
    """The answer to a bind; without a server it is one of a dry run."""
    binding = make_binding(chunk_size)
    if server is not None:
        server.binding = binding
    return protocol.BindReply(outcome="bound", binding=binding_bytes(binding))


def test_package_does_not_load_torch() -> None:
    """Importing the client loads neither torch nor vllm."""
    code = (
        "import sys, lmcache_persist.connector\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'lmdb', 'sqlalchemy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_hello_twice_with_lock_and_pool(serve: Serve, connect: Connect) -> None:
    """A worker says hello, takes a client lock, maps the pool, says hello with the lock."""
    server = serve()
    client = connect("worker")
    first, second = server.got(protocol.Hello)
    assert (first.lock, first.session) == ("", "")
    assert second.session == server.sessions[0]
    assert server.paths.client_lock(second.lock).exists()
    pool = client.pool(BOOT_A)
    assert pool is not None
    assert pool.size_bytes == POOL_BYTES
    assert client.boot_id == BOOT_A
    assert client.binding == server.binding


@pytest.mark.parametrize(("kind", "hellos", "mapped"), [("scheduler", 2, False), ("cli", 1, False)])
def test_kinds_that_map_no_pool(
    serve: Serve, connect: Connect, kind: str, hellos: int, mapped: bool
) -> None:
    """A scheduler takes a lock but no mapping, a verb neither."""
    server = serve()
    client = connect(kind)
    assert len(server.got(protocol.Hello)) == hellos
    assert (client.pool(BOOT_A) is not None) is mapped


def test_bind_is_remembered_in_binding(serve: Serve, connect: Connect) -> None:
    """After a bind the client knows the binding and sends its id with every request."""
    server = serve(binding=None)
    client = connect()
    assert client.binding is None
    outcome = client.bind(GROUPS, base=64, who="me")
    assert outcome.outcome == "bound"
    assert client.binding == outcome.binding == server.binding
    client.register(REGISTRATION)
    sent = server.got(protocol.Register)[-1]
    assert sent.binding == outcome.binding.binding_id
    assert sent.object_bytes == [OBJECT_BYTES]


def test_dry_run_changes_nothing_at_the_client(serve: Serve, connect: Connect) -> None:
    """A dry-run bind leaves the client without a binding and is not repeated later."""
    server = serve(binding=None)
    client = connect()
    client.bind(GROUPS, dry_run=True)
    assert client.binding is None
    assert server.got(protocol.Bind)[-1].dry_run


def test_bind_refusal_is_typed_and_makes_cold(serve: Serve, connect: Connect) -> None:
    """A refused bind raises the server's error; lookups and stores then fail with it at once."""
    server = serve()
    refusal = protocol.ErrorReply(
        code="incompatible_alignment",
        message="bound to 64",
        hint="another server",
        fields=b'{"chunk_size": 64, "hint": 1, "message": 2}',
    )
    server.on(protocol.Bind, lambda _: refusal)
    client = connect()
    with pytest.raises(IncompatibleAlignment, match="bound to 64") as caught:
        client.bind(GROUPS)
    assert caught.value.fields == {"chunk_size": 64}
    assert caught.value.hint == "another server"
    assert isinstance(client.cold, IncompatibleAlignment)
    result = client.lookup(engine="engine", hashes=[KEY], num_tokens=65).poll()
    assert result is not None
    assert result.error is client.cold
    with pytest.raises(IncompatibleAlignment):
        client.commit([1]).result(0)
    client.ping()
    assert not server.got(protocol.Lookup)


def test_expected_size_is_asked_for_before_it_is_bound(serve: Serve, connect: Connect) -> None:
    """A server of another size is refused with both named, and is not bound by it; a server
    of the expected one is bound as ever.
    """
    server = serve(binding=None)
    server.on(protocol.Bind, lambda asked: bound(None if asked.dry_run else server, 128))
    client = connect()
    with pytest.raises(UnexpectedChunkSize, match=r"size of 128, expected 64") as caught:
        client.bind(GROUPS, expect=64)
    assert server.url in caught.value.message
    assert (caught.value.fields["chunk_size"], caught.value.fields["expected"]) == (128, 64)
    assert client.cold is caught.value
    assert [asked.dry_run for asked in server.got(protocol.Bind)] == [True]
    assert client.bind(GROUPS, expect=128).binding.chunk_size == 128
    assert client.cold is None
    assert [asked.dry_run for asked in server.got(protocol.Bind)[1:]] == [True, False]


def test_size_that_changes_between_asking_and_binding_is_refused(
    serve: Serve, connect: Connect
) -> None:
    """Another engine may win the bind in that moment."""
    server = serve()
    server.on(protocol.Bind, lambda asked: bound(None, 64 if asked.dry_run else 128))
    client = connect()
    with pytest.raises(UnexpectedChunkSize, match="128"):
        client.bind(GROUPS, expect=64)
    assert isinstance(client.cold, UnexpectedChunkSize)


def test_agreement_to_what_was_refused_ends_the_cold(serve: Serve, connect: Connect) -> None:
    """A registration's refusal ends when that registration is agreed to, and by nothing else."""
    server = serve(binding=make_binding())
    client = connect("worker")
    client.bind(GROUPS)
    refusal = protocol.ErrorReply(code="registration", message="object sizes")
    server.on(protocol.Register, lambda _: refusal)
    with pytest.raises(RegistrationError, match="object sizes"):
        client.register(REGISTRATION)
    assert isinstance(client.cold, RegistrationError)
    client.bind(GROUPS)
    assert isinstance(client.cold, RegistrationError)
    del server.handlers[protocol.Register]
    client.register(replace(REGISTRATION, rank=1, world_size=2))
    assert isinstance(client.cold, RegistrationError)
    client.register(REGISTRATION)
    assert client.cold is None
    assert client.commit([1]).result(20).seq


def test_refused_bind_registers_nothing(serve: Serve, connect: Connect) -> None:
    """A registration is made for a chunk size: without one it raises the bind's refusal."""
    server = serve(binding=make_binding())
    refusal = protocol.ErrorReply(code="incompatible_alignment", message="bound to 64")
    server.on(protocol.Bind, lambda _: refusal)
    client = connect("worker")
    with pytest.raises(IncompatibleAlignment):
        client.bind(GROUPS)
    with pytest.raises(IncompatibleAlignment):
        client.register(REGISTRATION)
    assert not server.got(protocol.Register)


def test_reserve_write_commit(serve: Serve, connect: Connect) -> None:
    """Granted slots can be written through the pool, and a commit's number is kept."""
    server = serve()
    offset = POOL_BYTES - OBJECT_BYTES
    server.on(
        protocol.Reserve,
        lambda m: protocol.Reserved(grants=[protocol.Grant(0, 7, [offset])], stored=[1]),
    )
    server.on(protocol.Commit, lambda m: protocol.Committed(seq=41, durable_seq=40))
    client = connect("worker")
    client.register(REGISTRATION)
    reply = client.reserve(engine="engine", rank=0, hashes=[KEY, b"l" * 32], masks=[1, 1]).result(5)
    pool = client.pool(reply.boot)
    assert pool is not None
    with pool.pin():
        pool.view(reply.grants[0].offsets[0], OBJECT_BYTES)[:] = b"z" * OBJECT_BYTES
    assert server.paths.pool.read_bytes()[offset:] == b"z" * OBJECT_BYTES
    client.commit([7]).result(5)
    assert (client.last_seq, client.durable_seq) == (41, 40)


def test_give_back_is_sent(serve: Serve, connect: Connect) -> None:
    """Given-back reservations reach the server, without a call having waited."""
    server = serve()
    client = connect("worker")
    client.give_back([3, 4])
    sent = wait_until(lambda: server.got(protocol.GiveBack), "give_back arrives")
    assert sent[0].reservations == [3, 4]


def test_flush_asks_until_durable(serve: Serve, connect: Connect) -> None:
    """Flush repeats itself while the answer is "not yet" and returns the durable number."""
    server = serve()
    answers: list[protocol.Reply] = [
        protocol.NotYet(durable_seq=1),
        protocol.NotYet(durable_seq=2),
        protocol.Flushed(durable_seq=9),
    ]
    server.on(protocol.Flush, lambda _: answers.pop(0))
    client = connect("cli")
    assert client.flush(20) == 9
    assert client.durable_seq == 9
    # "All so far" is asked for by number, or others' commits would move the goal.
    assert {message.seq for message in server.got(protocol.Flush)} == {9}


def test_flush_gives_up(serve: Serve, connect: Connect) -> None:
    """A flush that never becomes durable raises and says how far it came."""
    server = serve()
    server.on(protocol.Flush, lambda _: protocol.NotYet(durable_seq=5))
    client = connect("cli")
    with pytest.raises(RequestTimeout, match="flush is at 5"):
        client.flush(0.5)
    assert client.connected


def test_stats_and_generic_request(serve: Serve, connect: Connect) -> None:
    """Numbers come as a dict, and any message type can be sent with its own fields."""
    server = serve()
    client = connect("cli")
    assert client.stats() == {"fake": True, "committed_seq": 9}
    reply = client.request(protocol.AdminVerify, timeout_s=5, cursor=b"c")
    assert isinstance(reply, protocol.Done)
    assert server.got(protocol.AdminVerify)[0].cursor == b"c"


def test_heartbeat_starts_with_the_connection(serve: Serve, connect: Connect) -> None:
    """A client that asks for nothing still sends pings."""
    server = serve()
    connect("worker")
    wait_until(lambda: len(server.got(protocol.Ping)) >= 3, "three pings")


def test_on_change_tells_of_the_present_connection(serve: Serve, connect: Connect) -> None:
    """A late listener is told of the connection that is there; its failure is its own."""
    serve()
    client = connect()
    heard: list[Change] = []

    def failing(change: Change) -> None:
        heard.append(change)
        raise RuntimeError("the listener's own")

    client.on_change(failing)
    change = wait_until(lambda: heard, "listener is called")[0]
    assert (change.generation, change.boot_id, change.cold) == (1, BOOT_A, None)
    assert change.binding == make_binding()
    client.ping()


def test_waiting_call_on_io_thread_is_refused(serve: Serve, connect: Connect) -> None:
    """A waiting call inside on_change is refused: it would wait for itself."""
    serve()
    client = connect()
    caught: Future[None] = Future()

    def listener(_: Change) -> None:
        try:
            client.ping()
        except RuntimeError as error:
            caught.set_exception(error)

    client.on_change(listener)
    with pytest.raises(RuntimeError, match="wait for itself"):
        caught.result(20)


def test_no_server_says_how_to_start_one(connect: Connect, url: str) -> None:
    """Without a server the wait ends with an error that names the command."""
    client = connect(wait=False)
    with pytest.raises(ServerUnreachable, match="lmcache-persist serve --data-dir") as caught:
        client.wait_connected(0.05)
    assert url in str(caught.value)
    assert client.breaker_open
    with pytest.raises(ServerUnreachable):
        client.commit([1]).result(0)
    with pytest.raises(ServerUnreachable):
        client.ping()


def test_server_that_comes_later_is_found(serve: Serve, connect: Connect) -> None:
    """A client that was started first connects by itself, and binds what it was asked to."""
    client = connect(wait=False)
    with pytest.raises(ServerUnreachable):
        client.bind(GROUPS, timeout_s=0.05)
    server = serve(binding=None)
    client.wait_connected(20)
    assert client.binding is not None
    assert len(server.got(protocol.Bind)) == 1


def test_version_mismatch_ends_the_wait(serve: Serve, connect: Connect) -> None:
    """A server of another protocol version is an error long before the time-out."""
    server = serve()
    server.on(
        protocol.Hello,
        lambda _: protocol.ErrorReply(code="unsupported_version", message="speaks 7 to 9"),
    )
    with pytest.raises(UnsupportedVersion, match="speaks 7 to 9"):
        connect(wait=False).wait_connected(60)


def test_pool_out_of_reach_ends_the_wait(serve: Serve, connect: Connect) -> None:
    """A worker that cannot see the pool says so, and what to do."""
    server = serve()
    server.paths.pool.unlink()
    with pytest.raises(LeaseError, match=r"cannot be mapped.*must see"):
        connect("worker", wait=False).wait_connected(60)


def test_close_says_bye_and_ends_the_thread(serve: Serve, connect: Connect) -> None:
    """Closing gives the session up, ends the thread, is repeatable; later calls fail at once."""
    server = serve()
    client = connect("worker")
    threads = [t for t in threading.enumerate() if t.name == "lmcache-persist-io"]
    client.close()
    client.close()
    assert server.got(protocol.Bye)
    assert not any(t.is_alive() for t in threads)
    assert client.pool(BOOT_A) is None
    with pytest.raises(ServerUnreachable):
        client.commit([1]).result(0)
    with pytest.raises(ServerUnreachable):
        client.wait_connected(1)


def _use_in_child(client: CacheClient, pool: PoolMap) -> bytes:
    """What came of using a parent's client in a forked child."""
    verdict = b"used"
    try:
        client.commit([1])
    except RuntimeError:
        verdict = b"refused"
    try:
        pool.view(0, 1)
        verdict += b", pool used"
    except RuntimeError:
        pass
    client.close()
    return verdict


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_is_refused(serve: Serve, connect: Connect) -> None:
    """A forked child cannot use its parent's client, and may close it; the parent goes on."""
    server = serve()
    client = connect("worker")
    pool = client.pool(BOOT_A)
    assert pool is not None
    read_end, write_end = os.pipe()
    # As if another thread were just handing work in: in the child nobody lets go of it.
    guard = client._session._transport._inbox._guard
    guard.acquire()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            os.write(write_end, _use_in_child(client, pool))
        finally:
            os._exit(0)
    guard.release()
    os.close(write_end)
    assert os.read(read_end, 100) == b"refused"
    os.close(read_end)
    os.waitpid(child, 0)
    client.ping()
    assert not server.got(protocol.Bye)
    stays(lambda: client.connected, "the parent is connected", 0.05)


def test_bad_arguments(url: str, tmp_path: Path) -> None:
    """Wrong kinds, endpoints and options are refused before a thread is started."""
    with pytest.raises(ValueError, match="kind is 'driver'"):
        CacheClient(url, kind="driver")
    with pytest.raises(ConfigError, match="no port"):
        CacheClient("localhost", kind="cli")
    with pytest.raises(ConfigError, match="heartbeat_s is 0"):
        ClientOptions(heartbeat_s=0)
    with pytest.raises(ConfigError, match="request_timeout_s is nan"):
        ClientOptions(request_timeout_s=float("nan"))
