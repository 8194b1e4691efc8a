"""Best-fit allocation of slots in the pool; offsets and bytes only, no memory is touched.

Free runs are kept sorted by size and are merged with their neighbours, so that a pool
that served one model's slots serves another's after eviction.
"""

from __future__ import annotations

from bisect import bisect_left, insort

SLOT_ALIGNMENT = 4096
"""Bytes. Whole pages, so that reads into a slot are aligned and two slots share none."""


def slot_bytes(object_bytes: int) -> int:
    """Bytes that a slot for an object of ``object_bytes`` takes of the pool."""
    return -(-object_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class SlotAllocator:
    """Hands out byte ranges of ``[0, size_bytes)``.

    Attributes:
        free_bytes: in all free runs.
        largest_free_bytes: of the longest free run: the largest slot that needs no eviction.

    Threads: one (the server's loop); the two numbers any: they are as before or after a call,
        never of a moment within it.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < SLOT_ALIGNMENT:
            raise ValueError(f"pool of {size_bytes} bytes, expected at least {SLOT_ALIGNMENT}")
        self.size_bytes = size_bytes // SLOT_ALIGNMENT * SLOT_ALIGNMENT
        self._used: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._start_size: dict[int, int] = {}
        self._end_start: dict[int, int] = {}
        self._add_free(0, self.size_bytes)
        self.free_bytes = self.largest_free_bytes = self.size_bytes

    def allocate(self, object_bytes: int) -> int | None:
        """Offset of a slot for ``object_bytes``, or None if no free run is long enough."""
        if object_bytes <= 0:
            raise ValueError(f"object of {object_bytes} bytes, expected a positive number")
        need = slot_bytes(object_bytes)
        at = bisect_left(self._by_size, (need, 0))
        if at == len(self._by_size):
            return None
        size, start = self._by_size[at]
        self._remove_free(start, size)
        if size > need:
            self._add_free(start + need, size - need)
        self._used[start] = need
        self._publish(-need)
        return start

    def free(self, offset: int) -> None:
        """Take a slot back. ``ValueError`` for an offset that is not handed out."""
        size = self._used.pop(offset, None)
        if size is None:
            raise ValueError(f"slot at {offset} is not allocated")
        start, end = offset, offset + size
        before = self._end_start.get(start)
        if before is not None:
            self._remove_free(before, start - before)
            start = before
        after_size = self._start_size.get(end)
        if after_size is not None:
            self._remove_free(end, after_size)
            end += after_size
        self._add_free(start, end - start)
        self._publish(size)

    def _publish(self, freed_bytes: int) -> None:
        self.free_bytes += freed_bytes
        self.largest_free_bytes = self._by_size[-1][0] if self._by_size else 0

    def _add_free(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._start_size[start] = size
        self._end_start[start + size] = start

    def _remove_free(self, start: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, start))]
        del self._start_size[start]
        del self._end_start[start + size]
