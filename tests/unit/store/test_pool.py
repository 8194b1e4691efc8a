"""Making a pool, interrupted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmcache_persist.errors import DataDirUnusable
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


def test_a_refused_setgid_bit_refuses_the_start_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What systemd's RestrictSUIDSGID= does to --group is told with the way out."""
    chmod = os.chmod

    def restricted(path: Path, mode: int) -> None:
        if mode & 0o6000:
            raise PermissionError(1, "Operation not permitted")
        chmod(path, mode)

    monkeypatch.setattr(os, "chmod", restricted)
    with pytest.raises(DataDirUnusable, match="setgid") as caught:
        Pool.create(PoolPaths.of(tmp_path, "0" * 32), 1 << 20, wait_s=0, group_gid=os.getgid())
    assert "RestrictSUIDSGID" in str(caught.value.hint)
    assert not list(tmp_path.iterdir())
