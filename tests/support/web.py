"""Asking a server's HTTP pages."""

from __future__ import annotations

import http.client
import socket

HOST = "127.0.0.1"
TIMEOUT_S = 20.0


def free_port() -> int:
    """A TCP port that nobody listens at just now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def fetch(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and body of a page."""
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()
