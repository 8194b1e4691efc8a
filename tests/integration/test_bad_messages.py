"""Whatever arrives at the socket, the next good message is answered."""

from __future__ import annotations

import random
import socket as sockets
from collections.abc import Callable

import msgspec
import pytest
import zmq

from lmcache_persist import protocol
from support.raw import ask, hello, receive
from support.server import ServerProcess

ID = b"\0" * protocol.REQUEST_ID_BYTES


def good(boot: str, session: str) -> bytes:
    """A message that is fine."""
    return protocol.encode(protocol.Ping(boot=boot, session=session))


def bodies(boot: str, session: str) -> dict[str, bytes]:
    """Message bodies that must be answered with an error."""
    pack = msgspec.msgpack.encode
    base = {"boot": boot, "session": session, "binding": ""}
    bind = {**base, "t": "bind"}
    return {
        "empty": b"",
        "cut": good(boot, session)[:-3],
        "trailing": good(boot, session) + b"\0",
        "no map": pack([1, 2, 3]),
        "unknown type": pack({**base, "t": "no such thing"}),
        "no type": pack(base),
        "unknown field": pack({**base, "t": "ping", "more": 1}),
        "missing field": pack({"t": "ping"}),
        "bool for int": pack({**bind, "groups": [["full", True]]}),
        "float for int": pack({**bind, "groups": [["full", 16.5]]}),
        "text for int": pack({**bind, "groups": [["full", "16"]]}),
        "NaN for a count": pack({**base, "t": "release", "lookup": float("nan")}),
        "negative count": pack({**base, "t": "release", "lookup": -1}),
        "huge count": pack({**base, "t": "release", "lookup": 2**63}),
        "huge announced list": b"\xdd\xff\xff\xff\xff",
        "huge announced text": b"\x81\xa1t\xdb\xff\xff\xff\xff",
        "deeply nested": b"\x91" * 100_000,
        "deep in a field": b"\x82\xa1t\xa4ping\xa1x" + b"\x91" * 100_000,
        "noise": random.Random(7).randbytes(1 << 20),
        "unaligned hashes": pack(
            {**base, "t": "lookup", "lookup": 1, "engine": "e", "num_tokens": 9, "hashes": b"abc"}
        ),
    }


def test_bad_bodies_are_answered_with_an_error(server: ServerProcess) -> None:
    """Each bad body gets an error reply, and a good one after it its answer."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(server.url)
        welcome = hello(socket)
        for name, body in bodies(welcome.boot, welcome.session).items():
            socket.send_multipart([ID, body])
            _, reply = receive(socket)
            assert isinstance(reply, protocol.ErrorReply), name
            ping = protocol.Ping(boot=welcome.boot, session=welcome.session)
            assert isinstance(ask(socket, ping), protocol.Done), name
    assert "Traceback" not in server.log()


@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_wrong_frame_counts_are_dropped(server: ServerProcess, count: int) -> None:
    """Messages that are not an id and a body get no answer and do no harm."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(server.url)
        socket.send_multipart([b"x"] * count or [b""])
        hello(socket)


def test_an_oversized_message_costs_its_sender_only(server: ServerProcess) -> None:
    """A frame beyond the limit closes that connection; others are served on."""
    with zmq.Context() as context:
        with context.socket(zmq.DEALER) as other, context.socket(zmq.DEALER) as big:
            other.linger = big.linger = 0
            other.connect(server.url)
            welcome = hello(other)
            big.connect(server.url)
            big.send_multipart([ID, b"\0" * (protocol.MAX_MESSAGE_BYTES + 1)])
            for _ in range(20):
                ping = protocol.Ping(boot=welcome.boot, session=welcome.session)
                assert isinstance(ask(other, ping), protocol.Done)


def test_http_at_the_socket_is_dropped(make_server: Callable[..., ServerProcess]) -> None:
    """A web request to the message port does not stop the loop."""
    server = make_server("--listen", "tcp://127.0.0.1:0").start()
    assert server.url.startswith("tcp://127.0.0.1:")
    port = int(server.url.rpartition(":")[2])
    with sockets.create_connection(("127.0.0.1", port), timeout=20) as web:
        web.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(server.url)
        hello(socket)


def test_another_version_is_told_both_numbers(server: ServerProcess) -> None:
    """A client of a later protocol, with fields of its own, is refused by version."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(server.url)
        body = msgspec.msgpack.encode(
            {"t": "hello", "proto_min": 7, "proto_max": 9, "kind": "worker", "later": [1]}
        )
        socket.send_multipart([ID, body])
        _, reply = receive(socket)
        assert isinstance(reply, protocol.ErrorReply)
        assert reply.code == "unsupported_version"
        assert "7 to 9" in reply.message
        assert f"to {protocol.PROTOCOL_VERSION}" in reply.message
