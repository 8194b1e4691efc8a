"""Making a pool, interrupted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmcache_persist.shm import PoolPaths
from lmcache_persist.store.pool import Pool


def test_an_interrupted_allocation_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that ends the start while the pool is allocated leaves no memory behind."""
    paths = PoolPaths.of(tmp_path, "0" * 32)

    def interrupted(fd: int, offset: int, length: int) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    with pytest.raises(SystemExit):
        Pool.create(paths, 1 << 20, wait_s=0)
    assert not paths.pool.exists()
    monkeypatch.undo()
    Pool.create(paths, 1 << 20, wait_s=0).close(remove=True)
