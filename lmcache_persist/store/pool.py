"""The shared-memory pool as its server makes it; clients attach by ``connector.pool_map``.

One file per store, mode 0600, allocated in full before anybody maps it (a short
``/dev/shm`` is an error here, not a SIGBUS later) and never truncated. A new server makes
a new file under the same name; the memory of the old one comes back when the last client
of the dead server drops its mapping, for which a start waits a bounded time.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from lmcache_persist.errors import DataDirLocked, DataDirUnusable, PoolTooSmall
from lmcache_persist.hashing import EXTENT_BYTES
from lmcache_persist.posix import try_flock
from lmcache_persist.printable import plain
from lmcache_persist.shm import POOL_PREFIX, PoolPaths, client_is_dead
from lmcache_persist.units import exact_size

log = logging.getLogger(__name__)

STAMP_BYTES = 16
"""Bytes of the random stamp at each extent's head of a reserved slot."""

HIDDEN_S = 60.0
"""Age in seconds from which a lock file under its hidden name was left by a killed client."""
_POLL_S = 0.1
_HOLDER_BYTES = 512


class Pool:
    """The server's mapping of its pool.

    Durable: nothing; the pool is gone with its server.
    Threads: ``view`` any; the rest one.
    """

    def __init__(self, paths: PoolPaths, size_bytes: int, lock_fd: int, file_fd: int) -> None:
        self.paths = paths
        self.size_bytes = size_bytes
        self._lock_fd = lock_fd
        self._map = mmap.mmap(file_fd, size_bytes, mmap.MAP_SHARED)
        self._whole = memoryview(self._map)

    @classmethod
    def create(
        cls,
        paths: PoolPaths,
        size_bytes: int,
        *,
        wait_s: float,
        holder: str = "",
        group_gid: int | None = None,
        on_wait: Callable[[str], None] = lambda text: None,
    ) -> Pool:
        """Make the pool of a store, taking over what a dead server left.

        Args:
            paths: where.
            size_bytes: bytes, a multiple of the page size.
            wait_s: how long to wait for clients of a dead server to give memory back.
            holder: who this server is, for one that finds the pool taken.
            group_gid: group that may attach besides the owner, or None.
            on_wait: told once, for the operator, that it waits and for what.

        Raises:
            PoolTooSmall: the file system lacks the room, with both numbers.
            DataDirLocked: a living server holds the pool of this store: a copy of the
                data dir is being served.
            DataDirUnusable: the folder cannot be used, or a file in it is somebody else's.
        """
        with _mapping_errors(paths):
            lock_fd = _take_server_lock(paths)
        file_fd = -1
        try:
            _say_holder(lock_fd, holder)
            with _mapping_errors(paths):
                paths.pool.unlink(missing_ok=True)
                remove_dead_clients(paths)
                sweep_dead_pools(paths.pool.parent)
                paths.clients.mkdir(mode=0o700, exist_ok=True)
            file_fd = _allocate(paths.pool, size_bytes, wait_s, on_wait)
            if group_gid is not None:
                _let_group_in(paths, file_fd, lock_fd, group_gid)
            return cls(paths, size_bytes, lock_fd, file_fd)
        except BaseException:
            with contextlib.suppress(OSError):  # living clients' locks are in it: they stay
                if file_fd >= 0:
                    paths.pool.unlink(missing_ok=True)
                paths.clients.rmdir()
                paths.server_lock.unlink(missing_ok=True)
            os.close(lock_fd)
            raise
        finally:
            if file_fd >= 0:
                os.close(file_fd)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes ``[offset, offset + nbytes)``; ``ValueError`` outside the pool."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size_bytes:
            raise ValueError(f"slot {offset}+{nbytes} is outside of a pool of {self.size_bytes}")
        return self._whole[offset : offset + nbytes]

    def stamp(self, offset: int, nbytes: int) -> bytes:
        """Write fresh random bytes at each extent's head of a slot; returns them."""
        stamp = secrets.token_bytes(STAMP_BYTES)
        for head in range(offset, offset + nbytes, EXTENT_BYTES):
            width = min(STAMP_BYTES, offset + nbytes - head)
            self._whole[head : head + width] = stamp[:width]
        return stamp

    def still_stamped(self, offset: int, nbytes: int, stamp: bytes) -> bool:
        """Whether any extent's head still holds the stamp: that extent was not written."""
        for head in range(offset, offset + nbytes, EXTENT_BYTES):
            width = min(STAMP_BYTES, offset + nbytes - head)
            if self._whole[head : head + width] == stamp[:width]:
                return True
        return False

    def close(self, *, remove: bool) -> None:
        """Drop the mapping and, on a clean stop, remove the files; repeatable."""
        if self._lock_fd < 0:
            return
        self._whole.release()
        try:
            self._map.close()
        except BufferError:
            # A thread still holds a view; the mapping goes with the process.
            pass
        if remove:
            self.paths.pool.unlink(missing_ok=True)
            # Living clients find their lock gone and take a new one at the next server.
            shutil.rmtree(self.paths.clients, ignore_errors=True)
            self.paths.server_lock.unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = -1


