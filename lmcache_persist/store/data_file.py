"""The data file as bytes: size, meta pages, preallocation. Never maps it.

LMDB trusts its own page numbers, so a file that is too short is a SIGBUS once it is
mapped. What is here looks at a file with plain reads first.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lmcache_persist.errors import (
    ConfigError,
    DiskTooSmall,
    FormatTooNew,
    StoreDamaged,
    StoreIOError,
)
from lmcache_persist.posix import sync_folder
from lmcache_persist.printable import command
from lmcache_persist.store.capacity import LMDB_PAGE_BYTES, MIN_CAPACITY_BYTES
from lmcache_persist.units import exact_size, format_size

DATA_NAME = "data.mdb"
LOCK_NAME = "lock.mdb"
UNSYNCED_NAME = "unsynced"
"""Present while commits may not have reached the disk; holds the kernel's boot id."""
DAMAGED_SUFFIX = ".damaged"

STORE = "the store"
LESS_CAPACITY = "lower --capacity, or free space"

DIR_MODE = 0o700
FILE_MODE = 0o600

_PIECE_BYTES = 128 << 20
"""Bytes allocated at once in a file that is in use."""

_KERNEL_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# LMDB 0.9, data format 1, 64 bits: page header (16), then MDB_meta. Source: mdb.c, struct
# MDB_page and MDB_meta; the layout has been the same since 0.9.0.
_HEADER = struct.Struct("=QHHHH")
_META = struct.Struct("=IIQQ48s48sQQ")
_FLAG_META = 0x08
_MAGIC = 0xBEEFC0DE
_DATA_VERSION = 1
_DB_PAD = struct.Struct("=I")
_MAGIC_AND_VERSION = struct.Struct("=II")
_NEXT_HEADER_BYTES = 24
"""Of LMDB 1.0's pages. Source: mdb.c of 1.0, struct MDB_page with mp_txnid."""


@dataclass(frozen=True, slots=True)
class MetaPage:
    """What one of LMDB's two meta pages says.

    Attributes:
        page_bytes: LMDB's page size.
        map_bytes: the largest map the file was ever written through; as long as our
            files are, whatever part of them is used.
        last_page: number of the last page in use.
        transaction: the committed transaction's number; the larger one counts.
    """

    page_bytes: int
    map_bytes: int
    last_page: int
    transaction: int


def _decode_meta_page(page: bytes, number: int) -> MetaPage:
    if len(page) < _HEADER.size + _META.size:
        raise StoreDamaged(f"meta page {number} is beyond the end of the data file")
    pgno, _, flags, _, _ = _HEADER.unpack_from(page)
    magic, version, _, map_bytes, free_db, _, last_page, transaction = _META.unpack_from(
        page, _HEADER.size
    )
    if magic != _MAGIC:
        # The next LMDB's header is longer. Taken for damage, its store would be set aside.
        magic, version = _MAGIC_AND_VERSION.unpack_from(page, _NEXT_HEADER_BYTES)
        if magic != _MAGIC or version <= _DATA_VERSION:
            raise StoreDamaged(f"meta page {number} of the data file is not one of LMDB's")
    if version > _DATA_VERSION:
        raise FormatTooNew(
            f"the data file has LMDB's data format {version}, expected {_DATA_VERSION}",
            hint="start the version of lmcache-persist that wrote it",
            found=version,
            expected=_DATA_VERSION,
        )
    if version != _DATA_VERSION or not flags & _FLAG_META or pgno != number:
        raise StoreDamaged(f"meta page {number} of the data file is not one of LMDB's")
    return MetaPage(_DB_PAD.unpack_from(free_db)[0], map_bytes, last_page, transaction)


