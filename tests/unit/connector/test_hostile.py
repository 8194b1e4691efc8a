"""A server that sends what no server should."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import pytest

from lmcache_persist import protocol
from lmcache_persist.connector import CacheClient
from lmcache_persist.errors import (
    LeaseError,
    MalformedMessage,
    PersistError,
    ServerUnreachable,
    Stale,
)
from lmcache_persist.protocol import Grant, Reserved
from support.fake_server import BOOT_B, GROUPS, POOL_BYTES, REGISTRATION, FakeServer
from support.waiting import wait_until

Serve = Callable[..., FakeServer]
Connect = Callable[..., CacheClient]
KEYS = [b"k" * 32, b"l" * 32]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"not msgpack",
        b"\x81\xa1t\xa7unknown",
        b"\x81\xa1t\xa9committed",
        b"\x92" * 5000,
        protocol.encode(protocol.Committed(seq=1))[:-1],
        protocol.encode(protocol.Committed(seq=1)) + b"\x00",
    ],
)
def test_unreadable_reply(serve: Serve, connect: Connect, body: bytes) -> None:
    """A reply that cannot be read fails its request; the client connects anew and goes on."""
    server = serve()
    server.on(protocol.Commit, lambda _: body)
    client = connect("worker")
    with pytest.raises(MalformedMessage):
        client.commit([1]).result(20)
    del server.handlers[protocol.Commit]
    wait_until(lambda: len(server.got(protocol.Hello)) == 4, "greeted anew")
    wait_until(lambda: client.connected, "connected again")
    client.commit([2]).result(20)


def test_random_bytes_never_end_the_client(serve: Serve, connect: Connect, seed: int) -> None:
    """Whatever bytes answer, every future completes with a typed error, and the client lives."""
    import random

    draw = random.Random(seed)
    good = protocol.encode(protocol.Reserved(boot="a" * 32, grants=[Grant(0, 1, [0])]))

    def mutated(_: object) -> bytes:
        body = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            body[draw.randrange(len(body))] = draw.randrange(256)
        return bytes(body)

    server = serve()
    client = connect("worker", reconnect_min_s=0.001, reconnect_max_s=0.001)
    client.register(REGISTRATION)
    server.on(protocol.Reserve, mutated)
    for _ in range(60):
        wait_until(lambda: client.connected, "connected again")
        asked = client.reserve(engine="engine", rank=0, hashes=KEYS[:1], masks=[1])
        error = asked.exception(20)
        assert error is None or isinstance(error, PersistError)
    wait_until(lambda: client.connected, "connected at the end")
    client.commit([1]).result(20)


def test_wrong_frames(serve: Serve, connect: Connect) -> None:
    """A reply of three frames, or with a request id of another length, ends the connection."""
    server = serve()
    client = connect("worker")
    server.on(protocol.Commit, lambda _: [b"short", b"x"])
    with pytest.raises(ServerUnreachable):
        client.commit([1]).result(20)
    # The future may fail before the client has noticed that it is down.
    wait_until(lambda: client.connections == 2 and client.connected, "connected again")
    server.on(protocol.Commit, lambda _: [server.last[1], b"x", b"y"])
    with pytest.raises(MalformedMessage, match="3 frames"):
        client.commit([1]).result(20)


def test_unknown_request_ids_are_passed_over(serve: Serve, connect: Connect) -> None:
    """Replies to requests that nobody made change nothing."""
    server = serve()
    client = connect("worker")
    peer, _ = server.last
    for _ in range(50):
        server.send_later([peer, secrets.token_bytes(8), b"junk"])
    client.ping()
    assert len(server.got(protocol.Hello)) == 2


@pytest.mark.parametrize(
    "reply",
    [
        Reserved(grants=[Grant(2, 1, [0])]),
        Reserved(grants=[Grant(-1, 1, [0])]),
        Reserved(grants=[Grant(0, 1, [])]),
        Reserved(grants=[Grant(0, 1, [0, 4096])]),
        Reserved(grants=[Grant(0, 1, [-1])]),
        Reserved(grants=[Grant(0, 1, [POOL_BYTES - 4095])]),
        Reserved(grants=[Grant(0, 1, [0]), Grant(0, 2, [4096])]),
        Reserved(stored=[2]),
        Reserved(stored=[-1]),
    ],
)
def test_impossible_grants(serve: Serve, connect: Connect, reply: Reserved) -> None:
    """Slots outside of the pool, or for keys not asked for, are refused and given back."""
    server = serve()
    server.on(protocol.Reserve, lambda _: reply)
    client = connect("worker")
    client.register(REGISTRATION)
    asked = client.reserve(engine="engine", rank=0, hashes=KEYS, masks=[1, 1])
    with pytest.raises(MalformedMessage):
        asked.result(20)
    if reply.grants:
        sent = wait_until(lambda: server.got(protocol.GiveBack), "give_back arrives")
        assert sent[0].reservations == [grant.reservation for grant in reply.grants]


def test_other_boot_in_an_error(serve: Serve, connect: Connect) -> None:
    """An error that names another boot id is that of another server."""
    server = serve()
    server.on(
        protocol.Commit, lambda _: protocol.ErrorReply(code="lease", message="x", boot=BOOT_B)
    )
    with pytest.raises(Stale):
        connect("worker").commit([1]).result(20)


def test_wrong_kind_of_reply(serve: Serve, connect: Connect) -> None:
    """A reply of another type than was asked for is malformed."""
    server = serve()
    server.on(protocol.Commit, lambda _: protocol.Done())
    with pytest.raises(MalformedMessage, match="Done"):
        connect("worker").commit([1]).result(20)


@pytest.mark.parametrize(
    "welcome",
    [
        protocol.Done(),
        protocol.Welcome(proto=1, session="", version="1"),
        protocol.Welcome(proto=1, session="../../etc/passwd", version="1"),
        protocol.Welcome(proto=1, session="c" * 32, version="1", boot="zz"),
        protocol.Welcome(proto=1, session="c" * 32, version="1", binding=b"[]"),
        protocol.Welcome(proto=1, session="c" * 32, version="1", binding=b'{"chunk_size": 64}'),
    ],
)
def test_impossible_welcomes(serve: Serve, connect: Connect, welcome: protocol.Reply) -> None:
    """A greeting that cannot be is no connection, and the wait for one ends with the reason."""
    server = serve()
    server.on(protocol.Hello, lambda _: welcome)
    client = connect("worker", wait=False)
    with pytest.raises(MalformedMessage):
        client.wait_connected(20)


def test_binding_with_a_wrong_number(serve: Serve, connect: Connect) -> None:
    """A binding whose chunk size is no positive number is refused, not believed."""
    server = serve()
    body = b'"chunk_size": -64'
    client = connect("cli")
    good = server.plain_answer(server.got(protocol.Hello)[0])
    assert isinstance(good, protocol.Welcome)
    bad = good.binding.replace(b'"chunk_size": 64', body)
    assert bad != good.binding
    server.on(protocol.Bind, lambda _: protocol.BindReply(outcome="bound", binding=bad))
    with pytest.raises(MalformedMessage, match="chunk_size"):
        client.bind(GROUPS)


def test_pool_of_another_size(serve: Serve, connect: Connect) -> None:
    """A pool file that is shorter than the server says is not mapped: touching it would kill."""
    server = serve()
    server.pool_bytes *= 2
    with pytest.raises(LeaseError, match=f"{POOL_BYTES} bytes, expected {2 * POOL_BYTES}"):
        connect("worker", wait=False).wait_connected(20)


def test_server_that_is_no_server(serve: Serve, connect: Connect, url: str) -> None:
    """Somebody who accepts connections and says nothing is no server, within bounds."""
    import socket

    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(url.removeprefix("ipc://"))
        mute.listen(8)
        client = connect("worker", wait=False, request_timeout_s=0.05)
        with pytest.raises(ServerUnreachable, match="does not answer"):
            client.wait_connected(0.5)
