"""Room for a data file: asked for, allocated in full, given back."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lmcache_persist.errors import DiskTooSmall, StoreIOError
from lmcache_persist.store.data_file import sync_directory
from lmcache_persist.units import exact_size

STORE = "the store"
LESS_CAPACITY = "lower --capacity, or free space"
SET_CAPACITY = "set --capacity to what there is room for, or free space"
"""The way out where nobody has set one."""

_PIECE_BYTES = 128 << 20
"""Bytes allocated at once in a file that is in use."""


def check_room(
    directory: Path, needed_bytes: int, *, what: str = STORE, way_out: str = LESS_CAPACITY
) -> None:
    """Refuse when the file system has less than ``needed_bytes`` free.

    Args:
        directory: on it.
        needed_bytes: of new blocks.
        what: the room is for.
        way_out: the hint.

    Raises:
        DiskTooSmall: says both numbers.
    """
    stats = os.statvfs(directory)
    available = stats.f_bavail * stats.f_frsize
    if available < needed_bytes:
        raise too_small(directory, needed_bytes, available, what, way_out)


def too_small(
    directory: Path,
    needed_bytes: int,
    available_bytes: int,
    what: str = STORE,
    way_out: str = LESS_CAPACITY,
) -> DiskTooSmall:
    """The refusal, with both numbers."""
    return DiskTooSmall(
        f"{directory} has {exact_size(available_bytes)} available, expected"
        f" {exact_size(needed_bytes)} more for {what}",
        hint=way_out,
        needed=needed_bytes,
        available=available_bytes,
    )


def preallocate(path: Path, length_bytes: int) -> None:
    """Give the file all of its blocks, up to ``length_bytes``; never shortens it.

    A full disk shows here, not as a SIGBUS in the middle of a write through the map. A
    file that could not be extended is cut back to what it was.

    Durable: the file's blocks, length and name, on return.

    Raises:
        DiskTooSmall: no room; says both numbers.
        StoreIOError: any other error.
    """
    with _opened(path) as fd:
        _allocate(path, fd, [(0, length_bytes)], os.fstat(fd).st_size, lambda done: None)


def extend(
    path: Path, in_use: int, held_bytes: int, length_bytes: int, on_piece: Callable[[int], None]
) -> None:
    """As :func:`preallocate`, for a file of which the first ``held_bytes`` are mapped.

    Those are left alone: where the file system cannot allocate, the C library reads and
    writes back a byte of each block, which must not meet a write through the map. One piece
    at a time, because a fault in the map waits for the piece that is being allocated.

    Args:
        path: the file.
        in_use: a descriptor of it: another one that took its place is left alone.
        held_bytes: of it are mapped; a failure cuts off what is behind them, of earlier tries too.
        length_bytes: to be had in the end.
        on_piece: told the bytes allocated so far; what it raises ends it like a full disk.

    Durable: the file's blocks, length and name, on return.

    Raises:
        DiskTooSmall, StoreIOError: as :func:`preallocate`.
    """
    starts = range(held_bytes, length_bytes, _PIECE_BYTES)
    pieces = [(start, min(_PIECE_BYTES, length_bytes - start)) for start in starts]
    with _opened(path) as fd:
        _require_same(path, fd, in_use)
        _allocate(path, fd, pieces, held_bytes, on_piece)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The file's descriptor; what the operating system says within is about extending it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StoreIOError(f"data file {path} cannot be opened: {error.strerror}") from error
    try:
        yield fd
    except OSError as error:
        raise StoreIOError(f"data file {path} cannot be extended: {error.strerror}") from error
    finally:
        os.close(fd)


def _allocate(
    path: Path,
    fd: int,
    pieces: Sequence[tuple[int, int]],
    before: int,
    on_piece: Callable[[int], None],
) -> None:
    """Allocate pieces (start, length) and sync; or cut the file back to ``before``."""
    length_bytes = sum(pieces[-1]) if pieces else before
    done = 0
    try:
        for start, nbytes in pieces:
            os.posix_fallocate(fd, start, nbytes)
            done += nbytes
            on_piece(done)
        os.fsync(fd)
        sync_directory(path.parent)
    except BaseException as error:
        allocated = os.fstat(fd).st_blocks * 512
        if os.fstat(fd).st_size > before:
            os.ftruncate(fd, before)
        code = error.errno if isinstance(error, OSError) else None
        if code not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        stats = os.fstatvfs(fd)
        raise too_small(
            path.parent, length_bytes - min(before, allocated), stats.f_bavail * stats.f_frsize
        ) from error


def _require_same(path: Path, fd: int, in_use: int) -> None:
    if not os.path.samestat(os.fstat(fd), os.fstat(in_use)):
        raise StoreIOError(f"data file {path} is another file now than the one in use")


def cut_back(path: Path, in_use: int, length_bytes: int) -> None:
    """Give back what a file has beyond ``length_bytes``, of which nothing may be mapped.

    Args:
        path: the file.
        in_use: as for :func:`extend`.
        length_bytes: that it keeps.

    Raises:
        StoreIOError: as said.
    """
    with _opened(path) as fd:
        _require_same(path, fd, in_use)
        if os.fstat(fd).st_size > length_bytes:
            os.ftruncate(fd, length_bytes)
