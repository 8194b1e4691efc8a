"""A client and a server that dies, hangs, or is another one all of a sudden."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest

from lmcache_persist import protocol
from lmcache_persist.connector import CacheClient, Change
from lmcache_persist.connector.unreachable import Finding
from lmcache_persist.errors import (
    IdentityMismatch,
    IncompatibleAlignment,
    PersistError,
    RequestTimeout,
    ServerUnreachable,
    Stale,
    TransportError,
    UnexpectedChunkSize,
)
from support.fake_server import (
    BOOT_A,
    BOOT_B,
    GROUPS,
    REGISTRATION,
    FakeServer,
    binding_bytes,
    make_binding,
)
from support.waiting import stays, wait_until

Serve = Callable[..., FakeServer]
Connect = Callable[..., CacheClient]
KEY = b"k" * 32
LATE_S = 30.0
"""A request time-out that no test waits for."""


def bound_worker(connect: Connect, **options: float) -> CacheClient:
    """A worker that has bound and registered."""
    client = connect("worker", **options)
    client.bind(GROUPS)
    client.register(REGISTRATION)
    return client


def test_a_server_that_went_is_looked_for(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """Log and later calls name what is there now; that a connection was closed is said once."""
    server = serve()
    client = connect("cli")
    path = Path(client.endpoint.path)
    server.close()
    path.unlink(missing_ok=True)
    wait_until(lambda: "is gone" in caplog.text, "the loss is logged")
    with pytest.raises(ServerUnreachable, match="no socket there") as caught:
        client.stats()
    assert caught.value.fields["reason"] == "absent"
    with socket.socket(socket.AF_UNIX) as plug:
        plug.bind(str(path))
        with pytest.raises(ServerUnreachable, match="connection refused"):
            client.stats()
    told = [line for line in caplog.messages if "is gone" in line]
    assert len(told) == 1
    assert f"server {client.endpoint} closed the connection" in told[0]


def test_the_log_says_what_is_there_now(
    serve: Serve,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside the connection that was closed: no socket any more."""
    server = serve()
    connect("cli")
    found = Finding("absent", "no socket there")
    monkeypatch.setattr("lmcache_persist.connector.session.look", lambda *_: found)
    server.close()
    wait_until(lambda: "is gone" in caplog.text, "the loss is logged")
    assert "closed the connection; now: no socket there" in caplog.text


def test_restart_is_survived(serve: Serve, connect: Connect) -> None:
    """After a restart the client greets, binds and registers again, and tells its listener."""
    first = serve()
    client = bound_worker(connect)
    heard: list[Change] = []
    client.on_change(heard.append)
    first.close()
    wait_until(lambda: client.breaker_open, "the end is noticed")
    second = serve(boot=BOOT_B, binding=make_binding(128))
    wait_until(lambda: len(heard) == 2, "listener hears of the new server")
    assert (heard[1].boot_id, heard[1].binding) == (BOOT_B, second.binding)
    assert heard[1].cold is None
    kinds = [type(message) for message in second.requests]
    assert kinds[:4] == [protocol.Hello, protocol.Hello, protocol.Bind, protocol.Register]
    assert second.got(protocol.Register)[0].binding == make_binding(128).binding_id
    assert client.binding == second.binding
    client.commit([1]).result(20)


def test_dead_server_fails_calls_at_once(serve: Serve, connect: Connect) -> None:
    """Requests on the way fail when the server dies, later ones without having been sent."""
    server = serve()
    server.on(protocol.Commit, lambda _: None)
    client = connect("worker", request_timeout_s=LATE_S)
    waiting = client.commit([1])
    wait_until(lambda: server.got(protocol.Commit), "commit arrives")
    server.close()
    with pytest.raises(ServerUnreachable):
        waiting.result(20)
    wait_until(lambda: client.breaker_open, "breaker opens")
    with pytest.raises(ServerUnreachable):
        client.commit([2]).result(0)
    assert client.lookup(engine="engine", hashes=[KEY], num_tokens=65).poll() is not None


def test_silence_costs_one_timeout(serve: Serve, connect: Connect) -> None:
    """A server that stops answering fails what is on the way once; then the breaker is open."""
    server = serve()
    client = connect("worker")
    server.hang()
    errors = [client.commit([number]).exception(20) for number in range(3)]
    assert isinstance(errors[0], TransportError)
    wait_until(lambda: client.breaker_open, "breaker opens")
    with pytest.raises(ServerUnreachable):
        client.commit([2]).result(0)
    server.resume()
    wait_until(lambda: client.connected, "breaker closes")
    client.commit([3]).result(20)


