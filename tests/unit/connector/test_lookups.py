"""Lookups: polling, deadlines, release, and answers that cannot be."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from lmcache_persist import protocol
from lmcache_persist.connector import CacheClient, lookups
from lmcache_persist.errors import (
    LeaseError,
    MalformedMessage,
    RequestTimeout,
    ServerUnreachable,
    TransportError,
)
from lmcache_persist.protocol import SlotRun
from support.fake_server import BOOT_A, BOOT_B, POOL_BYTES, FakeServer
from support.waiting import stays, wait_until

Serve = Callable[..., FakeServer]
Connect = Callable[..., CacheClient]
HASHES = [bytes([number]) * 32 for number in range(4)]
RUN = SlotRun(0, 0, 0, 4096, [0, 4096])
ASK = {"engine": "engine", "hashes": HASHES, "num_tokens": 4 * 64}


def test_found_at_once(serve: Serve, connect: Connect) -> None:
    """A decided lookup has tokens, slots and boot id, and is leased until released."""
    server = serve()
    server.on(
        protocol.Lookup,
        lambda _: protocol.Found(tokens=128, runs=[RUN], memory_chunks=1, disk_chunks=1),
    )
    client = connect("scheduler")
    handle = client.lookup(**ASK, held_tokens=64)
    result = handle.wait(20)
    assert result is not None
    assert result.error is None
    assert (result.tokens, result.boot_id, result.runs) == (128, BOOT_A, (RUN,))
    assert (result.memory_chunks, result.disk_chunks) == (1, 1)
    assert handle.poll() is result
    sent = server.got(protocol.Lookup)[0]
    assert (sent.hashes, sent.num_tokens, sent.held_tokens) == (b"".join(HASHES), 256, 64)
    client.ping()
    assert not server.got(protocol.Release)
    handle.release()
    handle.release()
    wait_until(lambda: server.got(protocol.Release), "release arrives")
    client.ping()
    assert [message.lookup for message in server.got(protocol.Release)] == [sent.lookup]


def test_polled_until_decided(serve: Serve, connect: Connect) -> None:
    """While undecided the same id is polled, without the hashes."""
    server = serve()
    answers: list[protocol.Reply] = [
        protocol.NotYet(),
        protocol.NotYet(),
        protocol.Found(tokens=128, runs=[RUN]),
    ]
    server.on(protocol.Lookup, lambda _: answers.pop(0))
    result = connect("scheduler").lookup(**ASK).wait(20)
    assert result is not None
    assert result.tokens == 128
    first, *later = server.got(protocol.Lookup)
    assert [(m.lookup, m.hashes) for m in later] == [(first.lookup, b"")] * 2
    assert first.wait_ms > 0


def test_long_timeouts_ask_for_no_longer_wait_than_a_server_grants(
    serve: Serve, connect: Connect
) -> None:
    """Whatever the times are set to, a poll stays within the protocol's bounds."""
    server = serve()
    client = connect("scheduler", request_timeout_s=600.0, lookup_timeout_s=600.0)
    asked = client.lookup(**ASK).wait(20)
    assert asked is not None
    assert asked.error is None
    assert [sent.wait_ms for sent in server.got(protocol.Lookup)] == [protocol.MAX_WAIT_MS]


def test_miss_is_released_by_itself(serve: Serve, connect: Connect) -> None:
    """A miss holds nothing and is forgotten at the server without anybody's doing."""
    server = serve()
    client = connect("scheduler")
    result = client.lookup(**ASK).wait(20)
    assert result is not None
    assert (result.tokens, result.error) == (0, None)
    wait_until(lambda: server.got(protocol.Release), "release arrives")


def test_never_decided_is_a_miss(serve: Serve, connect: Connect) -> None:
    """After its deadline a lookup is a miss with the reason, and is released."""
    server = serve()
    server.on(protocol.Lookup, lambda _: protocol.NotYet(doing="loading 3 objects"))
    client = connect("scheduler", lookup_timeout_s=0.05)
    result = client.lookup(**ASK).wait(20)
    assert result is not None
    assert result.tokens == 0
    assert isinstance(result.error, RequestTimeout)
    assert "loading 3 objects" in str(result.error)
    wait_until(lambda: server.got(protocol.Release), "release arrives")
    assert client.connected


def test_release_while_undecided(serve: Serve, connect: Connect) -> None:
    """Giving up an undecided lookup tells the server, decides it as a miss, ends the polls."""
    server = serve()
    server.on(protocol.Lookup, lambda _: protocol.NotYet())
    client = connect("scheduler")
    handle = client.lookup(**ASK)
    wait_until(lambda: len(server.got(protocol.Lookup)) >= 2, "polled")
    handle.release()
    wait_until(lambda: server.got(protocol.Release), "release arrives")
    polled = len(server.got(protocol.Lookup))
    result = handle.poll()
    assert result is not None
    assert (result.tokens, result.error) == (0, None)
    stays(lambda: len(server.got(protocol.Lookup)) == polled, "no poll after the release", 0.1)