def sweep_dead_pools(folder: Path) -> None:
    """Remove what servers left that were killed and never came back to their data dir.

    Only under the dead server's lock, so a living one's files stay, whatever its PID
    namespace; clients that still read from a removed pool keep their mapping.
    """
    for lock in folder.glob(f"{POOL_PREFIX}*.server.lock"):
        remove_dead_pool(
            PoolPaths(lock.with_name(lock.name.removesuffix(".server.lock") + ".pool"))
        )


def remove_dead_pool(paths: PoolPaths) -> bool:
    """Remove the pool of a server that was killed; False if there is none, or it lives."""
    lock = paths.server_lock
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # gone meanwhile, or another user's
    try:
        if try_flock(fd) and os.path.samestat(os.fstat(fd), os.stat(lock)):
            paths.pool.unlink(missing_ok=True)
            shutil.rmtree(paths.clients, ignore_errors=True)
            lock.unlink(missing_ok=True)
            return True
    except OSError as error:
        log.warning("left-over pool %s cannot be removed: %s", paths.pool, error.strerror)
    finally:
        os.close(fd)
    return False


@contextlib.contextmanager
def _mapping_errors(paths: PoolPaths) -> Iterator[None]:
    """``OSError`` as a refusal that names the file, and its owner if that is somebody else."""
    try:
        yield
    except OSError as error:
        path = Path(error.filename or paths.pool.parent)
        try:
            owner = os.lstat(path).st_uid
        except OSError:
            owner = os.geteuid()
        elsewhere = path != paths.pool.parent and owner != os.geteuid()
        if isinstance(error, PermissionError) and elsewhere:
            raise DataDirUnusable(
                f"pool file {path} belongs to user id {owner}, expected {os.geteuid()}: a server"
                f" of that user left it, or still runs ({error.strerror})",
                hint="stop that server if it runs, and remove what it left, as its user or root:"
                f" rm -r {paths.pool.with_suffix('')}.*; or choose another --pool-dir",
            ) from error
        raise DataDirUnusable(
            f"pool folder {paths.pool.parent} cannot be used: {error.strerror} ({path})",
            hint="choose another with --pool-dir",
        ) from error


def _say_holder(fd: int, holder: str) -> None:
    """Write into the lock file whose it is: for people, the lock itself is what counts."""
    with contextlib.suppress(OSError):  # on a full file system nobody is named
        os.ftruncate(fd, 0)
        os.pwrite(fd, holder.encode("utf-8", "replace")[:_HOLDER_BYTES], 0)


def _said_holder(fd: int) -> str:
    try:
        text = os.pread(fd, _HOLDER_BYTES, 0).decode("utf-8", "replace")
    except OSError:
        text = ""
    return plain(text) or "which has not said who it is"


