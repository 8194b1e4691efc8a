"""Fixtures of tests with real servers; a folder's conftest imports what it uses."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.server import ServerProcess, short_folder


@pytest.fixture
def root() -> Iterator[Path]:
    """A fresh folder."""
    folder = short_folder()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def make_server(root: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Makes servers (not started yet); all are killed at the end."""
    made: list[ServerProcess] = []

    def make(*flags: str, name: str = "d", **options: Any) -> ServerProcess:
        server = ServerProcess(root / name, *flags, **options)
        made.append(server)
        return server

    yield make
    for server in made:
        if server.process is not None:
            server.kill()


@pytest.fixture
def server(make_server: Callable[..., ServerProcess]) -> ServerProcess:
    """A running server on auto."""
    return make_server().start()


UNSHARE = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child"]


@pytest.fixture(scope="module")
def namespaces() -> list[str]:
    """A command prefix that starts a process as PID 1 of a namespace of its own."""
    try:
        done = subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=20)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if done.returncode:
        pytest.skip(f"no PID namespaces here: {done.stderr.decode(errors='replace').strip()}")
    return UNSHARE
