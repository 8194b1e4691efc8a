"""The pool's slot allocator."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import pytest

from lmcache_persist.store.allocator import SLOT_ALIGNMENT, SlotAllocator, slot_bytes


def test_slots_are_whole_pages() -> None:
    """A slot is the object rounded up to pages."""
    assert [slot_bytes(n) for n in (1, 4096, 4097)] == [4096, 4096, 8192]


def test_slots_never_overlap_and_come_back_whole(seed: int) -> None:
    """After any sequence of calls slots are apart, and once all are freed one run is left."""
    rng = random.Random(seed)
    allocator = SlotAllocator(256 * SLOT_ALIGNMENT)
    held: dict[int, int] = {}
    refused = 0
    for _ in range(5000):
        if held and rng.random() < 0.45:
            offset = rng.choice(list(held))
            allocator.free(offset)
            del held[offset]
            continue
        size = rng.randrange(1, 20 * SLOT_ALIGNMENT)
        offset = allocator.allocate(size)
        if offset is None:
            refused += 1
            continue
        end = offset + slot_bytes(size)
        assert offset % SLOT_ALIGNMENT == 0
        assert end <= allocator.size_bytes
        assert all(end <= other or offset >= stop for other, stop in held.items())
        held[offset] = end
        used = sum(stop - start for start, stop in held.items())
        assert allocator.free_bytes == allocator.size_bytes - used
    assert refused, "the pool was never full: the test is too easy"
    for offset in held:
        allocator.free(offset)
    assert allocator.allocate(allocator.size_bytes) == 0


def test_other_threads_see_no_moment_within_a_call() -> None:
    """Between any two lines of a call the numbers are those of before or after it."""
    allocator = SlotAllocator(4 * SLOT_ALIGNMENT)
    seen: list[tuple[int, int]] = []

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        seen.append((allocator.free_bytes, allocator.largest_free_bytes))
        return look

    def watched(size: int) -> None:
        """Take the one free run in part or as a whole, and give it back."""
        offset = allocator.allocate(size)
        assert offset is not None
        allocator.free(offset)

    before = sys.gettrace()
    for pages in (1, 4):
        sys.settrace(look)
        try:
            watched(pages * SLOT_ALIGNMENT)
        finally:
            sys.settrace(before)
    pages_seen = [(free // SLOT_ALIGNMENT, most // SLOT_ALIGNMENT) for free, most in seen]
    assert len(pages_seen) > 40
    assert {free for free, _ in pages_seen} == {0, 3, 4}
    assert {most for _, most in pages_seen} == {0, 3, 4}
    first_half = pages_seen[: [free for free, _ in pages_seen].index(0)]
    assert {most for _, most in first_half} == {3, 4}


def test_the_best_fit_is_taken() -> None:
    """Of two free runs the smaller that suffices is used, so that the large one stays."""
    allocator = SlotAllocator(10 * SLOT_ALIGNMENT)
    first = allocator.allocate(2 * SLOT_ALIGNMENT)
    allocator.allocate(SLOT_ALIGNMENT)
    assert first == 0
    allocator.free(first)
    assert allocator.allocate(SLOT_ALIGNMENT) == 0
    assert allocator.allocate(7 * SLOT_ALIGNMENT) == 3 * SLOT_ALIGNMENT


def test_what_is_not_held_cannot_be_freed() -> None:
    """A second free, or one of a made-up offset, is a defect that shows."""
    allocator = SlotAllocator(4 * SLOT_ALIGNMENT)
    offset = allocator.allocate(1)
    assert offset is not None
    allocator.free(offset)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(offset)
    with pytest.raises(ValueError, match="positive"):
        allocator.allocate(0)
