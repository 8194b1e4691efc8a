"""A chunk in the pool, a reservation of room for one, and what of one is ready for the disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lmcache_persist.store.allocator import slot_bytes
from lmcache_persist.store.base import ChunkKey, Place


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