def test_unanswered_request_times_out_and_others_fail_with_it(
    serve: Serve, connect: Connect
) -> None:
    """The request that timed out says so; the connection and what else was on it are given up."""
    server = serve()
    server.on(protocol.Commit, lambda _: None)
    client = connect("worker", heartbeat_s=LATE_S)
    first, second = client.commit([1]), client.commit([2])
    assert isinstance(first.exception(20), RequestTimeout)
    assert isinstance(second.exception(20), ServerUnreachable)
    wait_until(lambda: len(server.peers) == 2, "a new socket")


def test_late_reply_completes_nothing(serve: Serve, connect: Connect) -> None:
    """A reply to a request from before a reconnect never completes a later request."""
    server = serve()
    server.on(protocol.Commit, lambda _: None)
    client = connect("worker")
    assert isinstance(client.commit([1]).exception(20), TransportError)
    old = server.heads[protocol.Commit]
    wait_until(lambda: client.connected, "connected again")
    later = client.commit([2])
    wait_until(lambda: len(server.got(protocol.Commit)) == 2, "second commit arrives")
    new_peer, new_id = server.heads[protocol.Commit]
    assert new_id != old[1]
    body = server.encode(protocol.Committed(seq=1))
    server.send_later([new_peer, old[1], body])
    server.send_later([new_peer, new_id, server.encode(protocol.Committed(seq=2))])
    assert later.result(20).seq == 2


def test_slots_granted_too_late_are_given_back(serve: Serve, connect: Connect) -> None:
    """Slots that were granted after the time-out go back to the same session."""
    server = serve()
    server.on(protocol.Reserve, lambda _: None)
    client = bound_worker(connect, heartbeat_s=LATE_S)
    asked = client.reserve(engine="engine", rank=0, hashes=[KEY], masks=[1])
    assert isinstance(asked.exception(20), RequestTimeout)
    peer, request_id = server.heads[protocol.Reserve]
    wait_until(lambda: client.connected, "connected again")
    grant = protocol.Reserved(grants=[protocol.Grant(0, 77, [0])])
    server.send_later([peer, request_id, server.encode(grant)])
    sent = wait_until(lambda: server.got(protocol.GiveBack), "give_back arrives")
    assert (sent[0].reservations, sent[0].session) == ([77], server.sessions[0])


def test_nothing_is_queued_for_the_next_server(serve: Serve, connect: Connect) -> None:
    """What was asked of a dead server, or of none, never reaches the next one."""
    first = serve()
    client = connect("worker")
    first.close()
    failed = [client.commit([number]) for number in range(100)]
    assert all(isinstance(future.exception(20), PersistError) for future in failed)
    wait_until(lambda: client.breaker_open, "the end is noticed")
    failed = [client.commit([number]) for number in range(100)]
    assert all(isinstance(future.exception(0), ServerUnreachable) for future in failed)
    second = serve(boot=BOOT_B)
    client.wait_connected(20)
    client.ping()
    assert not second.got(protocol.Commit)


def test_message_made_for_the_last_connection_is_not_sent(serve: Serve, connect: Connect) -> None:
    """A message that was made just before a reconnect fails; the next server never sees it."""
    first = serve()
    client = connect("worker")
    session = client._session
    link = session.link
    assert link is not None
    first.close()
    wait_until(lambda: client.breaker_open, "the end is noticed")
    second = serve(boot=BOOT_B)
    client.wait_connected(20)
    answered: Future[object] = Future()
    body = protocol.encode(protocol.Commit(**link.header(), reservations=[1]))
    session.send(link, body, LATE_S, answered.set_result)
    assert isinstance(answered.result(20), Stale)
    client.ping()
    assert not second.got(protocol.Commit)


def test_socket_never_connects_twice(serve: Serve, connect: Connect) -> None:
    """Work that waits for a busy I/O thread while the server is replaced never reaches the new."""
    first = serve()
    client = connect("worker")
    entered, gate = threading.Event(), threading.Event()

    def block(change: Change) -> None:
        if change.boot_id == BOOT_A:
            entered.set()
            gate.wait(20)

    client.on_change(block)
    assert entered.wait(20)
    first.close()
    second = serve(boot=BOOT_B)
    asked = [client.commit([number]) for number in range(3)]
    # Long enough for a socket that connects again by itself.
    stays(lambda: not second.requests, "the I/O thread is busy", 0.4)
    gate.set()
    assert all(isinstance(future.exception(20), TransportError) for future in asked)
    wait_until(lambda: client.boot_id == BOOT_B, "the new server is known")
    client.ping()
    assert not second.got(protocol.Commit)


