"""The memory tier: reservations, commits, leases, eviction, on a real pool file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_persist.errors import LeaseError, SlotNotWritten
from lmcache_persist.hashing import EXTENT_BYTES
from lmcache_persist.shm import PoolPaths
from lmcache_persist.store.base import ChunkKey, Place
from lmcache_persist.store.memory import PARTIAL_S, REST_S, MemoryTier
from lmcache_persist.store.pool import Pool
from lmcache_persist.store.sequence import CommitSequence
from lmcache_persist.store.slots import Reservation, Slot, Writeable

PAGE = 4096
POOL_BYTES = 64 * PAGE


class Tier:
    """A memory tier with shorthands: ranks write when they commit."""

    def __init__(self, folder: Path, size_bytes: int = POOL_BYTES) -> None:
        self.pool = Pool.create(PoolPaths.of(folder, "0" * 32), size_bytes, wait_s=0)
        self.sequence = CommitSequence()
        self.memory = MemoryTier(self.pool, self.sequence)
        self.now_s = 100.0

    def reserve(
        self,
        key: bytes,
        *,
        rank: int = 0,
        world: int = 1,
        nbytes: int = PAGE,
        owner: str = "a",
        group: int = 0,
    ) -> Reservation | None:
        sizes = {group: nbytes}
        return self.memory.reserve(owner, ChunkKey(key), rank, sizes, world, self.now_s)

    def write(self, reservation: Reservation) -> None:
        for slot in reservation.slots.values():
            self.pool.view(slot.offset, slot.nbytes)[:] = b"w" * slot.nbytes

    def commit(self, reservation: Reservation | None, owner: str = "a") -> Writeable | None:
        assert reservation is not None
        self.write(reservation)
        return self.memory.commit(owner, reservation.number, self.sequence.begin(), self.now_s)

    def store(self, key: bytes) -> None:
        """Reserve, commit, and have it written."""
        ready = self.commit(self.reserve(key))
        assert ready is not None
        self.memory.written(ready, durable=True)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    """An empty memory tier of 64 pages."""
    made = Tier(tmp_path)
    yield made
    made.pool.close(remove=True)


def key(number: int) -> bytes:
    """A chunk key."""
    return number.to_bytes(64, "big")


def test_a_committed_chunk_is_visible_and_pinned_until_written(tier: Tier) -> None:
    """Between commit and write the slots cannot be evicted; durable_seq waits for the write."""
    ready = tier.commit(tier.reserve(key(1)))
    assert ready is not None
    assert ready.entry.mask() == 0b1
    assert tier.sequence.durable_seq == 0
    assert tier.memory.allocate([POOL_BYTES]) is None
    tier.memory.written(ready, durable=True)
    assert tier.sequence.durable_seq == 1
    assert tier.memory.allocate([POOL_BYTES]) == [0]
    assert tier.memory.get(ChunkKey(key(1))) is None


def test_a_leased_chunk_is_not_evicted(tier: Tier) -> None:
    """A lease keeps the slots however long it lasts; its end makes them evictable."""
    tier.store(key(1))
    entry = tier.memory.get(ChunkKey(key(1)))
    assert entry is not None
    tier.memory.lease(entry)
    tier.memory.lease(entry)
    tier.now_s += 1e6
    tier.memory.tick(tier.now_s)
    assert tier.memory.allocate([POOL_BYTES]) is None
    tier.memory.unlease(entry)
    assert tier.memory.allocate([POOL_BYTES]) is None
    tier.memory.unlease(entry)
    assert tier.memory.allocate([POOL_BYTES]) == [0]


def test_the_least_recently_used_goes_first(tier: Tier) -> None:
    """Eviction takes what was let go of longest ago."""
    for number in range(64):
        tier.store(key(number))
    first = tier.memory.get(ChunkKey(key(0)))
    assert first is not None
    tier.memory.lease(first)
    tier.memory.unlease(first)
    assert tier.memory.allocate([PAGE]) is not None
    assert tier.memory.get(ChunkKey(key(0))) is not None
    assert tier.memory.get(ChunkKey(key(1))) is None


def test_an_unwritten_slot_is_refused_at_any_extent(tmp_path: Path) -> None:
    """A commit is refused while one extent of a large object still has its stamp."""
    tier = Tier(tmp_path, 4 << 20)
    nbytes = 2 * EXTENT_BYTES + 100
    for skipped in (0, EXTENT_BYTES, 2 * EXTENT_BYTES):
        reservation = tier.reserve(key(1), nbytes=nbytes)
        assert reservation is not None
        offset = reservation.slots[0].offset
        stamp = bytes(tier.pool.view(offset + skipped, 16))
        tier.write(reservation)
        tier.pool.view(offset + skipped, 16)[:] = stamp
        with pytest.raises(SlotNotWritten):
            tier.memory.commit("a", reservation.number, tier.sequence.begin(), 0.0)
        assert tier.memory.get(ChunkKey(key(1))) is None
    assert tier.memory.allocator.free_bytes == tier.memory.allocator.size_bytes
    tier.pool.close(remove=True)


def test_reservations_are_their_owners_and_used_once(tier: Tier) -> None:
    """Nobody else commits a reservation, and nobody commits one twice."""
    reservation = tier.reserve(key(1))
    assert reservation is not None
    with pytest.raises(LeaseError):
        tier.commit(reservation, owner="b")
    tier.memory.give_back("b", reservation.number)
    assert tier.commit(reservation) is not None
    with pytest.raises(LeaseError):
        tier.commit(reservation)


def test_a_reservation_of_an_earlier_boot_names_nothing(tier: Tier, tmp_path: Path) -> None:
    """A commit that was meant for the server before this one frees or fills nobody's slot."""
    earlier = tier.reserve(key(1))
    assert earlier is not None
    (tmp_path / "next").mkdir()
    restarted = Tier(tmp_path / "next")
    kept = restarted.reserve(key(2))
    assert kept is not None
    with pytest.raises(LeaseError):
        restarted.commit(earlier)
    assert restarted.commit(kept) is not None


