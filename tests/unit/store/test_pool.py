"""Making a pool, interrupted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmcache_persist.errors import DataDirLocked, DataDirUnusable
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


def test_who_finds_the_pool_taken_is_told_by_whom(tmp_path: Path) -> None:
    """The lock file says whose it is; what stands there is shown on one line."""
    paths = PoolPaths.of(tmp_path, "0" * 32)
    first = Pool.create(paths, 1 << 20, wait_s=0, holder="pid 7 on host, data dir /a\nb")
    with pytest.raises(DataDirLocked, match=r"another server \(pid 7 on host, data dir /a\\nb\)"):
        Pool.create(paths, 1 << 20, wait_s=0)
    os.truncate(paths.server_lock, 0)
    with pytest.raises(DataDirLocked, match="has not said who it is"):
        Pool.create(paths, 1 << 20, wait_s=0)
    first.close(remove=True)
    first.close(remove=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["open", "unlink"])
def test_a_file_that_another_user_left_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """In a folder that all may write to, like /dev/shm, it is the file that is in the way."""
    paths = PoolPaths.of(tmp_path, "0" * 32)
    path = {"open": paths.server_lock, "unlink": paths.pool}[call]
    path.touch()
    owner, real = path.stat().st_uid, getattr(os, call)

    def denied(name: object, *rest: object, **more: object) -> object:
        if str(name) == str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(name, *rest, **more)

    monkeypatch.setattr(os, call, denied)
    with pytest.raises(DataDirUnusable, match="cannot be used: Permission denied"):
        Pool.create(paths, 1 << 20, wait_s=0)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(DataDirUnusable, match=f"{path} belongs to user id {owner}, expected"):
        Pool.create(paths, 1 << 20, wait_s=0)
