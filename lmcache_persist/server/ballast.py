"""Room kept for the manifest, so that a server can be restarted on a full disk.

The store's file is allocated in full and needs nothing more. SQLite needs a little: its
``-shm`` and ``-wal`` files are made at each start and removed at each end, and whatever
fills the disk would take their room in between. So a file of 1 MiB holds it; a start that
finds less than that gives the file up, and makes it again once there is room.
"""

from __future__ import annotations

import contextlib
import logging
import os

from lmcache_persist.datadir import DataDir

log = logging.getLogger(__name__)

BALLAST_BYTES = 1 << 20
"""Bytes. Thirty times what opening a manifest takes."""


def give_up_if_full(paths: DataDir) -> None:
    """Remove the ballast if the disk is full without it."""
    stats = os.statvfs(paths.root)
    if stats.f_bavail * stats.f_frsize < BALLAST_BYTES and paths.ballast.exists():
        log.warning("the disk of %s is full; using the room kept for the manifest", paths.root)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(paths.ballast)


def take(paths: DataDir) -> None:
    """Make the ballast if it is absent and there is room for it."""
    if paths.ballast.exists():
        return
    try:
        fd = os.open(paths.ballast, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            os.posix_fallocate(fd, 0, BALLAST_BYTES)
        finally:
            os.close(fd)
    except OSError as error:
        log.debug("no ballast in %s: %s", paths.root, error.strerror)
        with contextlib.suppress(OSError):
            os.unlink(paths.ballast)
