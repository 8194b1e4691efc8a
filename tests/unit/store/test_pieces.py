"""A store cut in pieces, and copies made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_persist.errors import ConfigError, MalformedMessage, ObjectCorrupt, StoreFull
from lmcache_persist.store import copying, offline, pieces
from lmcache_persist.store.base import ChunkWrite, Place
from lmcache_persist.store.lmdb_disk import LmdbDisk
from lmcache_persist.store.memory_disk import MemoryDisk
from lmcache_persist.store.pieces import Assembler, Part
from store_support import FULL_EXTENT, MIB, UUID, assert_reads_back, binding, chunk, key

SIZES = {Place(0, 0): 5 * FULL_EXTENT + 7, Place(0, 1): 100, Place(1, 0): FULL_EXTENT}


@pytest.fixture
def source() -> MemoryDisk:
    """Small chunks and some that take several pieces."""
    disk = MemoryDisk(256 * MIB, uuid=UUID)
    disk.write_stamp(binding())
    disk.write([chunk(number, 3000) for number in range(50)])
    disk.write([chunk(number, SIZES, model=2) for number in range(3)])
    return disk


def walk(source: pieces.Source, between: Callable[[], None] = lambda: None) -> Iterator[list[Part]]:
    """All pieces; their cursors grow, and none is larger than a message may be."""
    cursor = pieces.beginning(source)
    while cursor:
        piece = pieces.cut(source, cursor)
        assert sum(len(one) for part in piece.parts for one in part.extents) <= pieces.PIECE_BYTES
        yield piece.parts
        assert not piece.cursor or piece.cursor > cursor
        cursor = piece.cursor
        between()


def assembled(parts: Iterator[list[Part]]) -> tuple[list[ChunkWrite], int]:
    """Whole chunks, and how many stayed incomplete."""
    assembler, found = Assembler(), []
    for some in parts:
        found += [ChunkWrite(record.key, contents) for record, contents in assembler.feed(some)]
    assembler.end()
    return found, assembler.incomplete


def test_what_is_cut_is_put_together_again(source: MemoryDisk) -> None:
    """Every chunk comes once, in the order of keys, byte for byte, whatever a piece ends with."""
    source.write([chunk(number, 2 * FULL_EXTENT, model=3) for number in range(6)])
    found, incomplete = assembled(walk(source))
    assert incomplete == 0
    assert [one.key for one in found] == sorted(one.key for one in found)
    assert len(found) == 59
    assert_reads_back(source, found)


def test_a_busy_store_is_cut_once(source: MemoryDisk) -> None:
    """Touches change nothing, what is stored later is left out, what is evicted is missed."""
    numbers = iter(range(1000, 2000))
    victim = max(key(number, model=2) for number in range(3))

    def busy() -> None:
        source.touch([key(number) for number in range(50)])
        source.write([chunk(next(numbers), 3000)])
        source.drop({victim: None})

    found, incomplete = assembled(walk(source, busy))
    keys = [one.key for one in found]
    assert len(set(keys)) == len(keys)
    assert victim not in keys or incomplete == 0
    assert set(keys) | {victim} == {key(number) for number in range(50)} | {
        key(number, model=2) for number in range(3)
    }


def test_a_chunk_evicted_between_two_pieces_is_incomplete(source: MemoryDisk) -> None:
    """The parts that came are no chunk."""
    parts = []
    cursor = pieces.beginning(source)
    while cursor:
        piece = pieces.cut(source, cursor)
        parts.append(piece.parts)
        last = piece.parts[-1] if piece.parts else None
        if last is not None and piece.cursor and len(parts) == 1:
            source.drop({key(number, model=2): None for number in range(3)})
        cursor = piece.cursor
    found, incomplete = assembled(iter(parts))
    assert (len(found), incomplete) == (50, 1)


def test_altered_parts_are_refused(source: MemoryDisk) -> None:
    """A flipped byte, a wrong record, a gap: never taken for a chunk."""
    whole = [part for some in walk(source) for part in some]
    large = next(index for index, part in enumerate(whole) if len(part.extents) > 1)
    first = whole[large]
    flipped = [bytes([first.extents[0][0] ^ 1]) + first.extents[0][1:], *first.extents[1:]]
    record = bytes([first.record[0] ^ 1]) + first.record[1:]
    for bad in (
        first._replace(extents=flipped),
        first._replace(record=record),
        first._replace(first=1),
        first._replace(extents=[*first.extents, b"x"]),
    ):
        with pytest.raises(MalformedMessage):
            list(Assembler().feed([bad]))
    with pytest.raises(ValueError, match="cursor"):
        pieces.cut(source, b"x")


def make_copy(
    source: MemoryDisk, directory: Path, capacity_bytes: int = 64 * MIB
) -> copying.StoreCopy:
    """All of a store, copied and finished."""
    copy = copying.StoreCopy.make(directory, capacity_bytes, UUID, binding())
    with copy:
        assembler = Assembler()
        for parts in walk(source):
            for record, contents in assembler.feed(parts):
                copy.add(record, contents)
        copy.finish()
    return copy


def test_a_copy_is_a_store_in_good_order(source: MemoryDisk, tmp_path: Path) -> None:
    """Order, hits and age are kept; it opens, verifies, and goes on where the other one was."""
    source.touch([key(7)])
    source.apply_touches()
    copy = make_copy(source, tmp_path / "store")
    assert (copy.copied.total.chunks, copy.copied.total.nbytes) == (53, source.usage().bytes)
    assert list(offline.check(tmp_path / "store")) == []
    peeked = offline.peek(tmp_path / "store")
    assert peeked is not None
    assert (peeked.uuid, peeked.stamp, peeked.clean_shutdown) == (UUID, binding(), True)
    disk = LmdbDisk.open(tmp_path / "store", 64 * MIB)
    try:
        records = source.scan(b"", 100)
        for record in records:
            [found] = disk.find([record.key])
            assert found is not None
            assert (found.order, found.hits, found.stored_at, found.objects) == (
                record.order,
                record.hits,
                record.stored_at,
                record.objects,
            )
        assert disk.find([key(7)])[0].hits == 1  # type: ignore[union-attr]
        disk.write([chunk(99)])
        [last] = disk.find([key(99)])
        assert last is not None
        assert last.order > max(record.order for record in records)
        assert_reads_back(disk, [chunk(99), chunk(0, SIZES, model=2)])
    finally:
        disk.close()
    assert list(offline.check(tmp_path / "store")) == []


def test_a_copy_that_does_not_fit_says_so(source: MemoryDisk, tmp_path: Path) -> None:
    """No chunk is left out in silence."""
    with pytest.raises(StoreFull):
        make_copy(source, tmp_path / "store", 16 * MIB)
    with pytest.raises(ConfigError):
        make_copy(source, tmp_path / "other", 4096)


def test_a_copy_takes_no_other_bytes(source: MemoryDisk, tmp_path: Path) -> None:
    """What differs from its record is refused, whoever gave it."""
    [record] = source.find([key(1)])
    assert record is not None
    with copying.StoreCopy.make(tmp_path / "store", 16 * MIB, UUID, binding()) as copy:
        copy.add(record, {Place(0, 0): b"x" * 3000})
        with pytest.raises(ObjectCorrupt):
            copy.finish()


@pytest.mark.parametrize(("chunks", "nbytes"), [(1, 1), (4000, 10), (300, 60_000), (20, 3 * MIB)])
def test_a_copy_fits_into_the_capacity_that_is_computed(
    tmp_path: Path, chunks: int, nbytes: int
) -> None:
    """From what a store has in use follows a capacity that takes all of it, without eviction."""
    disk = LmdbDisk.open(tmp_path / "store", 128 * MIB, uuid=UUID)
    disk.write_stamp(binding())
    disk.write([chunk(number, nbytes) for number in range(chunks)])
    usage = disk.usage()
    assert usage.chunks == chunks
    disk.close()
    capacity_bytes = copying.capacity_for(usage.used_bytes, usage.chunks)
    assert capacity_bytes < usage.used_bytes * 1.2 + 20 * MIB
    with offline.OfflineStore.open(tmp_path / "store") as store:
        planned = copying.plan(store, capacity_bytes)
        assert planned.kept.total.chunks == chunks
        with copying.StoreCopy.make(tmp_path / "copy", capacity_bytes, UUID, binding()) as copy:
            copying.copy_chunks(store, planned, copy, lambda record: None)
            copy.finish()
    copied = LmdbDisk.open(tmp_path / "copy", capacity_bytes)
    assert copied.usage().chunks == chunks
    assert copied.evict() == []
    copied.close()
