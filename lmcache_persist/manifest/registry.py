"""Which manifests this process has open.

POSIX locks belong to the process and fall when *any* descriptor of the file is closed. So
while SQLite has a manifest open here, nobody else in this process may open and close it.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NewType

FileKey = NewType("FileKey", tuple[int, int])
"""Device and inode: the same for every name of a file."""

_lock = threading.RLock()
_open: Counter[FileKey] = Counter()


def _key(path: Path) -> FileKey:
    status = os.stat(path)
    return FileKey((status.st_dev, status.st_ino))


def is_open(path: Path) -> bool:
    """Whether SQLite has the file open in this process. Hold :func:`guard` meanwhile."""
    try:
        return _open[_key(path)] > 0
    except FileNotFoundError:
        return False


@contextmanager
def guard() -> Iterator[None]:
    """Nobody else in this process opens a manifest meanwhile, by SQLite or to copy it."""
    with _lock:
        yield


@contextmanager
def not_open(path: Path) -> Iterator[None]:
    """As :func:`guard`, and the file is not open.

    Raises:
        RuntimeError: it is.
    """
    with _lock:
        if is_open(path):
            raise RuntimeError(f"manifest {path} is open in this process: ask that object")
        yield


def add(path: Path) -> FileKey:
    """Record that SQLite is about to open an existing file; to be given to :func:`remove`."""
    with _lock:
        key = _key(path)
        _open[key] += 1
        return key


def remove(key: FileKey) -> None:
    """Record that SQLite closed a file."""
    with _lock:
        _open[key] -= 1
        if _open[key] <= 0:
            del _open[key]
