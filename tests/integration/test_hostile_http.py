"""The HTTP port: whatever comes, health is answered, and nothing grows."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_persist.server.http import MAX_HEAD_BYTES
from support.server import ServerProcess
from support.waiting import wait_until
from support.web import HOST, TIMEOUT_S, fetch, free_port

MakeServer = Callable[..., ServerProcess]
ALIVE = (200, '{"alive": true, "reasons": []}\n')
THREADS_BESIDE = 24
"""Threads of a server without connections, and some room: loop, workers, sockets."""

THREADS_AT_MOST = THREADS_BESIDE + 64
"""With 32 connections open, and as many that are about to end."""


@pytest.fixture
def port() -> int:
    """The port of the server under test."""
    return free_port()


@pytest.fixture
def web(make_server: MakeServer, port: int) -> ServerProcess:
    """A running server with its pages."""
    return make_server("--http", f"{HOST}:{port}").start()


def status(server: ServerProcess, field: str) -> int:
    """A number of the kernel about the server's process."""
    assert server.process is not None
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise AssertionError(field)


def send(port: int, data: bytes) -> bytes:
    """Send bytes, close our half, and read what comes until the server closes.

    It may close before it has read all; then its answer may be lost.
    """
    found = b""
    with socket.create_connection((HOST, port), TIMEOUT_S) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                found += piece
    return found


def requests() -> dict[str, bytes]:
    """What strangers send."""
    draw = random.Random(11)
    head = b"GET /healthz HTTP/1.1\r\n"
    return {
        "nothing": b"",
        "noise": draw.randbytes(1 << 20),
        "zmq": b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + bytes(40),
        "tls": b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + draw.randbytes(500),
        "no end": b"G" * (1 << 20),
        "long path": b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
        "huge header": head + b"X: " + b"a" * (8 << 20) + b"\r\n\r\n",
        "many headers": head + b"X: a\r\n" * 500_000 + b"\r\n",
        "folded header": head + b"X: a\r\n" + b" b\r\n" * 10_000 + b"\r\n",
        "version": b"GET / HTTP/9.9\r\n\r\n",
        "short": b"GET\r\n\r\n",
        "control": b"GET /\x1b[2J\x00\x07 HTTP/1.1\r\n\r\n",
        "post": b"POST /metrics HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n" + b"x" * 100_000,
        "chunked": b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n",
        "delete": b"DELETE /healthz HTTP/1.1\r\n\r\n",
        "expect": head + b"Expect: 100-continue\r\nContent-Length: -1\r\n\r\n",
        "pipelined": head * 2 + b"\r\n" + head + b"\r\n",
    }


def test_strangers_harm_nobody(web: ServerProcess, port: int) -> None:
    """Garbage, endless heads, other methods: health is answered after each, nothing grows."""
    fetch(port, "/metrics")
    before = status(web, "RssAnon")
    for name, data in requests().items():
        reply = send(port, data)
        assert not reply.startswith(b"HTTP/1.0 200") or name in ("pipelined", "expect"), name
        assert fetch(port, "/healthz") == ALIVE, name
    wait_until(lambda: status(web, "Threads") <= THREADS_BESIDE, "threads end")
    assert status(web, "RssAnon") - before < 10 << 10
    assert "Traceback" not in web.log()
    assert "\x1b" not in web.log()


def test_a_long_head_is_refused(web: ServerProcess, port: int) -> None:
    """What is cut off is answered as too long, never as if that were all."""
    head = b"GET /healthz HTTP/1.1\r\nX: " + b"a" * (20 << 10) + b"\r\n\r\n"
    assert send(port, head[: MAX_HEAD_BYTES // 2]).startswith(b"HTTP/1.0 200")
    assert b" 431 " in send(port, head[:MAX_HEAD_BYTES])


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/metrics/../healthz", "/x"],
)
def test_there_are_three_pages_and_no_files(web: ServerProcess, port: int, path: str) -> None:
    """Any other path is a 404, whatever it spells."""
    code, body = fetch(port, path)
    assert code == 404
    assert "root" not in body


@contextlib.contextmanager
def connections(port: int, count: int, data: bytes) -> Iterator[list[socket.socket]]:
    """So many connections that sent this and wait."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(stack.enter_context(socket.create_connection((HOST, port), TIMEOUT_S)))
            with contextlib.suppress(ConnectionError):
                made[-1].sendall(data)
        yield made


@pytest.mark.parametrize("data", [b"", b"GET /healthz HTTP/1.1\r\nX: a"])
def test_idle_connections_keep_nobody_out(web: ServerProcess, port: int, data: bytes) -> None:
    """Hundreds that say nothing, or never finish, take few threads; probes are answered."""
    with connections(port, 300, data):
        for _ in range(5):
            assert fetch(port, "/healthz") == ALIVE
        assert status(web, "Threads") <= THREADS_AT_MOST
    wait_until(lambda: status(web, "Threads") <= THREADS_BESIDE, "threads end")
    assert "Traceback" not in web.log()


def test_nobody_has_to_read_the_answer(web: ServerProcess, port: int) -> None:
    """Clients that ask for metrics and go, or do not read, are no trouble."""
    with connections(port, 40, b"GET /metrics HTTP/1.1\r\n\r\n"):
        assert fetch(port, "/healthz") == ALIVE
    assert fetch(port, "/healthz") == ALIVE
    assert "Traceback" not in web.log()
