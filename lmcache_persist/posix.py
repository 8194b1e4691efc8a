"""System calls that several parts need in the same way. Raise plain ``OSError``."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Durable: on return, the names in ``folder``."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def discard_output(fd: int) -> None:
    """Let what is still to be written to ``fd`` go nowhere, without an error."""
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.dup2(null, fd)
    finally:
        os.close(null)


def try_flock(fd: int, *, exclusive: bool = True) -> bool:
    """Take a flock without waiting; False if somebody else's is in the way."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def lock_holders(paths: Iterable[Path]) -> list[str]:
    """Other processes with a POSIX lock on one of these files, as ``pid N (name)``.

    For people: only those of the own PID namespace are seen, and a file counts by its inode
    alone. Nothing is opened, for closing it would drop this process's own locks. Never fails.

    Source: proc_locks(5): ``N: POSIX ADVISORY WRITE pid major:minor:inode start end``.
    """
    inodes = set()
    for path in paths:
        with contextlib.suppress(OSError):
            inodes.add(str(os.stat(path).st_ino))
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    found = {}
    for fields in map(str.split, lines):
        # A line with an arrow is of one who waits.
        if len(fields) >= 6 and fields[1] == "POSIX" and fields[5].split(":")[-1] in inodes:
            pid = fields[4]
            if pid.isdigit() and int(pid) not in (0, os.getpid()):
                found[pid] = f"pid {pid}{_command_of(pid)}"
    return list(found.values())


def _command_of(pid: str) -> str:
    try:
        return f" ({Path('/proc', pid, 'comm').read_text().strip()})"
    except OSError:
        return ""
