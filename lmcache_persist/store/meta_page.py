"""LMDB's two meta pages, by plain reads: how long a data file must be, and what it was made for.

LMDB trusts its own page numbers, so a file that is too short is a SIGBUS once it is
mapped. What is here looks at a file first, and never maps it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from lmcache_persist.errors import ConfigError, FormatTooNew, StoreDamaged, StoreIOError
from lmcache_persist.printable import command
from lmcache_persist.store.capacity import LMDB_PAGE_BYTES, MIN_CAPACITY_BYTES
from lmcache_persist.store.data_file import DATA_NAME
from lmcache_persist.units import exact_size, format_size

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
        length = path.stat().st_size
        told = _map_bytes(path)
    except (FileNotFoundError, FormatTooNew, StoreIOError):
        return 0
    if _is_capacity(told) and told <= max(at_most, length):
        return told
    # A store's file is allocated in full: its length tells it, too.
    return length if _is_capacity(length) else 0


def _map_bytes(path: Path) -> int:
    """As the meta pages say, 0 if they are broken."""
    try:
        return read_meta_page(path).map_bytes
    except StoreDamaged:
        return 0


def _is_capacity(num_bytes: int) -> bool:
    return num_bytes >= MIN_CAPACITY_BYTES and not num_bytes % LMDB_PAGE_BYTES
