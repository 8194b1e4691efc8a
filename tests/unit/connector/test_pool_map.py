"""The mapping of the pool: bounds, pins, and when it is let go."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_persist.connector.pool_map import PoolMap, PoolMaps
from lmcache_persist.errors import LeaseError
from lmcache_persist.protocol import PoolInfo
from lmcache_persist.shm import PoolPaths
from support.fake_server import BOOT_A, BOOT_B, UUID

SIZE = 1 << 16


class Owner:
    """Makes pool files and holds the server's lock, as a server would."""

    def __init__(self, folder: Path) -> None:
        self.paths = PoolPaths.of(folder, UUID)
        self.info = PoolInfo(path=str(self.paths.pool), size_bytes=SIZE)
        self._fd = -1
        self.start()

    def start(self) -> None:
        """A new server: takes the lock, replaces the file."""
        self._fd = os.open(self.paths.server_lock, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self.paths.pool.unlink(missing_ok=True)
        self.paths.pool.write_bytes(bytes(SIZE))

    def die(self) -> None:
        """The kernel drops its lock; the files stay."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    """A living owner of a pool."""
    it = Owner(tmp_path)
    yield it
    it.die()


@pytest.fixture
def pool(owner: Owner) -> Iterator[PoolMap]:
    """The pool, mapped."""
    it = PoolMap(BOOT_A, owner.info)
    yield it
    it.close()


def test_view_is_the_file(owner: Owner, pool: PoolMap) -> None:
    """What is written through a view is in the file, at its place."""
    pool.view(100, 4)[:] = b"abcd"
    assert owner.paths.pool.read_bytes()[98:106] == b"\0\0abcd\0\0"


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 1), (0, SIZE + 1), (SIZE, 1), (1, SIZE), (0, -1), (2**63, 1)]
)
def test_view_is_bounded(pool: PoolMap, offset: int, nbytes: int) -> None:
    """Nothing outside of the pool can be viewed."""
    with pytest.raises(LeaseError, match="outside"):
        pool.view(offset, nbytes)
    assert pool.view(SIZE, 0).nbytes == 0
    assert pool.view(0, SIZE).nbytes == SIZE


def test_attach_leaves_the_file_alone(owner: Owner) -> None:
    """Mapping, touching and closing neither change nor delete the pool's file."""
    owner.paths.pool.write_bytes(bytes(range(256)) * (SIZE // 256))
    before = owner.paths.pool.stat()
    pool = PoolMap(BOOT_A, owner.info)
    pool.touch()
    pool.close()
    after = owner.paths.pool.stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert owner.paths.pool.read_bytes() == bytes(range(256)) * (SIZE // 256)


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1, 0, -1, 2**63])
def test_attach_refuses_other_sizes(owner: Owner, size: int) -> None:
    """A file of another size than was said is refused before it is mapped."""
    with pytest.raises(LeaseError):
        PoolMap(BOOT_A, PoolInfo(path=owner.info.path, size_bytes=size))


def test_attach_follows_no_link(owner: Owner, tmp_path: Path) -> None:
    """A symbolic link in the pool's place is refused."""
    link = tmp_path / f"lmcache-persist-{'d' * 32}.pool"
    link.symlink_to(owner.paths.pool)
    with pytest.raises(LeaseError, match="cannot be mapped"):
        PoolMap(BOOT_A, PoolInfo(path=str(link), size_bytes=SIZE))


def test_closed_pool_gives_no_views(pool: PoolMap) -> None:
    """After it was let go a pool gives neither views nor pins, and says why."""
    held = pool.view(0, 4)
    pool.close()
    assert pool.closed
    with pytest.raises(LeaseError, match="let go"):
        pool.view(0, 4)
    with pytest.raises(LeaseError, match="let go"):
        pool.acquire()
    # The memory itself stays for as long as somebody holds a view of it.
    held[:] = b"safe"


def test_living_owner_keeps_its_pool(owner: Owner, pool: PoolMap) -> None:
    """An owner that holds its lock is not gone."""
    assert not pool.owner_is_gone()
    owner.die()
    assert pool.owner_is_gone()


def test_successor_means_gone(owner: Owner, pool: PoolMap) -> None:
    """Once a later server took the lock and removed or replaced the file, the first is gone."""
    owner.die()
    owner.start()
    assert pool.owner_is_gone()
    owner.paths.pool.unlink()
    assert pool.owner_is_gone()


def test_release_without_acquire_is_an_error(pool: PoolMap) -> None:
    """Pins cannot fall below none."""
    with pytest.raises(RuntimeError, match="more often"):
        pool.release()


def test_reap_waits_for_death_and_loads(owner: Owner) -> None:
    """A former server's pool is let go when it is dead and the last load is done, not before."""
    maps = PoolMaps(idle_s=0.0, touch=False)
    old = maps.attach(BOOT_A, owner.info)
    assert maps.attach(BOOT_A, owner.info) is old
    assert maps.reap(BOOT_B)
    assert maps.get(BOOT_A) is old
    owner.die()
    with old.pin():
        assert maps.reap(BOOT_B)
        assert not old.closed
    assert not maps.reap(BOOT_B)
    assert old.closed
    assert maps.get(BOOT_A) is None


def test_reap_leaves_time_for_loads_on_their_way(owner: Owner) -> None:
    """The idle time counts from the death of the server at the earliest."""
    maps = PoolMaps(idle_s=3600.0, touch=False)
    old = maps.attach(BOOT_A, owner.info)
    old._idle_since = float("-inf")
    owner.die()
    assert maps.reap(None)
    assert not old.closed
    maps.close()
    assert old.closed


def test_current_pool_is_never_reaped(owner: Owner) -> None:
    """The present server's pool stays, whatever its lock says."""
    maps = PoolMaps(idle_s=0.0, touch=False)
    current = maps.attach(BOOT_A, owner.info)
    owner.die()
    assert not maps.reap(BOOT_A)
    assert not current.closed
    maps.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_holds_no_memory(owner: Owner, pool: PoolMap) -> None:
    """A forked child does not inherit the mapping: it would keep a dead server's memory."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        with open("/proc/self/maps") as maps:
            os.write(write_end, b"1" if owner.info.path in maps.read() else b"0")
        os._exit(0)
    assert os.read(read_end, 1) == b"0"
    os.waitpid(child, 0)
    os.close(read_end)
    os.close(write_end)
    with open("/proc/self/maps") as maps:
        assert owner.info.path in maps.read()
    assert not pool.closed


def test_what_is_prepared_is_undone_before_the_unmapping(pool: PoolMap) -> None:
    """Once for a mapping, however often it is asked for; undone while the bytes are still there."""
    seen: list[str] = []

    def prepare(whole: memoryview) -> Callable[[], None]:
        assert whole.nbytes == SIZE
        seen.append("done")
        return lambda: seen.append(f"undone, {whole.nbytes} bytes still mapped")

    pool.prepare(prepare)
    pool.prepare(prepare)
    assert seen == ["done"]
    pool.close()
    pool.close()
    assert seen == ["done", f"undone, {SIZE} bytes still mapped"]
    with pytest.raises(LeaseError, match="was let go"):
        pool.prepare(prepare)