def test_a_dead_owners_slots_rest_before_they_are_used_again(tier: Tier) -> None:
    """A dying process may still write: its slots are handed out a second later."""
    assert tier.memory.allocate([POOL_BYTES // 4]) is not None
    assert tier.reserve(key(1), nbytes=POOL_BYTES * 3 // 4) is not None
    tier.memory.forget_owner("a", tier.now_s)
    tier.memory.tick(tier.now_s + 0.9 * REST_S)
    assert tier.reserve(key(2), owner="b") is None
    tier.memory.tick(tier.now_s + 1.1 * REST_S)
    assert tier.reserve(key(2), owner="b") is not None
    assert tier.memory.reserved_bytes("a") == 0


def test_what_waits_for_the_disk_leaves_loads_their_room(tier: Tier) -> None:
    """Reserved and unwritten chunks take three quarters; what is written makes room again."""
    waiting = [tier.commit(tier.reserve(key(number))) for number in range(40)]
    for number in range(40, 48):
        assert tier.reserve(key(number)) is not None
    assert tier.reserve(key(48)) is None
    offsets = tier.memory.allocate([PAGE] * 16)
    assert offsets is not None
    for ready in waiting[:2]:
        assert ready is not None
        tier.memory.written(ready, durable=True)
    # Written chunks are evicted for new ones; those that wait are not.
    assert tier.reserve(key(48)) is not None
    assert tier.reserve(key(49)) is not None
    assert tier.reserve(key(50)) is None
    assert all(tier.memory.get(ChunkKey(key(number))) for number in range(2, 40))


def test_a_chunk_waits_for_all_its_ranks(tier: Tier) -> None:
    """The last rank's commit makes the chunk visible, with one write of all ranks."""
    assert tier.commit(tier.reserve(key(1), rank=0, world=2)) is None
    entry = tier.memory.get(ChunkKey(key(1)))
    assert entry is not None
    assert entry.mask() == 0
    ready = tier.commit(tier.reserve(key(1), rank=1, world=2))
    assert ready is not None
    assert set(ready.entry.slots) == {Place(0, 0), Place(1, 0)}
    assert tier.sequence.durable_seq == 0
    tier.memory.written(ready, durable=True)
    assert tier.sequence.durable_seq == 2


def test_a_part_whose_sisters_never_come_is_dropped(tier: Tier) -> None:
    """A partial chunk is given up after a while, and its commit is settled as dropped."""
    tier.commit(tier.reserve(key(1), rank=0, world=2))
    tier.memory.tick(tier.now_s + 0.9 * PARTIAL_S)
    assert tier.sequence.durable_seq == 0
    tier.memory.tick(tier.now_s + 1.1 * PARTIAL_S)
    assert tier.sequence.durable_seq == 1
    assert tier.memory.dropped == 1
    assert tier.memory.allocator.free_bytes == POOL_BYTES


def test_a_part_is_dropped_at_once_if_another_rank_got_no_slot(tier: Tier) -> None:
    """When one rank was refused room, the others' parts do not take it for nothing."""
    assert tier.reserve(key(1), rank=1, world=2, nbytes=2 * POOL_BYTES) is None
    assert tier.commit(tier.reserve(key(1), rank=0, world=2)) is None
    assert tier.memory.get(ChunkKey(key(1))) is None
    assert tier.sequence.durable_seq == 1


def test_the_same_object_committed_twice_is_kept_once(tier: Tier) -> None:
    """Two engines that computed the same chunk leave one copy and no leak."""
    first, second = tier.reserve(key(1)), tier.reserve(key(1), owner="b")
    ready = tier.commit(first)
    assert ready is not None
    assert tier.commit(second, owner="b") is None
    tier.memory.written(ready, durable=True)
    assert tier.memory.allocator.free_bytes == POOL_BYTES - PAGE
    assert tier.sequence.durable_seq == 2


def test_a_failed_write_keeps_the_chunk_in_memory_only(tier: Tier) -> None:
    """What the disk refused is counted, still readable, and may be evicted."""
    ready = tier.commit(tier.reserve(key(1)))
    assert ready is not None
    tier.memory.written(ready, durable=False)
    assert tier.memory.dropped == 1
    assert ready.entry.mask() == 0b1
    assert tier.memory.allocate([POOL_BYTES]) == [0]


def test_a_part_completed_from_disk_is_settled(tier: Tier) -> None:
    """When the other ranks' objects come from disk, the waiting commit is not stuck."""
    tier.commit(tier.reserve(key(1), rank=0, world=2))
    entry = tier.memory.loading(ChunkKey(key(1)), 2, 0b1, tier.now_s)
    tier.memory.pin(entry)
    offsets = tier.memory.allocate([PAGE])
    assert offsets is not None
    entry.slots[Place(1, 0)] = Slot(offsets[0], PAGE, ready=True)
    tier.memory.unpin(entry)
    assert tier.sequence.durable_seq == 1
    assert tier.memory.allocate([POOL_BYTES]) == [0]


def test_a_group_that_comes_later_is_written_alone(tier: Tier) -> None:
    """A state joins its chunk while the rest is being written, and is durable after its own
    write only.
    """
    first = tier.commit(tier.reserve(key(1), group=0))
    late = tier.commit(tier.reserve(key(1), group=1))
    assert first is not None
    assert late is not None
    assert (first.mask, late.mask, late.entry.mask()) == (0b01, 0b10, 0b11)
    tier.memory.written(first, durable=True)
    assert tier.sequence.durable_seq == 1
    assert tier.memory.allocate([POOL_BYTES]) is None
    tier.memory.written(late, durable=True)
    assert tier.sequence.durable_seq == 2
    assert tier.memory.allocate([POOL_BYTES]) == [0]


def test_a_group_whose_chunk_is_on_disk_only_is_written(tier: Tier) -> None:
    """It waits for no other group: the disk tier merges it."""
    late = tier.commit(tier.reserve(key(1), group=1))
    assert late is not None
    assert (late.mask, late.entry.mask()) == (0b10, 0b10)


def test_what_the_disk_lost_is_written_with_the_next_commit(tier: Tier) -> None:
    """An unreadable object takes its chunk from the disk: a commit is durable after a write."""
    entry = tier.memory.loading(ChunkKey(key(1)), 1, 0b11, tier.now_s)
    tier.memory.pin(entry)
    offsets = tier.memory.allocate([PAGE, PAGE])
    assert offsets is not None
    entry.slots[Place(0, 0)] = Slot(offsets[0], PAGE, ready=True)
    entry.slots[Place(0, 1)] = Slot(offsets[1], PAGE)
    tier.memory.load_failed(entry, [Place(0, 1)])
    tier.memory.unpin(entry)
    again = tier.commit(tier.reserve(key(1), group=1))
    assert again is not None
    assert again.mask == 0b11
    assert tier.sequence.durable_seq == 0
    tier.memory.written(again, durable=True)
    assert tier.sequence.durable_seq == 1


@pytest.mark.parametrize("gone", ["evicted", "not written"])
def test_what_is_not_on_disk_goes_there_with_a_later_group(tier: Tier, gone: str) -> None:
    """The disk evicted a chunk, or could not take it: the next group of it brings the rest."""
    first = tier.commit(tier.reserve(key(1), group=0))
    assert first is not None
    tier.memory.written(first, durable=gone == "evicted")
    if gone == "evicted":
        tier.memory.evicted([ChunkKey(key(1)), ChunkKey(key(2))])
    late = tier.commit(tier.reserve(key(1), group=1))
    assert late is not None
    assert late.mask == 0b11


@pytest.mark.parametrize("refused", [True, False])
def test_a_late_part_in_vain_leaves_the_rest(tier: Tier, refused: bool) -> None:
    """Another rank got no room for its state, or never sent it: the chunk itself stays."""
    for rank in (0, 1):
        ready = tier.commit(tier.reserve(key(1), rank=rank, world=2))
    assert ready is not None
    tier.memory.written(ready, durable=True)
    tier.now_s += 10 * PARTIAL_S
    if refused:
        tier.memory.lease(ready.entry)
        too_large = tier.reserve(key(1), rank=1, world=2, group=1, nbytes=2 * POOL_BYTES)
        assert too_large is None
        tier.memory.unlease(ready.entry)
    assert tier.commit(tier.reserve(key(1), world=2, group=1)) is None
    if not refused:
        tier.memory.tick(tier.now_s + 0.9 * PARTIAL_S)
        assert tier.sequence.durable_seq == 2
        tier.memory.tick(tier.now_s + 1.1 * PARTIAL_S)
    assert tier.sequence.durable_seq == 3
    assert ready.entry.mask() == 0b1
    assert tier.memory.get(ready.entry.key) is ready.entry
    assert tier.memory.allocator.free_bytes == POOL_BYTES - 2 * PAGE
    assert tier.memory.allocate([POOL_BYTES]) == [0]


def test_a_pruned_chunk_is_dropped_when_nobody_holds_it(tier: Tier) -> None:
    """Free at once if it is not held, else when the last of leases and writes ends."""
    free = tier.memory.allocator.free_bytes
    tier.store(b"idle")
    tier.store(b"leased")
    entry = tier.memory.get(ChunkKey(b"leased"))
    assert entry is not None
    tier.memory.lease(entry)
    tier.memory.lease(entry)
    ready = tier.commit(tier.reserve(b"written"))
    assert ready is not None
    tier.memory.prune([ChunkKey(key) for key in (b"idle", b"leased", b"written", b"absent")])
    assert tier.memory.get(ChunkKey(b"idle")) is None
    assert tier.memory.get(ChunkKey(b"leased")) is entry
    tier.memory.unlease(entry)
    assert tier.memory.get(ChunkKey(b"leased")) is entry
    tier.memory.unlease(entry)
    assert tier.memory.get(ChunkKey(b"leased")) is None
    tier.memory.written(ready, durable=True)
    assert len(tier.memory) == 0
    assert tier.memory.allocator.free_bytes == free
    assert tier.sequence.durable_seq == tier.sequence.last


def test_a_prune_leaves_what_waits_for_other_ranks(tier: Tier) -> None:
    """A chunk whose commit is open is newer than anything that was pruned."""
    assert tier.commit(tier.reserve(b"half", world=2)) is None
    tier.memory.prune([ChunkKey(b"half")])
    assert tier.memory.get(ChunkKey(b"half")) is not None
    ready = tier.commit(tier.reserve(b"half", rank=1, world=2))
    assert ready is not None
    tier.memory.written(ready, durable=True)
    assert tier.memory.get(ChunkKey(b"half")) is not None