def _take_server_lock(paths: PoolPaths) -> int:
    while True:
        fd = os.open(
            paths.server_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        deadline = time.monotonic() + 1.0
        while not try_flock(fd):
            # A client that looks whether the server lives holds it for an instant.
            if time.monotonic() > deadline:
                who = _said_holder(fd)
                os.close(fd)
                raise DataDirLocked(
                    f"pool {paths.pool} is held by another server ({who}): it serves the same"
                    " store uuid",
                    hint="stop that server; a second one needs a data dir restored with --new-id",
                )
            time.sleep(_POLL_S / 10)
        try:
            same = os.path.samestat(os.fstat(fd), os.stat(paths.server_lock))
        except FileNotFoundError:
            same = False
        if same:
            return fd
        os.close(fd)  # its owner removed it while we waited: take the new one


def _let_group_in(paths: PoolPaths, file_fd: int, lock_fd: int, gid: int) -> None:
    """Give a group its rights; what clients make in their folder is the group's (setgid)."""
    try:
        os.fchown(file_fd, -1, gid)
        os.fchmod(file_fd, 0o660)
        os.chown(paths.clients, -1, gid)
        os.chmod(paths.clients, 0o2770)  # noqa: S103 - what --group asks for
        os.fchown(lock_fd, -1, gid)
        os.fchmod(lock_fd, 0o640)
    except PermissionError as error:
        raise DataDirUnusable(
            f"pool folder {paths.pool.parent}: group {gid} cannot be given its rights,"
            f" {paths.clients.name} with the setgid bit among them: {error.strerror}",
            hint="in a systemd unit leave out RestrictSUIDSGID= and DynamicUser=, which forbid"
            " that bit; or choose another --pool-dir or --group",
        ) from error


def _allocate(path: Path, size_bytes: int, wait_s: float, on_wait: Callable[[str], None]) -> int:
    room = os.statvfs(path.parent)
    total = room.f_blocks * room.f_frsize
    if total and total < size_bytes:
        raise _too_small(path, size_bytes, total, "in all")
    deadline = time.monotonic() + wait_s
    told = False
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            return fd
        except BaseException as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            if not isinstance(error, OSError):
                raise  # a signal that ends the start
            if error.errno != errno.ENOSPC:
                raise DataDirUnusable(
                    f"pool {path} cannot be allocated: {error.strerror}",
                    hint="choose another folder with --pool-dir",
                ) from error
        room = os.statvfs(path.parent)
        available = room.f_bavail * room.f_frsize
        if time.monotonic() >= deadline:
            raise _too_small(path, size_bytes, available, "available")
        if not told:
            told = True
            on_wait(
                f"{path.parent} has {exact_size(available)} for the pool of"
                f" {exact_size(size_bytes)},"
                f" waiting up to {wait_s:g} s for clients of a former server to let go"
            )
        time.sleep(_POLL_S)


def _too_small(path: Path, wanted: int, found: int, word: str) -> PoolTooSmall:
    return PoolTooSmall(
        f"pool needs {exact_size(wanted)}, {path.parent} has {exact_size(found)} {word}",
        hint="choose a smaller --pool-size, another --pool-dir, or enlarge the mount"
        " (docker: --shm-size)",
        wanted_bytes=wanted,
        available_bytes=found,
    )


def remove_dead_clients(paths: PoolPaths, spare: Container[str] = ()) -> None:
    """Remove the lock files of ended processes; what cannot be looked at stays.

    Args:
        paths: the pool's.
        spare: tokens to leave alone.
    """
    try:
        entries = list(os.scandir(paths.clients))
    except FileNotFoundError:
        return
    for entry in entries:
        try:
            # A fresh hidden file is a client about to take its lock.
            fresh = entry.name.startswith(".") and time.time() - entry.stat().st_mtime < HIDDEN_S
            if entry.name not in spare and not fresh and client_is_dead(Path(entry.path)):
                Path(entry.path).unlink(missing_ok=True)
        except OSError as error:
            log.warning("client lock %s cannot be looked at: %s", entry.path, error.strerror)
