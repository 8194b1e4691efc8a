"""Real engines: a model for all tests, and starters whose processes end with the test."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_persist.demo.model import make_llama
from support.engines import Starter, Stored, starting, store_cold


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama for which wrong KV changes the tokens."""
    return make_llama(tmp_path_factory.mktemp("model") / "llama", seed=1)


@pytest.fixture(scope="module")
def stored(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Stored:
    """A module's ``PROMPTS`` run cold by engines with its ``OPTIONS``, and everything killed."""
    folder, module = tmp_path_factory.mktemp("stored"), request.module
    with starting(model, folder) as starter:
        return store_cold(starter, folder / "data", module.PROMPTS, **module.OPTIONS)


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Starter]:
    """The starter of one test; a module may have a model of its own."""
    with starting(model, tmp_path) as starter:
        yield starter


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 100 MiB, in the place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small tmpfs cannot be mounted here (root is needed)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
