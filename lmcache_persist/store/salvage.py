"""What can still be read of a store that was set aside, copied into the one in its place.

A store is set aside when it must not be trusted as a whole: the power failed before it was
synced, its file was cut, servers kept dying of it. Chunks stand for themselves: a record has
a checksum and its extents have digests, so each that is whole may be served.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lmcache_persist.errors import ObjectCorrupt, StoreDamaged, StoreIOError
from lmcache_persist.store import capacity, data_file, meta_page
from lmcache_persist.store.base import ChunkRecord
from lmcache_persist.store.check import Progress
from lmcache_persist.store.copying import StoreCopy, Tally, read_chunk, sizes_of
from lmcache_persist.store.offline import OfflineStore, repairing, verify_pages


@dataclass(slots=True)
class Salvaged:
    """What became of the chunks of a store that was set aside.

    Attributes:
        taken: copied.
        held: in the present store already.
        bad: proved bad.
        stale: of another binding.
        no_room: left, as the present store has no room; the least recently used.
        dropped: chunks of which too little was left to tell what they were.
    """

    taken: Tally = field(default_factory=Tally)
    held: Tally = field(default_factory=Tally)
    bad: Tally = field(default_factory=Tally)
    stale: Tally = field(default_factory=Tally)
    no_room: Tally = field(default_factory=Tally)
    dropped: int = 0


def make_readable(directory: Path, *, at_most: int) -> int:
    """Put a store that was set aside in order, as far as reading needs it: length, sums, order.

    Args:
        directory: the store's folder, in nobody's use.
        at_most: bytes of a file that was cut, unless it is that long: see
            :func:`~.meta_page.capacity_told`.

    Returns:
        Chunks that were dropped for it: their records are bad, or extents are absent.

    Raises:
        StoreDamaged: its trees cannot be walked, or nothing says where they are.
        DiskTooSmall: the part of the file that was cut off has no room; says both numbers.
        FormatTooNew: a newer version wrote it.
        StoreIOError: as said.
    """
    path = directory / data_file.DATA_NAME
    meta_page.read_meta_page(path)
    found, told = path.stat().st_size, meta_page.capacity_told(directory, at_most=at_most)
    try:
        if found < told:
            os.truncate(path, told)  # a hole; what was cut off may never have been in use
        problem = meta_page.length_problem(path) or verify_pages(directory)
        if problem and found < told:
            os.truncate(path, found)
    except OSError as error:
        raise StoreIOError(f"{path} cannot be lengthened: {error.strerror}") from error
    if problem:
        raise StoreDamaged(problem)
    with repairing(directory, unwanted={}, progress=Progress(), digests=False) as work:
        return len({mended.dropped for mended in work.run() if mended.dropped})


def salvage(
    source: OfflineStore, copy: StoreCopy, on_chunk: Callable[[ChunkRecord], None]
) -> Salvaged:
    """Copy what is good and not there yet, the most recently used first, up to the low mark.

    Args:
        source: a store after :func:`make_readable`.
        copy: the present store (:meth:`StoreCopy.into`).
        on_chunk: told of each chunk that is taken.

    Durable: after :meth:`StoreCopy.finish`.

    Raises:
        StoreError: reading or writing failed; what was copied so far stays, and is whole.
    """
    found, pages, full = Salvaged(), capacity.PageSum(copy.page_bytes), False
    with contextlib.closing(source.records_by_use()) as records:
        for record in records:
            if record.binding_id != copy.binding_id:
                found.stale.add(record)
            elif copy.holds(record.key):
                found.held.add(record)
            elif full or copy.refuses(record) or pages.add(sizes_of(record)) > copy.room_pages:
                full = full or not copy.refuses(record)
                found.no_room.add(record)
            else:
                try:
                    copy.add(record, read_chunk(source, record))
                except ObjectCorrupt:
                    found.bad.add(record)
                    continue
                found.taken.add(record)
                on_chunk(record)
    return found
