"""What a lookup needs: the objects of a prefix, where there are any, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping

from lmcache_persist import geometry, protocol
from lmcache_persist.server.lookup import Lookup
from lmcache_persist.server.registration import Engine
from lmcache_persist.store.allocator import slot_bytes
from lmcache_persist.store.base import ChunkKey, Place
from lmcache_persist.store.memory import MemoryTier

MAX_SLOTS_PER_ANSWER = protocol.MAX_MESSAGE_BYTES // 9 - 1024
"""Nine bytes is the most that an offset takes in MessagePack."""
_SLOTS_PER_RUN = 5
"""What a run takes besides its offsets, in offsets."""


def mask_in_pool(memory: MemoryTier, key: ChunkKey) -> int:
    """Bit mask of the groups of a chunk that are in the pool."""
    entry = memory.get(key)
    return entry.mask() if entry is not None else 0


def mask_on_disk(lookup: Lookup, key: ChunkKey) -> int:
    """Bit mask of the groups of a chunk that the record found for it has in full."""
    record = lookup.records.get(key)
    if record is None:
        return 0
    engine, mask = lookup.engine, 0
    for index, group in enumerate(engine.groups):
        # An object of another length than the geometry says is no object.
        if group.cacheable and all(
            (stored := record.objects.get(Place(number, index))) is not None
            and stored.nbytes == rank.object_bytes[index]
            for number, rank in engine.ranks.items()
        ):
            mask |= 1 << index
    return mask


def usable_mask(memory: MemoryTier, lookup: Lookup, key: ChunkKey) -> int:
    """Bit mask of the groups of a chunk that this lookup may count on."""
    if key in lookup.failed:
        return 0
    return mask_in_pool(memory, key) | mask_on_disk(lookup, key)


def of_prefix(lookup: Lookup, prefix: int, size: int) -> dict[ChunkKey, list[Place]]:
    """The objects of a prefix that the engine does not hold yet.

    Args:
        lookup: as said.
        prefix: in tokens.
        size: of a chunk, in tokens.
    """
    needs: dict[ChunkKey, list[Place]] = {}
    for index, group in enumerate(lookup.engine.groups):
        for chunk in geometry.chunks_needed(group, prefix, size):
            if chunk >= lookup.held_chunks:
                places = needs.setdefault(lookup.keys[chunk], [])
                places.extend(Place(rank, index) for rank in range(lookup.engine.world_size))
    return needs


def most_chunks(lookup: Lookup, room_bytes: int, size: int) -> int:
    """The longest prefix, in chunks, whose objects take no more of the pool than that."""
    engine = lookup.engine
    sizes = zip(*(rank.object_bytes for rank in engine.ranks.values()), strict=True)
    costs = [sum(map(slot_bytes, of_a_group)) for of_a_group in sizes]
    return geometry.most_chunks(
        engine.groups,
        size,
        costs,
        room_bytes,
        range(lookup.held_chunks, len(lookup.keys) + 1),
    )


def cost_bytes(lookup: Lookup, needs: Mapping[ChunkKey, list[Place]]) -> int:
    """Bytes of the pool that a lease takes beside those that its session has."""
    ranks, leased = lookup.engine.ranks, lookup.session.leased
    return sum(
        slot_bytes(ranks[place.rank].object_bytes[place.group])
        for key, places in needs.items()
        if key not in leased
        for place in places
    )


def chunks_per_message(engine: Engine) -> int:
    """How many chunks' slots the answer to a lookup can name."""
    runs = max(1, len(engine.ranks) * sum(group.cacheable for group in engine.groups))
    return max(0, (MAX_SLOTS_PER_ANSWER - _SLOTS_PER_RUN * runs) // runs)


def slot_runs(memory: MemoryTier, lookup: Lookup, prefix: int, size: int) -> list[protocol.SlotRun]:
    """Where in the pool the objects of a prefix are, which the lookup has leased."""
    runs = []
    for index, group in enumerate(lookup.engine.groups):
        needed = geometry.chunks_needed(group, prefix, size)
        first = max(needed.first, lookup.held_chunks)
        entries = [memory.get(lookup.keys[chunk]) for chunk in range(first, needed.end)]
        if not entries:
            continue
        for number, rank in sorted(lookup.engine.ranks.items()):
            place = Place(number, index)
            offsets = [entry.slots[place].offset for entry in entries if entry is not None]
            runs.append(protocol.SlotRun(number, index, first, rank.object_bytes[index], offsets))
    return runs