def read_meta_page(path: Path) -> MetaPage:
    """The meta page that counts, after a look at both.

    Raises:
        FileNotFoundError: there is no file.
        FormatTooNew: a newer LMDB wrote it.
        StoreDamaged: one is not a meta page, or they contradict each other.
        StoreIOError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            first = _decode_meta_page(file.read(4096), 0)
            if first.page_bytes not in (4096, 8192, 16384, 32768):
                raise StoreDamaged(f"the data file has LMDB pages of {first.page_bytes} bytes")
            file.seek(first.page_bytes)
            second = _decode_meta_page(file.read(4096), 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreIOError(f"data file {path} cannot be read: {error.strerror}") from error
    if second.page_bytes != first.page_bytes:
        raise StoreDamaged("the meta pages of the data file disagree about the page size")
    return first if first.transaction > second.transaction else second


def length_problem(path: Path) -> str | None:
    """Why the data file must not be mapped; None if it may be.

    Raises:
        FileNotFoundError, StoreIOError: as :func:`read_meta_page`.
    """
    try:
        meta = read_meta_page(path)
        found = path.stat().st_size
    except StoreDamaged as error:
        return error.message
    expected = max(meta.map_bytes, (meta.last_page + 1) * meta.page_bytes)
    if found < expected:
        return f"the data file has {found} bytes, expected {expected}"
    return None


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
    """Allocate pieces (start, length), then sync; or cut the file back to ``before``."""
    length_bytes = sum(pieces[-1]) if pieces else before
    done = 0
    try:
        for start, nbytes in pieces:
            os.posix_fallocate(fd, start, nbytes)
            done += nbytes
            on_piece(done)
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
    os.fsync(fd)
    sync_directory(path.parent)


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


def sync_directory(directory: Path) -> None:
    """Make names in a folder durable.

    Raises:
        StoreIOError: as said.
    """
    try:
        sync_folder(directory)
    except OSError as error:
        raise StoreIOError(f"folder {directory} cannot be synced: {error.strerror}") from error


def check_capacity(path: Path, capacity_bytes: int) -> None:
    """Refuse a capacity below what an existing data file was made for.

    Raises:
        ConfigError: says both numbers.
        StoreDamaged: the meta pages are not readable.
    """
    held = read_meta_page(path).map_bytes
    if capacity_bytes < held:
        raise ConfigError(
            f"capacity is {exact_size(capacity_bytes)}, but the store in {path.parent} has"
            f" {exact_size(held)}; a start does not shrink a store",
            hint=f"use --capacity {format_size(held)}, or none, or shrink it first with: "
            + command("resize", path.parent.parent, "--capacity", format_size(capacity_bytes)),
            found=capacity_bytes,
            minimum=held,
        )


def capacity_told(directory: Path, *, at_most: int) -> int:
    """The capacity that a store had which must not be opened; 0 if nothing credible says it.

    Args:
        directory: the store's folder.
        at_most: bytes; more is believed only where the file is that long.
    """
    path = directory / DATA_NAME
    try:
        told, length = read_meta_page(path).map_bytes, path.stat().st_size
    except (FileNotFoundError, FormatTooNew, StoreDamaged, StoreIOError):
        return 0
    credible = MIN_CAPACITY_BYTES <= told <= max(at_most, length) and not told % LMDB_PAGE_BYTES
    return told if credible else 0


def kernel_boot_id() -> str:
    """Which run of the kernel this is; page caches do not outlive one."""
    try:
        return _KERNEL_BOOT_ID.read_text().strip()
    except OSError as error:
        raise StoreIOError(f"{_KERNEL_BOOT_ID} cannot be read: {error.strerror}") from error


def mark_unsynced(directory: Path) -> None:
    """Note that commits from now on may be lost, and the file broken, by a power loss.

    Durable: the note, on return.
    """
    path = directory / UNSYNCED_NAME
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        try:
            os.fchmod(fd, FILE_MODE)
            os.write(fd, kernel_boot_id().encode())
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise StoreIOError(f"{path} cannot be written: {error.strerror}") from error
    sync_directory(directory)


def clear_unsynced(directory: Path) -> None:
    """Take the note back; everything is on the disk."""
    try:
        (directory / UNSYNCED_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise StoreIOError(f"{directory / UNSYNCED_NAME}: {error.strerror}") from error
    sync_directory(directory)


def lost_power_unsynced(directory: Path) -> bool:
    """Whether the kernel was started anew while commits may not have reached the disk."""
    try:
        noted = (directory / UNSYNCED_NAME).read_text().strip()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreIOError(f"{directory / UNSYNCED_NAME}: {error.strerror}") from error
    return noted != kernel_boot_id()


def exists(directory: Path) -> bool:
    """Whether a store's folder holds a data file.

    Raises:
        StoreIOError: it cannot be told.
    """
    try:
        (directory / DATA_NAME).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StoreIOError(f"{directory / DATA_NAME}: {error.strerror}") from error
    return True


def aside_of(directory: Path) -> Path:
    """Where :func:`set_aside` keeps what was in ``directory``."""
    return directory.with_name(directory.name + DAMAGED_SUFFIX)


def has_set_aside(directory: Path) -> bool:
    """Whether a damaged store is kept beside ``directory``."""
    return aside_of(directory).exists()


def discard_set_aside(directory: Path) -> Path | None:
    """Remove what :func:`set_aside` kept beside ``directory``; None if there is nothing.

    Raises:
        StoreIOError: as said.
    """
    target = aside_of(directory)
    if not target.exists():
        return None
    try:
        shutil.rmtree(target)
    except OSError as error:
        raise StoreIOError(f"{target} cannot be removed: {error.strerror}") from error
    return target


def set_aside(directory: Path) -> Path:
    """Move a damaged store out of the way; the one set aside before it is deleted.

    Durable: the move, on return. Nobody may have the store open.

    Returns:
        Where it is now.

    Raises:
        StoreIOError: as said.
    """
    target = aside_of(directory)
    try:
        if target.exists():
            shutil.rmtree(target)
        os.rename(directory, target)
    except OSError as error:
        raise StoreIOError(f"{directory} cannot be set aside: {error.strerror}") from error
    sync_directory(directory.parent)
    return target