def test_other_boot_in_any_reply_is_noticed(serve: Serve, connect: Connect) -> None:
    """A boot id that changed between two heartbeats is noticed in the next reply."""
    server = serve()
    client = connect("worker", heartbeat_s=LATE_S)
    heard: list[Change] = []
    client.on_change(heard.append)
    server.boot = BOOT_B
    server.sessions.clear()
    server.on(protocol.Commit, lambda _: protocol.Committed(seq=1))
    with pytest.raises(Stale):
        client.commit([1]).result(20)
    wait_until(lambda: client.boot_id == BOOT_B, "the new boot id is known")
    assert heard[-1].boot_id == BOOT_B
    assert client.last_seq == 0


def test_stale_error_starts_over(serve: Serve, connect: Connect) -> None:
    """The error "stale" makes the client say hello again."""
    server = serve()
    client = connect("worker", heartbeat_s=LATE_S)
    server.on(protocol.Commit, lambda _: protocol.ErrorReply(code="stale", message="who are you"))
    with pytest.raises(Stale, match="who are you"):
        client.commit([1]).result(20)
    wait_until(lambda: len(server.got(protocol.Hello)) == 4, "a second greeting")


def test_same_server_renews_the_session(serve: Serve, connect: Connect) -> None:
    """A client that lost only its connection keeps its session, and says what it still owes."""
    server = serve()
    client = bound_worker(connect)
    session = server.sessions[0]
    server.hang()
    assert client.commit([1]).exception(20) is not None
    wait_until(lambda: client.breaker_open, "breaker opens")
    client.give_back([5])
    server.resume()
    wait_until(lambda: client.connected, "connected again")
    assert server.got(protocol.Hello)[-1].session == session
    sent = wait_until(lambda: server.got(protocol.GiveBack), "what was owed is said")
    assert sent[0].session == session
    assert server.sessions == [session]


@pytest.mark.parametrize("sent", [True, False])
def test_slots_of_an_unheard_commit_are_given_back(
    serve: Serve, connect: Connect, sent: bool
) -> None:
    """Lost on the way, or never sent for want of a server: the slots do not stay reserved."""
    server = serve()
    client = bound_worker(connect)
    session = server.sessions[0]
    server.hang()
    if not sent:
        assert client.commit([]).exception(20) is not None
        wait_until(lambda: client.breaker_open, "breaker opens")
    assert client.commit([7]).exception(20) is not None
    server.resume()
    heard = wait_until(lambda: server.got(protocol.GiveBack), "they are given back")
    assert (heard[0].reservations, heard[0].session) == ([7], session)


def test_debts_to_a_dead_server_are_forgotten(serve: Serve, connect: Connect) -> None:
    """What a dead server was owed is not said to the next one."""
    first = serve()
    client = connect("worker")
    first.close()
    wait_until(lambda: client.breaker_open, "the end is noticed")
    client.give_back([5])
    second = serve(boot=BOOT_B)
    wait_until(lambda: len(second.got(protocol.Ping)) >= 2, "connected for a while")
    assert not second.got(protocol.GiveBack)


@pytest.mark.parametrize(
    ("kind", "code", "error"),
    [
        (protocol.Bind, "incompatible_alignment", IncompatibleAlignment),
        (protocol.Register, "identity_mismatch", IdentityMismatch),
    ],
)
def test_refusal_after_restart_means_cold(
    serve: Serve, connect: Connect, kind: type, code: str, error: type[PersistError]
) -> None:
    """A new server that refuses what is remembered leaves a client that is cold, and says so."""
    first = serve()
    client = bound_worker(connect)
    heard: list[Change] = []
    client.on_change(heard.append)
    first.close()
    wait_until(lambda: client.breaker_open, "the end is noticed")
    refusal = protocol.ErrorReply(code=code, message="not here")
    second = serve(boot=BOOT_B, pool_bytes=0)
    second.on(kind, lambda _: refusal)
    wait_until(lambda: len(heard) == 2 and heard[1].cold is not None, "listener hears of it")
    assert isinstance(heard[1].cold, error)
    assert isinstance(client.commit([1]).exception(0), error)
    stays(lambda: client.connected, "cold, and connected", 0.2)


