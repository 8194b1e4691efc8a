"""A fake server and clients of it, closed at the end of each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_persist.connector import CacheClient, ClientOptions
from support.fake_server import FakeServer, make_binding

FAST = {"request_timeout_s": 0.4, "heartbeat_s": 0.1, "reconnect_min_s": 0.02, "pool_idle_s": 0.2}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """An endpoint that nobody serves yet."""
    return f"ipc://{tmp_path}/s.sock"


@pytest.fixture
def serve(url: str, tmp_path: Path) -> Iterator[Callable[..., FakeServer]]:
    """Starts fake servers at ``url``, bound unless told otherwise."""
    servers: list[FakeServer] = []

    def start(**options: Any) -> FakeServer:
        options.setdefault("binding", make_binding())
        servers.append(FakeServer(url, tmp_path, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def connect(url: str) -> Iterator[Callable[..., CacheClient]]:
    """Makes clients of ``url`` with short times; connected ones unless ``wait=False``."""
    clients: list[CacheClient] = []

    def start(kind: str = "client", *, wait: bool = True, **options: Any) -> CacheClient:
        client = CacheClient(
            url, kind=kind, label="test", options=ClientOptions(**{**FAST, **options})
        )
        clients.append(client)
        if wait:
            client.wait_connected(20)
        return client

    yield start
    for client in clients:
        client.close()
