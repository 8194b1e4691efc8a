"""What server and clients must agree on about the shared-memory pool: names and locks.

Beside the pool file ``NAME.pool`` lie ``NAME.server.lock``, on which the server holds an
exclusive ``flock`` for its whole life, and the folder ``NAME.clients`` with one file per
client process, on which that process holds ``lockf`` for its whole life. Only the kernel
says that a process is dead: by dropping its lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lmcache_persist.errors import LeaseError, MalformedMessage
from lmcache_persist.posix import try_flock

POOL_PREFIX = "lmcache-persist-"
DEFAULT_POOL_DIR = "/dev/shm"  # noqa: S108 - the place for POSIX shared memory

_POOL_NAME = re.compile(re.escape(POOL_PREFIX) + r"[0-9a-f]{32}\.pool")
_EXPECTED_PATH = f"an absolute path to a file {POOL_PREFIX}<32 hex digits>.pool"


@dataclass(frozen=True, slots=True)
class PoolPaths:
    """The files of one store's pool, all beside each other."""

    pool: Path

    @classmethod
    def of(cls, pool_dir: str | Path, store_uuid: str) -> PoolPaths:
        """Paths for a store; one store has one name, whoever serves it."""
        return cls(Path(pool_dir) / f"{POOL_PREFIX}{store_uuid}.pool")

    @classmethod
    def said(cls, path: str) -> PoolPaths:
        """The paths as a server says them.

        Raises:
            MalformedMessage: no absolute path, or not the name of a pool: a server has no
                say in which files a client opens beyond that.
        """
        if not path.startswith("/") or "\0" in path or not _POOL_NAME.fullmatch(Path(path).name):
            raise MalformedMessage(f"pool is at {path!r:.200}, expected {_EXPECTED_PATH}")
        return cls(Path(path))

    @property
    def server_lock(self) -> Path:
        """Held exclusively (flock) by the server that made the pool."""
        return self.pool.with_suffix(".server.lock")

    @property
    def clients(self) -> Path:
        """Folder of the client locks."""
        return self.pool.with_suffix(".clients")

    def client_lock(self, token: str) -> Path:
        """One client's lock; ``token`` is 32 hex digits (checked by the protocol)."""
        return self.clients / token


def server_is_gone(paths: PoolPaths) -> bool:
    """Whether no living server holds the pool (also when its lock file is gone)."""
    try:
        fd = os.open(paths.server_lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        # Shared, so that two clients that look at once do not take each other for a server.
        return try_flock(fd, exclusive=False)
    finally:
        os.close(fd)


def client_is_dead(lock: Path) -> bool:
    """Whether the process that held a client lock is gone. The caller is another process."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    finally:
        os.close(fd)
    return True


def _let_server_open(fd: int, folder: Path) -> None:
    """Let a server that runs as another user look at a client lock.

    With ``--group`` the folder is the group's, and so is the lock. Without one only root
    comes here beside the owner, and gives him the lock.
    """
    found = os.stat(folder)
    if found.st_mode & stat.S_IWGRP:
        os.fchmod(fd, 0o660)
    elif os.geteuid() == 0:
        os.fchown(fd, found.st_uid, found.st_gid)


class ClientLock:
    """This process's client lock for one pool; taken once, held until the process ends.

    ``lockf`` belongs to the process and falls with the first close of the file by it, so
    the file is opened exactly once per process and pool; a forked child takes its own.
    """

    _held: ClassVar[dict[tuple[int, Path], ClientLock]] = {}
    _guard = threading.Lock()

    def __init__(self, paths: PoolPaths) -> None:
        self.token = secrets.token_hex(16)
        path = paths.client_lock(self.token)
        # Under a hidden name until locked: the server must not take it for a dead client's.
        hidden = path.with_name(f".{self.token}")
        try:
            self._fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _let_server_open(self._fd, paths.clients)
            os.rename(hidden, path)
        except OSError as error:
            raise LeaseError(
                f"client lock {path} cannot be taken: {error.strerror}",
                hint="the engine must see the server's pool folder and may write to it",
            ) from error

    @classmethod
    def of_process(cls, paths: PoolPaths) -> ClientLock:
        """The lock of this process for this pool, taken now if it is the first time.

        Threads: any.
        """
        key = (os.getpid(), paths.pool)
        with cls._guard:
            lock = cls._held.get(key)
            if lock is not None and not paths.client_lock(lock.token).exists():
                os.close(lock._fd)  # its server ended well and cleaned up
                lock = None
            if lock is None:
                lock = cls._held[key] = cls(paths)
            return lock

    @classmethod
    def _after_fork(cls) -> None:
        """In a forked child: the parent's locks are not ours, nor is who held the guard."""
        cls._held = {}
        cls._guard = threading.Lock()


os.register_at_fork(after_in_child=ClientLock._after_fork)
