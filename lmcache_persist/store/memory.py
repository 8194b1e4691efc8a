"""The memory tier: which chunks are in the pool's slots, and who holds them there.

An object's life here: *reserved* (a client writes into its slot) -> *committed* (the client
said so, every extent's stamp is gone) -> handed to the writer once every rank committed
the same group -> clean, evictable when nobody leases it. Objects read from disk enter as
*loading*. The groups of a chunk may come one after the other, a recurrent state in a later
step than the rest: each is written when it is complete, and the disk tier merges them.

A reserved slot goes to nobody else until it is given back or its client is dead, and then
rests a second: a dying process may still have a copy in flight.
"""

from __future__ import annotations

import itertools
import secrets
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lmcache_persist.errors import LeaseError, SlotNotWritten
from lmcache_persist.identity import Fingerprint
from lmcache_persist.store.allocator import SlotAllocator, slot_bytes
from lmcache_persist.store.base import ChunkKey, Place, fingerprint_of
from lmcache_persist.store.pool import Pool
from lmcache_persist.store.sequence import CommitSequence

REST_S = 1.0
"""Seconds that a dead client's reserved slot rests before it is handed out again."""

STORE_SHARE = 0.75
"""Of the pool, what reserved and not yet written chunks may take: loads find room beside them."""

MAX_DOOMED = 65536
"""Chunks remembered because a rank got no room; of more, the parts wait their time in vain."""
PARTIAL_S = 10.0
"""Seconds that a chunk waits for the commits of its other ranks before it is dropped."""


@dataclass(slots=True)
class Slot:
    """Room for one object in the pool, and whether its bytes are there."""

    offset: int
    nbytes: int
    ready: bool = False