def test_server_of_another_size_that_comes_later_is_refused(serve: Serve, connect: Connect) -> None:
    """The expectation holds after every connection: nothing is bound, registered or asked for
    at a server of another size, which says so; and the next right one is used again.
    """
    first = serve(binding=make_binding(64))
    client = connect("worker")
    client.bind(GROUPS, expect=64)
    client.register(REGISTRATION)
    heard: list[Change] = []
    client.on_change(heard.append)
    first.close()
    wait_until(lambda: client.breaker_open, "the end is noticed")
    second = serve(boot=BOOT_B, binding=make_binding(128))
    wait_until(lambda: len(heard) == 2, "listener hears of it")
    assert isinstance(heard[1].cold, UnexpectedChunkSize)
    for word in (second.url, "128", "64"):
        assert word in heard[1].cold.message
    assert client.cold is heard[1].cold
    assert [asked.dry_run for asked in second.got(protocol.Bind)] == [True]
    assert not second.got(protocol.Register)
    assert client.commit([1]).exception(0) is client.cold
    result = client.lookup(engine="engine", hashes=[KEY], num_tokens=65).poll()
    assert result is not None
    assert result.error is client.cold
    second.close()
    wait_until(lambda: client.breaker_open, "the end is noticed")
    third = serve(boot="c" * 32, binding=make_binding(64))
    wait_until(lambda: len(heard) == 3, "listener hears of the right one")
    assert heard[2].cold is None
    assert third.got(protocol.Register)
    assert client.commit([1]).result(20).seq


def test_unbound_server_is_used_once_somebody_binds_it_as_expected(
    serve: Serve, connect: Connect
) -> None:
    """No connection has to break for that: while it is unbound, every heartbeat asks."""
    server = serve(binding=None)
    would_be = make_binding(256)

    def answer(asked: protocol.Bind) -> protocol.BindReply:
        known = server.binding
        outcome = "compatible" if known else "bound"
        return protocol.BindReply(outcome=outcome, binding=binding_bytes(known or would_be))

    server.on(protocol.Bind, answer)
    client = connect("worker", heartbeat_s=0.05)
    with pytest.raises(UnexpectedChunkSize):
        client.bind(GROUPS, expect=64)
    heard: list[Change] = []
    client.on_change(heard.append)
    seen = len(server.got(protocol.Bind))
    wait_until(lambda: len(server.got(protocol.Bind)) > seen + 1, "it is asked again")
    assert all(asked.dry_run for asked in server.got(protocol.Bind))
    assert (client.binding, server.binding) == (None, None)
    server.binding = make_binding(64)
    wait_until(lambda: client.cold is None, "the agreement is noticed")
    assert client.binding == server.binding
    wait_until(lambda: len(heard) == 2, "listener hears of it")
    assert (heard[1].binding, heard[1].cold) == (server.binding, None)
    client.register(REGISTRATION)
    assert client.commit([1]).result(20).seq


@pytest.mark.parametrize("by", ["server", "client"])
def test_server_of_another_version_that_comes_later_is_gone_around(
    serve: Serve, connect: Connect, by: str
) -> None:
    """Case F4: the greeting decides, whoever refuses; calls fail at once and name both versions,
    nothing else is said to that server, and the next one that can be spoken to is used.
    """
    first = serve()
    client = bound_worker(connect)
    first.close()
    wait_until(lambda: client.breaker_open, "the end is noticed")
    second = serve(boot=BOOT_B)
    text = f"client speaks {protocol.PROTOCOL_VERSION} to 1, server 7 to 9"
    refusal = protocol.ErrorReply(code="unsupported_version", message=text)
    welcome = protocol.Welcome(proto=9, session="c" * 32, version="later")
    second.on(protocol.Hello, lambda _: refusal if by == "server" else welcome)
    wait_until(lambda: len(second.got(protocol.Hello)) > 2, "it is tried again and again")
    error = client.commit([1]).exception(0)
    assert isinstance(error, ServerUnreachable)
    for word in ("server 7 to 9",) if by == "server" else ("protocol 9", "this client 1 to 1"):
        assert word in error.message
    result = client.lookup(engine="engine", hashes=[KEY], num_tokens=65).poll()
    assert result is not None
    assert result.tokens == 0
    assert {type(message) for message in second.requests} == {protocol.Hello}
    second.close()
    serve(boot="c" * 32)
    wait_until(lambda: client.boot_id == "c" * 32, "the third is known")
    assert client.commit([1]).result(20).seq


