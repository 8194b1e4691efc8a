"""How many pages a tier may use, and how many a chunk takes. Pure.

LMDB copies pages on write and gives the old ones back two transactions later, so even a
transaction that only removes things takes free pages first. Therefore a *reserve*,
counted in whole extents, is never filled by writes. From the top::

    total   all pages of the file
    limit   total - reserve - LMDB's own bookkeeping: writes stop here and evict
    high    background eviction starts above it
    low     ... and stops below it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lmcache_persist.errors import ConfigError
from lmcache_persist.hashing import extent_lengths
from lmcache_persist.store.objects import MAX_PLACES, Place
from lmcache_persist.units import PAGE_BYTES, exact_size, format_size

LMDB_PAGE_BYTES = PAGE_BYTES
EXTENT_PAGES = 256
"""Pages of a full extent. Source: EXTENT_BYTES plus LMDB's 16-byte page header."""

MIN_CAPACITY_BYTES = 16 << 20
"""Bytes. Below, the reserve would be most of the file."""

_PAGE_HEADER_BYTES = 16
_NODE_OVERHEAD_BYTES = 8 + 2 + 16  # node header, its pointer, an extent's key
_ORDER_ENTRY_BYTES = 8 + 2 + 8 + 64  # node header, its pointer, key, value
_MIN_RESERVE_EXTENTS = 4
_RESERVE_SHARE = 64
_LOW_SHARE = 16
_META_PAGES = 2
_FREELIST_SHARE = 512  # 8 bytes of LMDB's free list per page of 4096
_FIXED_PAGES = 16
_PAGES_PER_EVICTED_CHUNK = 16  # paths through three trees, copied


@dataclass(frozen=True, slots=True)
class PageBudget:
    """The watermarks of a tier, in pages (see the module's text)."""

    page_bytes: int
    total: int
    limit: int
    high: int
    low: int
    reserve: int

    @classmethod
    def of(cls, capacity_bytes: int, page_bytes: int = LMDB_PAGE_BYTES) -> PageBudget:
        """The budget for a capacity.

        Raises:
            ConfigError: the capacity is too small, or no whole number of pages.
        """
        if capacity_bytes < MIN_CAPACITY_BYTES:
            raise ConfigError(
                f"capacity is {exact_size(capacity_bytes)}, expected at least"
                f" {exact_size(MIN_CAPACITY_BYTES)}",
                hint=f"--capacity {format_size(MIN_CAPACITY_BYTES)}",
                found=capacity_bytes,
                minimum=MIN_CAPACITY_BYTES,
            )
        if capacity_bytes % page_bytes:
            raise ConfigError(
                f"capacity is {capacity_bytes} bytes, expected a multiple of {page_bytes}"
            )
        total = capacity_bytes // page_bytes
        reserve = EXTENT_PAGES * max(_MIN_RESERVE_EXTENTS, total // _RESERVE_SHARE // EXTENT_PAGES)
        limit = total - reserve - total // _FREELIST_SHARE - _FIXED_PAGES
        high = limit - reserve // 2
        low = high - max(reserve, total // _LOW_SHARE)
        return cls(page_bytes, total, limit, high, low, reserve)

    @property
    def largest_chunk(self) -> int:
        """Pages of the largest chunk that is taken; room for trees and lag stays beside it."""
        return self.low * 3 // 4

    @property
    def chunks_per_eviction(self) -> int:
        """Chunks that one evicting transaction removes at most, so that the reserve holds it."""
        return self.reserve // _PAGES_PER_EVICTED_CHUNK

    @property
    def pages_per_transaction(self) -> int:
        """Pages that one writing transaction takes, unless a single chunk takes more."""
        return max(EXTENT_PAGES, self.low // 4)


def grown(budget: PageBudget, capacity_bytes: int) -> PageBudget:
    """The budget of a tier that is to have more room.

    Raises:
        ConfigError: it is less, or no capacity.
    """
    held_bytes = budget.total * budget.page_bytes
    if capacity_bytes < held_bytes:
        raise ConfigError(
            f"capacity is {exact_size(capacity_bytes)}, but the store has"
            f" {exact_size(held_bytes)}; one that is in use only grows",
            hint="to make it smaller, stop the server, then: lmcache-persist resize; to use"
            " less of it: lmcache-persist prune --down-to",
            found=capacity_bytes,
            minimum=held_bytes,
        )
    return PageBudget.of(capacity_bytes, budget.page_bytes)


def value_pages(nbytes: int, page_bytes: int = LMDB_PAGE_BYTES) -> int:
    """Overflow pages of a value; 0 if it lies within a leaf. Source: LMDB's me_nodemax."""
    node_max = ((page_bytes - _PAGE_HEADER_BYTES) // 2 & -2) - 2
    if nbytes + _NODE_OVERHEAD_BYTES <= node_max:
        return 0
    return -(-(nbytes + _PAGE_HEADER_BYTES) // page_bytes)


def chunk_pages(sizes: Mapping[Place, int], page_bytes: int = LMDB_PAGE_BYTES) -> int:
    """Pages that a chunk with objects of these sizes takes: an upper estimate."""
    overflow, in_leaves = _cost(sizes, page_bytes)
    # Leaves are at least half full; paths of three trees may be split.
    return overflow + -(-2 * in_leaves // page_bytes) + 2


class PageSum:
    """Pages that many chunks take together: closer than the sum of their upper estimates."""

    def __init__(self, page_bytes: int = LMDB_PAGE_BYTES) -> None:
        self._page_bytes = page_bytes
        self._overflow = _FIXED_PAGES
        self._in_leaves = 0

    def add(self, sizes: Mapping[Place, int]) -> int:
        """One more chunk; the pages of all."""
        overflow, in_leaves = _cost(sizes, self._page_bytes)
        self._overflow += overflow
        self._in_leaves += in_leaves + _ORDER_ENTRY_BYTES
        return self._overflow + -(-2 * self._in_leaves // self._page_bytes)


def _cost(sizes: Mapping[Place, int], page_bytes: int) -> tuple[int, int]:
    """Overflow pages of a chunk, and bytes that lie in leaves."""
    overflow = in_leaves = 0
    num_extents = 0
    for nbytes in sizes.values():
        lengths = extent_lengths(nbytes)
        num_extents += len(lengths)
        for length in lengths[-2:]:
            pages = value_pages(length, page_bytes)
            overflow += pages
            in_leaves += _NODE_OVERHEAD_BYTES + (0 if pages else length)
        overflow += max(0, len(lengths) - 2) * EXTENT_PAGES
    record_bytes = 200 + 12 * len(sizes) + 16 * num_extents
    overflow += value_pages(record_bytes, page_bytes)
    return overflow, in_leaves + record_bytes


def refusal(sizes: Mapping[Place, int], budget: PageBudget) -> str | None:
    """Why a chunk with objects of these sizes can never be written; None if it can."""
    if not sizes:
        return "chunk has no objects"
    if len(sizes) > MAX_PLACES or any(max(place) > MAX_PLACES for place in sizes):
        return f"chunk has a rank, a group or a number of objects above {MAX_PLACES}"
    if min(sizes.values()) <= 0:
        return "chunk has an empty object"
    pages = chunk_pages(sizes, budget.page_bytes)
    if pages > budget.largest_chunk:
        return (
            f"chunk takes {pages * budget.page_bytes} bytes on disk, above the"
            f" {budget.largest_chunk * budget.page_bytes} that the capacity allows"
        )
    return None
