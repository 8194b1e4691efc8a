"""Talking to a server with a bare socket, frame by frame."""

from __future__ import annotations

import itertools

import zmq

from lmcache_persist import protocol

_ids = itertools.count(1)
TIMEOUT_MS = 20_000


def send(socket: zmq.Socket[bytes], message: protocol.Request) -> bytes:
    """Send a message; its request id."""
    number = next(_ids).to_bytes(protocol.REQUEST_ID_BYTES, "big")
    socket.send_multipart([number, protocol.encode(message)])
    return number


def receive(socket: zmq.Socket[bytes]) -> tuple[bytes, protocol.Reply]:
    """The next reply and the request id that it answers. ``TimeoutError`` without one."""
    if not socket.poll(TIMEOUT_MS):
        raise TimeoutError("the server did not answer")
    number, body = socket.recv_multipart()
    return number, protocol.decode_reply(body)


def ask(socket: zmq.Socket[bytes], message: protocol.Request) -> protocol.Reply:
    """Send a message and wait for its reply, passing over others."""
    number = send(socket, message)
    while True:
        answered, reply = receive(socket)
        if answered == number:
            return reply


def hello(socket: zmq.Socket[bytes], kind: str = "cli") -> protocol.Welcome:
    """Open a session."""
    reply = ask(socket, protocol.Hello(proto_min=1, proto_max=1, kind=kind))
    if not isinstance(reply, protocol.Welcome):
        raise TypeError(f"hello was answered with {reply}")
    return reply