@pytest.mark.parametrize("chunk_size", [128, None])
def test_start_at_the_wrong_server_is_remembered(
    serve: Serve, connect: Connect, chunk_size: int | None
) -> None:
    """Refused, bound to another size or about to be, a client still binds the right one later."""
    first = serve(binding=make_binding(chunk_size) if chunk_size else None)
    first.on(
        protocol.Bind,
        lambda _: protocol.BindReply(
            outcome="compatible" if chunk_size else "bound",
            binding=binding_bytes(make_binding(128)),
        ),
    )
    client = connect("scheduler")
    with pytest.raises(UnexpectedChunkSize):
        client.bind(GROUPS, expect=64)
    first.close()
    wait_until(lambda: client.breaker_open, "the end is noticed")
    second = serve(boot=BOOT_B)
    client.wait_connected(20)
    assert client.cold is None
    assert client.binding == second.binding
    assert [asked.dry_run for asked in second.got(protocol.Bind)] == [True, False]


def test_server_that_is_replaced_within_a_greeting(serve: Serve, connect: Connect) -> None:
    """The pool was mapped for the first one's slots: it is greeted anew, from the start."""
    server = serve()

    def answer(hello: protocol.Hello) -> protocol.Reply:
        welcome = server.plain_answer(hello)
        assert isinstance(welcome, protocol.Welcome)
        second = len(server.got(protocol.Hello)) == 2
        return msgspec.structs.replace(welcome, boot=BOOT_B) if second else welcome

    server.on(protocol.Hello, answer)
    client = connect("worker")
    assert client.boot_id == BOOT_A
    assert len(server.got(protocol.Hello)) == 4


def test_greeting_that_times_out_is_tried_again_once(serve: Serve, connect: Connect) -> None:
    """Whoever noticed the loss, one new connection follows, and it is left alone."""
    server = serve()
    server.on(protocol.Hello, lambda _: None)
    client = connect(wait=False, reconnect_min_s=0.5, reconnect_max_s=1.0, heartbeat_s=0.05)
    wait_until(lambda: len(server.got(protocol.Hello)) == 2, "tried again")
    server.handlers.clear()
    client.wait_connected(20)
    peers = len(server.peers)
    stays(lambda: len(server.peers) == peers and client.connections == 1, "one connection", 2.0)


def test_refused_stale_for_ever_does_not_spin(serve: Serve, connect: Connect) -> None:
    """A server that calls every request stale is tried again ever more slowly."""
    server = serve()
    server.on(protocol.Ping, lambda _: protocol.ErrorReply(code="stale", message="no"))
    connect("cli", heartbeat_s=0.01, reconnect_min_s=0.05, reconnect_max_s=LATE_S)
    wait_until(lambda: len(server.got(protocol.Hello)) >= 3, "tried again")
    seen = len(server.got(protocol.Hello))
    stays(lambda: len(server.got(protocol.Hello)) <= seen + 4, "no storm of hellos")


@pytest.fixture
def process(url: str, tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts fake servers as processes."""
    started: list[subprocess.Popen[str]] = []

    def start(boot: str) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-m", "support.fake_server", url, boot, str(tmp_path)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in started:
        child.kill()
        child.wait(20)
        if child.stdout is not None:
            child.stdout.close()


def test_stopped_killed_and_new_process(
    process: Callable[[str], subprocess.Popen[str]], connect: Connect
) -> None:
    """SIGSTOP opens the breaker, SIGCONT closes it, SIGKILL and a new process is a new boot."""
    server = process(BOOT_A)
    client = bound_worker(connect, request_timeout_s=2.0)
    server.send_signal(signal.SIGSTOP)
    os.waitpid(server.pid, os.WUNTRACED)  # returns once all of its threads stand still
    assert isinstance(client.commit([1]).exception(20), TransportError)
    wait_until(lambda: client.breaker_open, "breaker opens")
    assert isinstance(client.commit([1]).exception(0), ServerUnreachable)
    server.send_signal(signal.SIGCONT)
    client.wait_connected(20)
    assert client.boot_id == BOOT_A
    old_pool = client.pool(BOOT_A)
    assert old_pool is not None
    server.kill()
    server.wait(20)
    with old_pool.pin():
        process(BOOT_B)
        wait_until(lambda: client.boot_id == BOOT_B, "the new server is known")
        assert old_pool.view(0, 16).nbytes == 16
    wait_until(lambda: client.pool(BOOT_A) is None, "the old pool is let go")
    assert client.commit([1]).result(20).seq
