"""A folder short enough for sockets, and servers that are gone when the test is over."""

from __future__ import annotations

from support.server_fixtures import make_server, namespaces, root, server

__all__ = ["make_server", "namespaces", "root", "server"]