@dataclass(slots=True)
class Entry:
    """One chunk in the pool.

    Attributes:
        key: the chunk.
        world_size: ranks that a group needs to be complete.
        since_s: monotonic time of the commit that left a group incomplete.
        slots: by place.
        queued: groups that the disk has, or that the writer was given.
        leases: lookups that hold it.
        pins: writes and loads that use its slots.
        seqs: commits that wait for other ranks.
        unwanted: to be dropped as soon as nobody holds it.
    """

    key: ChunkKey
    world_size: int
    since_s: float
    slots: dict[Place, Slot] = field(default_factory=dict)
    queued: int = 0
    leases: int = 0
    pins: int = 0
    seqs: list[int] = field(default_factory=list)
    unwanted: bool = False

    def mask(self) -> int:
        """Bit mask of the groups whose object is here for every rank: what lookups may use."""
        return sum(1 << group for group, count in self._ready().items() if count == self.world_size)

    @property
    def incomplete(self) -> bool:
        """Whether a group waits for the objects of other ranks."""
        return any(count < self.world_size for count in self._ready().values())

    def _ready(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for place, slot in self.slots.items():
            if slot.ready:
                counts[place.group] = counts.get(place.group, 0) + 1
        return counts

    @property
    def nbytes(self) -> int:
        """Bytes of the pool that it takes."""
        return sum(slot_bytes(slot.nbytes) for slot in self.slots.values())


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots that a client may write: one chunk's groups of one rank."""

    number: int
    owner: str
    key: ChunkKey
    rank: int
    world_size: int
    slots: Mapping[int, Slot]
    stamps: Mapping[int, bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of the pool that it takes."""
        return sum(slot_bytes(slot.nbytes) for slot in self.slots.values())


@dataclass(frozen=True, slots=True)
class Writeable:
    """What of a chunk is ready for the disk: all ranks of the groups in ``mask``.

    Attributes:
        entry: the chunk, pinned until :meth:`MemoryTier.written`.
        mask: bit i set: group i.
        seqs: commits that are settled by this write, and by no earlier one.
        nbytes: of the pool that its slots take.
    """

    entry: Entry
    mask: int
    seqs: tuple[int, ...]
    nbytes: int


class MemoryTier:
    """Chunks in the pool.

    Attributes:
        evictions: chunks evicted from the pool.
        dropped: chunks that were committed and did not become durable.
        incomplete: those of ``dropped`` whose other ranks' part never came.
        committed_bytes: bytes of objects that commits brought.

    Threads: one (the server's loop). Other threads only use the views handed to them,
    whose entries are pinned meanwhile.

    Attributes:
        unwritten_bytes: of the pool that committed chunks take until the disk has them.
    """

    def __init__(self, pool: Pool, sequence: CommitSequence) -> None:
        self.pool = pool
        self.allocator = SlotAllocator(pool.size_bytes)
        self.sequence = sequence
        self.share_bytes = self.allocator.size_bytes // 2
        self.evictions = 0
        self.dropped = 0
        self.incomplete = 0
        self.committed_bytes = 0
        self._entries: dict[ChunkKey, Entry] = {}
        self._evictable: OrderedDict[ChunkKey, Entry] = OrderedDict()
        self._reservations: dict[int, Reservation] = {}
        # From a start that no other boot has: a number of an earlier one must name nothing here.
        self._numbers = itertools.count(1 + secrets.randbits(48))
        self._reserved_bytes: dict[str, int] = {}
        self._reserved_in_all = 0
        self.unwritten_bytes = 0
        self._resting: deque[tuple[float, int]] = deque()
        self._doomed: dict[ChunkKey, float] = {}

    # -- looking -----------------------------------------------------------------------

    def get(self, key: ChunkKey) -> Entry | None:
        """The chunk's entry, visible or not."""
        return self._entries.get(key)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def reservations(self) -> int:
        """Reservations that are open."""
        return len(self._reservations)

    @property
    def evictable_bytes(self) -> int:
        """Bytes of entries that nobody holds."""
        return sum(entry.nbytes for entry in self._evictable.values())

    @property
    def all_reserved_bytes(self) -> int:
        """Bytes that all sessions have reserved. Threads: any."""
        return self._reserved_in_all

    def reserved_bytes(self, owner: str) -> int:
        """Bytes that a session has reserved."""
        return self._reserved_bytes.get(owner, 0)

    def in_use(self) -> bool:
        """Whether anything holds room that may come back by itself."""
        return bool(
            self._reservations or self._resting or len(self._entries) > len(self._evictable)
        )

    # -- storing -----------------------------------------------------------------------

    def reserve(
        self,
        owner: str,
        key: ChunkKey,
        rank: int,
        sizes: Mapping[int, int],
        world_size: int,
        now_s: float,
    ) -> Reservation | None:
        """Slots for the groups in ``sizes`` (group -> bytes); None if there is no room.

        Nor is there if the disk is behind: what waits for it leaves loads a part of the pool.
        """
        wanted = sum(map(slot_bytes, sizes.values()))
        waiting = self._reserved_in_all + self.unwritten_bytes
        fits = waiting + wanted <= STORE_SHARE * self.allocator.size_bytes
        offsets = self.allocate(list(sizes.values())) if fits else None
        if offsets is None:
            if world_size > 1 and len(self._doomed) < MAX_DOOMED:
                # The other ranks' part would wait for this one in vain.
                self._doomed[key] = now_s + PARTIAL_S
            return None
        slots = {
            group: Slot(offset, nbytes)
            for (group, nbytes), offset in zip(sizes.items(), offsets, strict=True)
        }
        stamps = {group: self.pool.stamp(slot.offset, slot.nbytes) for group, slot in slots.items()}
        reservation = Reservation(next(self._numbers), owner, key, rank, world_size, slots, stamps)
        self._reservations[reservation.number] = reservation
        self._reserved_bytes[owner] = self.reserved_bytes(owner) + reservation.nbytes
        self._reserved_in_all += reservation.nbytes
        return reservation

    def commit(self, owner: str, number: int, seq: int, now_s: float) -> Writeable | None:
        """Take over a written reservation as part of commit ``seq``.

        Returns:
            What is to be written to disk now, if this completed a group.

        Raises:
            LeaseError: not this owner's reservation.
            SlotNotWritten: an extent still holds its stamp; the reservation is given back.
        """
        reservation = self._take(owner, number)
        for group, slot in reservation.slots.items():
            if self.pool.still_stamped(slot.offset, slot.nbytes, reservation.stamps[group]):
                self._free(reservation.slots.values())
                raise SlotNotWritten(f"slot of reservation {number}, group {group}: not written")
        key = reservation.key
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(key, reservation.world_size, now_s)
        elif not entry.incomplete:
            entry.since_s = now_s
        for group, slot in reservation.slots.items():
            place = Place(reservation.rank, group)
            if place in entry.slots:
                # Somebody else's commit of the same object came first; both are equal.
                self.allocator.free(slot.offset)
                continue
            slot.ready = True
            entry.slots[place] = slot
            self.committed_bytes += slot.nbytes
        if key in self._doomed and entry.incomplete and not (entry.pins or entry.leases):
            self._drop_incomplete(entry)
            self.sequence.add(seq)
            self.sequence.settle(seq)
            return None
        return self._queue(entry, seq)

    def _queue(self, entry: Entry, seq: int) -> Writeable | None:
        fresh = entry.mask() & ~entry.queued
        if fresh or entry.incomplete:
            entry.seqs.append(seq)
            self.sequence.add(seq)
            self._evictable.pop(entry.key, None)
        if not fresh:
            self._settle(entry)
            return None
        entry.queued |= fresh
        self.pin(entry)
        # They go with this write: an earlier one that is still under way must not settle them.
        seqs, entry.seqs = tuple(entry.seqs), []
        nbytes = sum(
            slot_bytes(slot.nbytes)
            for place, slot in entry.slots.items()
            if fresh >> place.group & 1
        )
        self.unwritten_bytes += nbytes
        return Writeable(entry, fresh, seqs, nbytes)

    def give_back(self, owner: str, number: int) -> None:
        """End a reservation without a commit; an unknown one is fine."""
        if number in self._reservations and self._reservations[number].owner == owner:
            self._free(self._take(owner, number).slots.values())

    def forget_owner(self, owner: str, now_s: float) -> None:
        """A session is over: its reservations rest, then their slots are free."""
        for number in [n for n, r in self._reservations.items() if r.owner == owner]:
            for slot in self._take(owner, number).slots.values():
                self._resting.append((now_s + REST_S, slot.offset))
        self._reserved_bytes.pop(owner, None)

    def tick(self, now_s: float) -> None:
        """Free what has rested; drop chunks whose other ranks never came."""
        while self._resting and self._resting[0][0] <= now_s:
            self.allocator.free(self._resting.popleft()[1])
        for key in [key for key, until in self._doomed.items() if until <= now_s]:
            del self._doomed[key]
        for entry in self._partials():
            if now_s - entry.since_s > PARTIAL_S:
                self._drop_incomplete(entry)

    def _partials(self) -> Iterator[Entry]:
        # Only entries with open commits can be partial, and those are never evictable.
        held = [e for k, e in self._entries.items() if k not in self._evictable]
        return (e for e in held if e.seqs and not e.pins and not e.leases and e.incomplete)

    def _drop_incomplete(self, entry: Entry) -> None:
        """Give up groups whose other ranks do not come; what is complete stays."""
        complete = entry.mask()
        for place in [place for place in entry.slots if not complete >> place.group & 1]:
            self.allocator.free(entry.slots.pop(place).offset)
        self.dropped += 1
        self.incomplete += 1
        self._settle_seqs(entry)
        self._settle(entry)

    def _take(self, owner: str, number: int) -> Reservation:
        reservation = self._reservations.get(number)
        if reservation is None or reservation.owner != owner:
            raise LeaseError(
                f"reservation {number} is not this session's",
                hint="commit each reservation once, from the session that made it",
            )
        del self._reservations[number]
        self._reserved_bytes[owner] = self.reserved_bytes(owner) - reservation.nbytes
        self._reserved_in_all -= reservation.nbytes
        return reservation

    # -- holding -----------------------------------------------------------------------

    def allocate(self, sizes: Sequence[int]) -> list[int] | None:
        """Offsets for all of ``sizes`` or for none, evicting what nobody holds."""
        offsets: list[int] = []
        for nbytes in sizes:
            offset = self.allocator.allocate(nbytes)
            while offset is None and self._evict_one():
                offset = self.allocator.allocate(nbytes)
            if offset is None:
                for taken in offsets:
                    self.allocator.free(taken)
                return None
            offsets.append(offset)
        return offsets

    def _evict_one(self) -> bool:
        if not self._evictable:
            return False
        _, entry = self._evictable.popitem(last=False)
        self._remove(entry)
        self.evictions += 1
        return True

    def loading(self, key: ChunkKey, world_size: int, on_disk: int, now_s: float) -> Entry:
        """The entry to load a chunk's objects into, made if there is none; not settled yet."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(key, world_size, now_s)
        entry.queued |= on_disk
        return entry

    def lease(self, entry: Entry) -> None:
        """One more lookup counts on the entry's slots."""
        entry.leases += 1
        self._evictable.pop(entry.key, None)

    def unlease(self, entry: Entry) -> None:
        """The inverse of :meth:`lease`."""
        entry.leases -= 1
        self._settle(entry)

    def pin(self, entry: Entry) -> None:
        """A thread reads or writes the entry's slots."""
        entry.pins += 1
        self._evictable.pop(entry.key, None)

    def unpin(self, entry: Entry) -> None:
        """The inverse of :meth:`pin`."""
        entry.pins -= 1
        self._settle(entry)

    def written(self, ready: Writeable, *, durable: bool) -> None:
        """The writer is done with it; its commits are settled either way."""
        self.unwritten_bytes -= ready.nbytes
        if not durable:
            self.dropped += 1
            ready.entry.queued &= ~ready.mask
        for seq in ready.seqs:
            self.sequence.settle(seq)
        self.unpin(ready.entry)

    def load_failed(self, entry: Entry, places: Iterable[Place]) -> None:
        """Take back slots whose objects could not be read.

        The disk may have lost all of the chunk: the next commit has what is here written anew.
        """
        entry.queued = 0
        for place in places:
            slot = entry.slots.pop(place, None)
            if slot is not None:
                self.allocator.free(slot.offset)

    def evicted(self, keys: Iterable[ChunkKey]) -> None:
        """The disk has these chunks no more: the next commit of a group writes all of them."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry.queued = 0

    def drop(self, entry: Entry) -> None:
        """Forget a chunk that nobody holds, and settle its commits as dropped."""
        if entry.leases or entry.pins:
            raise RuntimeError("a held entry is never dropped")
        if entry.seqs:
            self.dropped += 1
            self.incomplete += 1
        self._evictable.pop(entry.key, None)
        self._remove(entry)

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """Drop these chunks as far as nobody holds them."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and not entry.leases and not entry.pins:
                self.drop(entry)

    def prune(self, keys: Iterable[ChunkKey]) -> None:
        """Drop these chunks, those that somebody holds when he lets go of them.

        What waits for other ranks or for the disk stays: it is newer than what was pruned.
        """
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and not entry.seqs:
                entry.unwanted = True
                self._settle(entry)

    def keys_of(self, fingerprints: Container[Fingerprint]) -> list[ChunkKey]:
        """The chunks of these models."""
        return [key for key in self._entries if fingerprint_of(key) in fingerprints]

    def _remove(self, entry: Entry) -> None:
        self._settle_seqs(entry)
        self._free(entry.slots.values())
        del self._entries[entry.key]

    def _settle_seqs(self, entry: Entry) -> None:
        for seq in entry.seqs:
            self.sequence.settle(seq)
        entry.seqs.clear()

    def _settle(self, entry: Entry) -> None:
        """Put an entry where it belongs now that something let go of it."""
        if entry.pins:
            return
        if entry.seqs and not entry.incomplete:
            # Its other ranks' objects came from the disk, which so has all of it.
            self._settle_seqs(entry)
        if entry.leases:
            return
        if not entry.slots:
            self._settle_seqs(entry)
            self._evictable.pop(entry.key, None)
            self._entries.pop(entry.key, None)
        elif entry.unwanted and not entry.seqs:
            self._evictable.pop(entry.key, None)
            self._remove(entry)
        elif not entry.seqs and all(slot.ready for slot in entry.slots.values()):
            self._evictable[entry.key] = entry
            self._evictable.move_to_end(entry.key)

    def _free(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            self.allocator.free(slot.offset)
