"""System calls that several parts need in the same way. Raise plain ``OSError``."""

from __future__ import annotations

import errno
import fcntl
import os
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