def test_release_during_a_poll_comes_after_it(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poll that is being made when the release is asked for is not sent after that: the
    server would take it for a new lookup, and keep it.
    """
    server = serve()
    server.on(protocol.Lookup, lambda _: protocol.NotYet())
    client = connect("scheduler")
    handle = client.lookup(**ASK)
    release = threading.Thread(target=handle.release)
    encode, first = lookups.encode, iter([True])

    def slowly(message: protocol.Request) -> bytes:
        if isinstance(message, protocol.Lookup) and next(first, False):
            release.start()
            release.join(0.5)  # It must wait, or it overtakes this poll.
        return encode(message)

    monkeypatch.setattr(lookups, "encode", slowly)
    wait_until(lambda: server.got(protocol.Release), "release arrives")
    release.join(20)
    client.ping()
    kinds = [type(one) for one in server.requests if not isinstance(one, protocol.Ping)]
    assert kinds[-1] is protocol.Release


def test_answer_after_release_leaves_no_lease(serve: Serve, connect: Connect) -> None:
    """A hit that crosses the release on the wire stays a miss here and is released there."""
    server = serve()
    server.on(protocol.Lookup, lambda _: None)
    client = connect("scheduler", request_timeout_s=30)
    handle = client.lookup(**ASK)
    wait_until(lambda: server.got(protocol.Lookup), "lookup arrives")
    peer, request_id = server.last
    handle.release()
    wait_until(lambda: server.got(protocol.Release), "release arrives")
    found = protocol.Found(tokens=128, runs=[RUN])
    server.send_later([peer, request_id, server.encode(found)])
    client.ping()
    result = handle.poll()
    assert result is not None
    assert result.tokens == 0


def test_no_server_is_a_miss_at_once(connect: Connect) -> None:
    """Without a server a lookup is decided before it returns."""
    result = connect("scheduler", wait=False).lookup(**ASK).poll()
    assert result is not None
    assert isinstance(result.error, ServerUnreachable)


def test_unbound_server_is_a_miss_at_once(serve: Serve, connect: Connect) -> None:
    """Before there is a binding nothing can have been hashed for it."""
    server = serve(binding=None)
    result = connect("scheduler").lookup(**ASK).poll()
    assert result is not None
    assert (result.tokens, result.error) == (0, None)
    assert not server.got(protocol.Lookup)


def test_refusal_is_a_miss(serve: Serve, connect: Connect) -> None:
    """A refused lookup is a miss with the server's error; the connection stays."""
    server = serve()
    server.on(protocol.Lookup, lambda _: protocol.ErrorReply(code="lease", message="no lock"))
    client = connect("scheduler")
    result = client.lookup(**ASK).wait(20)
    assert result is not None
    assert isinstance(result.error, LeaseError)
    client.ping()
    assert len(server.got(protocol.Hello)) == 2


def test_lease_behind_a_timeout_is_released(serve: Serve, connect: Connect) -> None:
    """A lookup whose answer never came is released in the same session after the reconnect."""
    server = serve()
    server.on(protocol.Lookup, lambda _: None)
    client = connect("scheduler")
    result = client.lookup(**ASK).wait(20)
    assert result is not None
    assert isinstance(result.error, TransportError)
    released = wait_until(lambda: server.got(protocol.Release), "release arrives")
    assert released[0].session == server.sessions[0]
    assert released[0].lookup == server.got(protocol.Lookup)[0].lookup


def test_lookup_does_not_reach_the_next_server(serve: Serve, connect: Connect) -> None:
    """An undecided lookup is a miss when its server dies, and is not asked of the next."""
    first = serve()
    first.on(protocol.Lookup, lambda _: protocol.NotYet())
    client = connect("scheduler")
    handle = client.lookup(**ASK)
    wait_until(lambda: first.got(protocol.Lookup), "lookup arrives")
    first.close()
    result = handle.wait(20)
    assert result is not None
    assert isinstance(result.error, TransportError)
    second = serve(boot=BOOT_B)
    client.wait_connected(20)
    client.ping()
    assert not second.got(protocol.Lookup)
    assert not second.got(protocol.Release)


@pytest.mark.parametrize(
    "found",
    [
        protocol.Found(tokens=100, runs=[]),
        protocol.Found(tokens=-64, runs=[]),
        protocol.Found(tokens=256, runs=[RUN]),
        protocol.Found(tokens=64, runs=[RUN]),
        protocol.Found(tokens=128, runs=[SlotRun(0, 0, 0, 4096, [0, POOL_BYTES - 4095])]),
        protocol.Found(tokens=128, runs=[SlotRun(0, 0, 0, 4096, [0, -1])]),
        protocol.Found(tokens=128, runs=[SlotRun(0, 0, -1, 4096, [0, 4096])]),
        protocol.Found(tokens=128, runs=[SlotRun(0, 64, 0, 4096, [0, 4096])]),
        protocol.Found(tokens=128, runs=[SlotRun(-1, 0, 0, 4096, [0, 4096])]),
        protocol.Found(tokens=128, runs=[SlotRun(0, 0, 0, 0, [0, 4096])]),
        protocol.Found(tokens=128, runs=[SlotRun(0, 0, 0, POOL_BYTES + 1, [0])]),
        protocol.Committed(seq=1),
    ],
)
def test_impossible_answers_are_misses(
    serve: Serve, connect: Connect, found: protocol.Reply
) -> None:
    """Tokens beyond the prompt or between chunks, or slots outside of the pool: a miss."""
    server = serve()
    server.on(protocol.Lookup, lambda _: found)
    client = connect("scheduler")
    result = client.lookup(**ASK).wait(20)
    assert result is not None
    assert result.tokens == 0
    assert isinstance(result.error, MalformedMessage)
    wait_until(lambda: server.got(protocol.Release), "whatever was leased is released")
