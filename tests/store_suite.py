"""What every disk tier must do; subclassed once per backend."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from lmcache_persist import failpoints
from lmcache_persist.errors import ConfigError, ObjectCorrupt, StoreIOError, StoreMismatch
from lmcache_persist.store.base import (
    BAD_RECORD,
    ChunkRecord,
    ChunkWrite,
    DiskTier,
    Place,
    fingerprint_of,
)
from lmcache_persist.store.selection import Picked, Selection
from store_support import (
    FULL_EXTENT,
    MIB,
    assert_reads_back,
    binding,
    chunk,
    content,
    found,
    key,
    read,
)

Opener = Callable[..., DiskTier]


def walk_all(step: Callable[[bytes, int], Picked]) -> Picked:
    """All steps of a prune or a preview: a cursor, what was counted before -> what was picked."""
    total, cursor = Picked(), b""
    while True:
        picked = step(cursor, total.bytes)
        total.add_all(picked)
        if picked.cursor is None:
            return total
        assert picked.cursor > cursor
        cursor = picked.cursor


class StoreSuite:
    """The tests. A subclass gives ``opener`` and ``alter``."""

    @pytest.fixture
    def opener(self) -> Opener:
        raise NotImplementedError

    @pytest.fixture
    def tier(self, opener: Opener) -> DiskTier:
        tier = opener()
        tier.write_stamp(binding())
        return tier

    def alter(self, tier: DiskTier, record: ChunkRecord, place: Place) -> DiskTier:
        """Flip one byte of an object behind the tier's back; the tier to go on with."""
        raise NotImplementedError

    @pytest.mark.parametrize(
        "nbytes",
        [1, 2000, 4096, FULL_EXTENT - 1, FULL_EXTENT, FULL_EXTENT + 1, 3 * MIB, 5 * FULL_EXTENT],
    )
    def test_what_was_written_reads_back(self, tier: DiskTier, nbytes: int) -> None:
        """An object of any length reads back byte for byte."""
        write = chunk(1, nbytes)
        assert tier.write([write]).written == [write.key]
        assert_reads_back(tier, [write])

    def test_many_places(self, tier: DiskTier) -> None:
        """Objects of all ranks and groups of a chunk are told apart."""
        write = chunk(
            1, {Place(rank, group): 5000 + rank for rank in range(8) for group in range(6)}
        )
        tier.write([write])
        assert_reads_back(tier, [write])
        record = tier.find([write.key])[0]
        assert record is not None
        assert record.objects.group_mask(8) == 0b111111
        assert record.objects.group_mask(9) == 0

    def test_absent_chunk_is_none(self, tier: DiskTier) -> None:
        """A chunk that nobody wrote is None, beside one that is there."""
        tier.write([chunk(1)])
        assert found(tier, [key(1), key(2), key(1, model=2)]) == [True, False, False]

    def test_later_ranks_are_added(self, tier: DiskTier) -> None:
        """Absent places are added to a stored chunk, present ones stay as they are."""
        first, second = chunk(1, {Place(0, 0): 9000}), chunk(1, {Place(1, 0): 7000})
        tier.write([first])
        other = ChunkWrite(key(1), {Place(0, 0): b"x" * 9000, **second.objects})
        assert tier.write([other]).written == [key(1)]
        assert_reads_back(tier, [first, second])
        usage = tier.usage()
        assert (usage.chunks, usage.objects, usage.bytes) == (1, 2, 16_000)

    def test_written_again_is_counted_once(self, tier: DiskTier) -> None:
        """Storing a chunk five times takes the room of one; dropping all leaves exactly 0."""
        for _ in range(5):
            tier.write([chunk(1), chunk(2)])
        usage = tier.usage()
        assert (usage.chunks, usage.objects, usage.bytes) == (2, 2, 200_000)
        assert tier.drop(dict.fromkeys([key(1), key(2), key(3)])) == [key(1), key(2)]
        usage = tier.usage()
        assert (usage.chunks, usage.objects, usage.bytes) == (0, 0, 0)
        assert usage.by_fingerprint == {}

    def test_usage_by_model(self, tier: DiskTier) -> None:
        """Each fingerprint has its own totals."""
        tier.write([chunk(1, 1000), chunk(2, 2000), chunk(1, 500, model=2)])
        per_model = tier.usage().by_fingerprint
        assert per_model[key(1)[:32].hex()].bytes == 3000
        assert per_model[key(1, model=2)[:32].hex()].objects == 1

    def test_stamp_is_kept_and_final(self, tier: DiskTier) -> None:
        """The same stamp again is fine, another one is refused and changes nothing."""
        tier.write_stamp(binding())
        with pytest.raises(StoreMismatch):
            tier.write_stamp(binding(1280))
        assert tier.stamp() == binding()

    def test_other_binding_is_stale(self, opener: Opener) -> None:
        """A chunk of another binding is counted and never found; writing replaces it."""
        tier = opener()
        tier.write([chunk(1, 3000), chunk(2, 3000)])
        tier.write_stamp(binding())
        assert found(tier, [key(1)]) == [False]
        usage = tier.usage()
        assert (usage.objects, usage.stale_objects, usage.stale_bytes) == (0, 2, 6000)
        tier.write([chunk(1, 5000)])
        assert_reads_back(tier, [chunk(1, 5000)])
        usage = tier.usage()
        assert (usage.objects, usage.stale_objects, usage.bytes) == (1, 1, 5000)

    def test_a_new_stamp_makes_everything_stale(self, tier: DiskTier) -> None:
        """Stamped anew, a tier finds nothing of before, and keeps it until it is swept."""
        tier.write([chunk(number, {Place(0, 0): 3000, Place(0, 1): 3000}) for number in range(5)])
        tier.restamp(binding(1280), replaces=binding().binding_id)
        assert tier.stamp() == binding(1280)
        assert found(tier, [key(number) for number in range(5)]) == [False] * 5
        assert tier.scan(b"", 10) == []
        usage = tier.usage()
        assert (usage.objects, usage.stale_objects, usage.stale_bytes) == (0, 10, 30_000)
        tier.write([chunk(1, 5000)])
        assert_reads_back(tier, [chunk(1, 5000)])
        assert tier.usage().stale_objects == 8

    def test_a_stamp_of_another_binding_is_not_replaced(self, tier: DiskTier) -> None:
        """Who does not name the binding that is there does not replace it."""
        with pytest.raises(StoreMismatch):
            tier.restamp(binding(1280), replaces=binding(320).binding_id)
        assert tier.stamp() == binding()

    def test_pruning_takes_what_is_meant_and_nothing_else(self, tier: DiskTier) -> None:
        """A preview says what a prune then removes; usage and the rest are exact afterwards."""
        tier.write([chunk(number, 3000) for number in range(200)])
        tier.write([chunk(number, 500, model=2) for number in range(70)])
        selection = Selection(frozenset({fingerprint_of(key(0, model=2))}))
        seen = walk_all(lambda cursor, counted: tier.preview(selection, cursor, counted))
        assert tier.usage().chunks == 270
        gone = walk_all(lambda cursor, counted: tier.prune(selection, cursor))
        assert seen.amounts == gone.amounts
        assert (gone.bytes, list(gone.amounts)) == (35_000, [(*selection.fingerprints, False)])
        usage = tier.usage()
        assert (usage.chunks, usage.bytes, len(usage.by_fingerprint)) == (200, 600_000, 1)
        assert all(found(tier, [key(number) for number in range(200)]))
        assert not any(found(tier, [key(number, model=2) for number in range(70)]))
        assert walk_all(lambda cursor, counted: tier.prune(selection, cursor)).amounts == {}

    def test_pruning_down_to_a_size_takes_the_least_recently_used(self, tier: DiskTier) -> None:
        """Down to a size, over several steps, those in use stay."""
        tier.write([chunk(number, 3000) for number in range(199, -1, -1)])
        tier.touch([key(150)])
        selection = Selection(down_to_bytes=20 * 3000 + 2999)
        seen = walk_all(lambda cursor, counted: tier.preview(selection, cursor, counted))
        gone = walk_all(lambda cursor, counted: tier.prune(selection, cursor))
        assert seen.amounts == gone.amounts
        assert tier.usage().bytes == 20 * 3000
        assert found(tier, [key(150), key(199), key(181)]) == [True, True, True]
        assert found(tier, [key(0), key(180), key(149)]) == [False, False, False]

    def test_pruning_what_is_stale(self, tier: DiskTier) -> None:
        """Stale chunks go by themselves, or with the rest of their model."""
        tier.write([chunk(number, 3000) for number in range(10)])
        tier.restamp(binding(1280), replaces=binding().binding_id)
        tier.write([chunk(number, 3000) for number in range(5)])
        gone = walk_all(lambda cursor, counted: tier.prune(Selection(stale=True), cursor))
        assert [(stale, amount.chunks) for (_, stale), amount in gone.amounts.items()] == [
            (True, 5)
        ]
        usage = tier.usage()
        assert (usage.chunks, usage.stale_objects) == (5, 0)

    def test_sweeping_takes_the_stale_ones_only(self, tier: DiskTier) -> None:
        """Swept bit by bit, nothing stale stays, and nothing else goes."""
        old = [chunk(number, 3000) for number in range(300)]
        tier.write(old)
        tier.restamp(binding(1280), replaces=binding().binding_id)
        new = [chunk(number, 2000) for number in range(280, 320)]
        tier.write(new[:20])
        left = tier.usage().stale_objects
        assert left == 280
        swept = tier.sweep_stale()
        assert 0 < swept < left
        assert tier.usage().stale_objects == left - swept
        tier.write(new[20:])
        while swept:
            swept = tier.sweep_stale()
        assert (tier.usage().stale_objects, tier.usage().objects) == (0, 40)
        assert_reads_back(tier, new)
        assert tier.sweep_stale() == 0

    def test_without_stale_ones_there_is_nothing_to_sweep(self, tier: DiskTier) -> None:
        """A sweep of good chunks removes none."""
        tier.write([chunk(1), chunk(2)])
        assert tier.sweep_stale() == 0
        assert_reads_back(tier, [chunk(1), chunk(2)])

    def test_stale_ones_are_evicted_first(self, tier: DiskTier) -> None:
        """When room is needed, all that is stale goes before anything that is not."""
        for start in range(0, 60, 10):
            tier.write([chunk(number, MIB) for number in range(start, start + 10)])
        tier.restamp(binding(1280), replaces=binding().binding_id)
        for written in range(1, 100):
            assert tier.write([chunk(100 + written, MIB)]).written == [key(100 + written)]
            if not tier.usage().stale_objects:
                break
            assert all(found(tier, [key(100 + number) for number in range(1, written + 1)]))
        else:
            pytest.fail("the stale ones are never evicted")
        assert written > 10

    def test_tail_of_a_batch_goes_first(self, tier: DiskTier) -> None:
        """What is evicted of one prompt are its last chunks."""
        prompt = [chunk(number, MIB) for number in range(40)]
        for start in range(0, 40, 10):
            tier.write(prompt[start : start + 10])
        orders = [record.order for record in tier.find([one.key for one in prompt[:10]]) if record]
        assert orders == sorted(orders, reverse=True)
        assert len(set(orders)) == 10

    def test_least_recently_used_goes_first(self, tier: DiskTier) -> None:
        """Touched chunks outlive untouched ones, the head of a prompt its tail."""
        for number in range(40):
            tier.write([chunk(number, MIB)])
        tier.touch([key(number) for number in range(10)])
        tier.apply_touches()
        evicted = []
        number = 100
        while len(evicted) < 38:
            report = tier.write([chunk(number, MIB)])
            evicted += report.evicted
            number += 1
        assert evicted[:30] == [key(number) for number in range(10, 40)]
        assert evicted[30:38] == [key(number) for number in range(9, 1, -1)]

    def test_hits_are_counted(self, tier: DiskTier) -> None:
        """Every touch is a hit; touching what is not there is none."""
        tier.write([chunk(1), chunk(2)])
        tier.touch([key(1), key(3)])
        tier.touch([key(1)])
        tier.apply_touches()
        one, two = tier.find([key(1), key(2)])
        assert one is not None
        assert two is not None
        assert (one.hits, two.hits) == (2, 0)
        assert one.order > two.order

    def test_full_tier_goes_on(self, tier: DiskTier, seed: int) -> None:
        """Case D1: 200 x 1 MiB, then mixed sizes, into 64 MiB; reads work throughout."""
        rng = random.Random(seed)
        sizes = [MIB] * 200 + [
            rng.choice([8, 20, 64, 300, 1024, 2500, 4096]) * 1024 for _ in range(150)
        ]
        present: dict[int, int] = {}
        evicted_in_all = 0
        numbers = {key(number): number for number in range(len(sizes))}
        for number, nbytes in enumerate(sizes):
            report = tier.write([chunk(number, nbytes)])
            assert report.written == [key(number)], report.dropped
            present[number] = nbytes
            for gone in report.evicted + (tier.evict() if number % 3 == 0 else []):
                del present[numbers[gone]]
                evicted_in_all += 1
            assert tier.usage().used_bytes <= tier.capacity_bytes
            sample = rng.choice(list(present))
            assert_reads_back(tier, [chunk(sample, present[sample])])
        usage = tier.usage()
        assert evicted_in_all > 150
        assert (usage.chunks, usage.bytes) == (len(present), sum(present.values()))
        assert usage.bytes > tier.capacity_bytes * 0.6

    def test_background_eviction_stops_at_the_low_mark(self, tier: DiskTier) -> None:
        """Eviction makes room for many writes at once, never one for one, and then rests."""
        assert tier.evict() == []
        number, evicted = 0, []
        while not evicted:
            report = tier.write([chunk(number, MIB)])
            number += 1
            evicted = report.evicted or tier.evict()
        assert len(evicted) >= 4
        while tier.evict():
            pass
        assert tier.evict() == []

    @pytest.mark.parametrize("nbytes", [80 * MIB, 63 * MIB])
    def test_too_large_evicts_nothing(self, tier: DiskTier, nbytes: int) -> None:
        """A chunk above the capacity is dropped with a reason; everything else stays."""
        kept = [chunk(number, MIB) for number in range(20)]
        tier.write(kept)
        report = tier.write([ChunkWrite(key(99), {Place(0, 0): bytes(nbytes)}), chunk(98)])
        assert [one.key for one in report.dropped] == [key(99)]
        assert (report.written, report.evicted) == ([key(98)], [])
        assert "capacity" in report.dropped[0].reason
        assert_reads_back(tier, kept)

    def test_large_chunk_takes_the_place_of_all(self, tier: DiskTier) -> None:
        """A chunk of over half of the capacity is stored, whatever has to go for it."""
        for number in range(60):
            tier.write([chunk(number, 700_000)])
        large = chunk(99, 38 * MIB)
        assert tier.write([large]).written == [key(99)]
        assert_reads_back(tier, [large])

    def test_batch_larger_than_the_capacity(self, tier: DiskTier) -> None:
        """What is reported as written is there, what is not is not."""
        batch = [chunk(number, MIB) for number in range(100)]
        report = tier.write(batch)
        assert set(report.written) | {one.key for one in report.dropped} == {
            write.key for write in batch
        }
        assert len(report.written) > 30
        assert not set(report.written) & set(report.evicted)
        there = dict(
            zip([one.key for one in batch], found(tier, [one.key for one in batch]), strict=True)
        )
        assert {name for name, is_there in there.items() if is_there} == set(report.written)

    def test_empty_object_is_dropped(self, tier: DiskTier) -> None:
        """An object without bytes, or a chunk without objects, is not stored."""
        report = tier.write(
            [ChunkWrite(key(1), {Place(0, 0): b""}), ChunkWrite(key(2), {}), chunk(3)]
        )
        assert [one.key for one in report.dropped] == [key(1), key(2)]
        assert report.written == [key(3)]

    def test_read_of_what_was_dropped(self, tier: DiskTier) -> None:
        """A record found before its chunk went reads as gone, also if written again."""
        tier.write([chunk(1)])
        record = tier.find([key(1)])[0]
        assert record is not None
        tier.drop({key(1): None})
        assert read(tier, record, Place(0, 0)) is None
        tier.write([chunk(1, 50_000)])
        assert read(tier, record, Place(0, 0)) is None
        assert tier.corrupt_found == 0

    def test_a_drop_takes_the_copy_that_is_meant(self, tier: DiskTier) -> None:
        """A chunk that was stored again since it was read is another copy, and stays."""
        tier.write([chunk(1), chunk(2)])
        old = tier.find([key(1)])[0]
        assert old is not None
        assert tier.drop({key(1): old.serial}) == [key(1)]
        tier.write([chunk(1)])
        # Of two reads that found the old copy bad, the second one comes late.
        assert tier.drop({key(1): old.serial, key(2): BAD_RECORD}) == []
        assert_reads_back(tier, [chunk(1), chunk(2)])

    def test_buffer_must_fit(self, tier: DiskTier) -> None:
        """A buffer of another length, a read-only one and another place are refused."""
        tier.write([chunk(1, 1000)])
        record = tier.find([key(1)])[0]
        assert record is not None
        for buffer in (bytearray(999), bytearray(1001), bytes(1000)):
            with pytest.raises(ValueError, match="expected"):
                tier.read_into(record, Place(0, 0), memoryview(buffer))
        with pytest.raises(KeyError):
            tier.read_into(record, Place(1, 0), memoryview(bytearray(1000)))

    @pytest.mark.parametrize("nbytes", [100, 3 * MIB])
    def test_altered_bytes_are_noticed(self, tier: DiskTier, nbytes: int) -> None:
        """A flipped byte raises, is counted, and the chunk goes with the next write."""
        tier.write([chunk(1, nbytes), chunk(2)])
        record = tier.find([key(1)])[0]
        assert record is not None
        tier = self.alter(tier, record, Place(0, 0))
        record = tier.find([key(1)])[0]
        assert record is not None
        with pytest.raises(ObjectCorrupt):
            read(tier, record, Place(0, 0))
        assert tier.corrupt_found == 1
        assert tier.drop({key(1): record.serial}) == [key(1)]
        assert found(tier, [key(1), key(2)]) == [False, True]
        assert tier.usage().chunks == 1

    @pytest.mark.parametrize("point", ["commit.before_write"])
    def test_failed_write_leaves_the_state_before(self, tier: DiskTier, point: str) -> None:
        """An error before the commit writes nothing; the same write then succeeds."""
        tier.write([chunk(1)])
        failpoints.configure(f"{point}=error@1")
        try:
            with pytest.raises((StoreIOError, OSError)):
                tier.write([chunk(2), chunk(3)])
        finally:
            failpoints.configure("")
        assert found(tier, [key(1), key(2), key(3)]) == [True, False, False]
        assert tier.write([chunk(2), chunk(3)]).written == [key(2), key(3)]
        assert_reads_back(tier, [chunk(1), chunk(2), chunk(3)])

    def test_it_grows_in_use(self, tier: DiskTier) -> None:
        """More room from now on, all that was there still is, and it never becomes less."""
        tier.write([chunk(1), chunk(2, 3 * MIB)])
        more = 2 * tier.capacity_bytes
        assert tier.reads_end(1.0)
        told: list[int] = []
        tier.allocate(more, told.append)
        assert tier.capacity_bytes == more // 2
        tier.grow(more, over_bytes=more // 2)
        tier.give_back()
        assert tier.capacity_bytes == tier.usage().capacity_bytes == more
        assert told == sorted(told)
        assert_reads_back(tier, [chunk(1), chunk(2, 3 * MIB)])
        assert tier.write([chunk(3)]).written == [key(3)]
        with pytest.raises(ConfigError):
            tier.grow(more // 2)

    def test_contents_depend_on_the_place(self) -> None:
        """The contents that these tests write differ by chunk and place."""
        assert len({content(key(n), Place(r, 0), 64) for n in range(2) for r in range(2)}) == 4
