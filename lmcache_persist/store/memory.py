"""The memory tier: how objects come into the pool's slots, and from there to the disk.

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
from collections import deque
from collections.abc import Iterator, Mapping

from lmcache_persist.errors import LeaseError, SlotNotWritten
from lmcache_persist.store.allocator import SlotAllocator, slot_bytes
from lmcache_persist.store.base import ChunkKey, Place
from lmcache_persist.store.pool import Pool
from lmcache_persist.store.residents import Residents
from lmcache_persist.store.sequence import CommitSequence
from lmcache_persist.store.slots import Entry, Reservation, Slot, Writeable

REST_S = 1.0
"""Seconds that a dead client's reserved slot rests before it is handed out again."""

STORE_SHARE = 0.75
"""Of the pool, what reserved and not yet written chunks may take: loads find room beside them."""

MAX_DOOMED = 65536
"""Chunks remembered because a rank got no room; of more, the parts wait their time in vain."""
PARTIAL_S = 10.0
"""Seconds that a chunk waits for the commits of its other ranks before it is dropped."""


class MemoryTier(Residents):
    """Chunks in the pool.

    Attributes:
        committed_bytes: bytes of objects that commits brought.
        unwritten_bytes: of the pool that committed chunks take until the disk has them.

    Threads: one (the server's loop). Other threads only use the views handed to them,
    whose entries are pinned meanwhile.
    """

    def __init__(self, pool: Pool, sequence: CommitSequence) -> None:
        super().__init__(SlotAllocator(pool.size_bytes), sequence)
        self.pool = pool
        self.share_bytes = self.allocator.size_bytes // 2
        self.committed_bytes = 0
        self._reservations: dict[int, Reservation] = {}
        # From a start that no other boot has: a number of an earlier one must name nothing here.
        self._numbers = itertools.count(1 + secrets.randbits(48))
        self._reserved_bytes: dict[str, int] = {}
        self._reserved_in_all = 0
        self.unwritten_bytes = 0
        self._resting: deque[tuple[float, int]] = deque()
        self._doomed: dict[ChunkKey, float] = {}

    # -- looking -----------------------------------------------------------------------

    @property
    def reservations(self) -> int:
        """Reservations that are open."""
        return len(self._reservations)

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

    def written(self, ready: Writeable, *, durable: bool) -> None:
        """The writer is done with it; its commits are settled either way."""
        self.unwritten_bytes -= ready.nbytes
        if not durable:
            self.dropped += 1
            ready.entry.queued &= ~ready.mask
        for seq in ready.seqs:
            self.sequence.settle(seq)
        self.unpin(ready.entry)

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
