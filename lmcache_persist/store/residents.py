"""The chunks that are in the pool's slots: who holds them, and which go when room is wanted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence

from lmcache_persist.identity import Fingerprint
from lmcache_persist.store.allocator import SlotAllocator
from lmcache_persist.store.base import ChunkKey, Place, fingerprint_of
from lmcache_persist.store.sequence import CommitSequence
from lmcache_persist.store.slots import Entry, Slot


class Residents:
    """Chunks in slots: leased, pinned, or evictable, the least recently used first.

    Attributes:
        evictions: chunks evicted from the pool.
        dropped: chunks that were committed and did not become durable.
        incomplete: those of ``dropped`` whose other ranks' part never came.

    Threads: one (the server's loop).
    """

    def __init__(self, allocator: SlotAllocator, sequence: CommitSequence) -> None:
        self.allocator = allocator
        self.sequence = sequence
        self.evictions = 0
        self.dropped = 0
        self.incomplete = 0
        self._entries: dict[ChunkKey, Entry] = {}
        self._evictable: OrderedDict[ChunkKey, Entry] = OrderedDict()

    # -- looking -----------------------------------------------------------------------

    def get(self, key: ChunkKey) -> Entry | None:
        """The chunk's entry, visible or not."""
        return self._entries.get(key)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def evictable_bytes(self) -> int:
        """Bytes of entries that nobody holds."""
        return sum(entry.nbytes for entry in self._evictable.values())

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
