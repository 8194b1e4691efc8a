"""Watermarks and page counts."""

from __future__ import annotations

import pytest

from lmcache_persist.errors import ConfigError
from lmcache_persist.hashing import EXTENT_BYTES
from lmcache_persist.store.capacity import (
    EXTENT_PAGES,
    MIN_CAPACITY_BYTES,
    PageBudget,
    chunk_pages,
    refusal,
    value_pages,
)
from lmcache_persist.store.objects import Place

MIB = 1 << 20


@pytest.mark.parametrize("capacity", [MIN_CAPACITY_BYTES, 64 * MIB, 100 * MIB, 8 << 30, 4 << 40])
def test_watermarks_are_in_order(capacity: int) -> None:
    """The marks: low < high < limit < total, and the reserve is whole extents and at least four."""
    budget = PageBudget.of(capacity)
    assert 0 < budget.low < budget.high < budget.limit < budget.total
    assert budget.reserve % EXTENT_PAGES == 0
    assert budget.reserve >= 4 * EXTENT_PAGES
    assert budget.limit + budget.reserve <= budget.total
    assert budget.chunks_per_eviction >= 64


def test_nine_tenths_can_be_used() -> None:
    """Case C2: 90 objects of 1 MiB in 100 MiB start no eviction."""
    pages = 90 * chunk_pages({Place(0, 0): MIB})
    assert pages <= PageBudget.of(100 * MIB).high


@pytest.mark.parametrize("capacity", [0, MIB, MIN_CAPACITY_BYTES - 4096])
def test_too_small_names_the_minimum(capacity: int) -> None:
    """A capacity below the minimum is refused with both numbers."""
    with pytest.raises(ConfigError, match=f"{capacity} bytes.*{MIN_CAPACITY_BYTES}"):
        PageBudget.of(capacity)


def test_capacity_is_whole_pages() -> None:
    """A capacity that is no multiple of 4096 is refused."""
    with pytest.raises(ConfigError, match="multiple of 4096"):
        PageBudget.of(64 * MIB + 1)


def test_extent_takes_256_pages() -> None:
    """The extent's size is the largest that LMDB keeps in 256 pages."""
    assert value_pages(EXTENT_BYTES) == 256
    assert value_pages(EXTENT_BYTES + 1) == 257
    assert value_pages(100) == 0


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({}, "no objects"),
        ({Place(0, 0): 0}, "empty object"),
        ({Place(70_000, 0): 1}, "rank"),
        ({Place(0, 0): 64 * MIB}, "capacity"),
    ],
)
def test_refusals_say_why(sizes: dict[Place, int], reason: str) -> None:
    """What can never be stored has a reason; everything else has none."""
    budget = PageBudget.of(64 * MIB)
    assert reason in (refusal(sizes, budget) or "")
    assert refusal({Place(0, 0): MIB}, budget) is None
