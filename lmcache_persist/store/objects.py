"""Which objects a chunk has, and their digests: compact and cheap to look at. Pure.

All chunks of one model have the same places and sizes, so their *table* (places and
sizes, encoded) is the same bytes. Decoded tables are shared; a record costs no more than
slicing its digests, however many ranks and groups it has.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lmcache_persist.hashing import EXTENT_BYTES, EXTENT_DIGEST_BYTES

_ENTRY = struct.Struct("<HHQ")
_CACHED_TABLES = 4096

MAX_PLACES = 0xFFFF
"""Objects of one chunk; ranks and groups are below it, too. Source: u16 on disk."""


class Place(NamedTuple):
    """Where within its chunk an object belongs."""

    rank: int
    group: int


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object: its length in bytes, and the 16-byte digest of each of its extents."""

    nbytes: int
    digests: tuple[bytes, ...]


def num_extents(nbytes: int) -> int:
    """How many extents an object of ``nbytes`` has."""
    return -(-nbytes // EXTENT_BYTES)


class _Entry(NamedTuple):
    nbytes: int
    first_digest: int
    num_digests: int


class ObjectTable:
    """Places and sizes of a chunk's objects; immutable and shared between records.

    Attributes:
        raw: the encoded form, entries sorted by place.
        entries: size and digests of each place.
        num_digests: extents of all objects.
        nbytes: bytes of all objects.
    """

    __slots__ = ("_masks", "_worlds", "entries", "nbytes", "num_digests", "raw")

    def __init__(self, sizes: Mapping[Place, int]) -> None:
        self.entries: dict[Place, _Entry] = {}
        self._masks: dict[int, int] = {}
        self._worlds: dict[int, int] = {}
        first = 0
        raw = []
        for place in sorted(sizes):
            nbytes, count = sizes[place], num_extents(sizes[place])
            self.entries[place] = _Entry(nbytes, first, count)
            self._masks[place.rank] = self._masks.get(place.rank, 0) | 1 << place.group
            raw.append(_ENTRY.pack(place.rank, place.group, nbytes))
            first += count
        self.raw = b"".join(raw)
        self.num_digests = first
        self.nbytes = sum(sizes.values())

    def group_mask(self, world_size: int) -> int:
        """Bit mask of the groups of which every rank below ``world_size`` has an object."""
        mask = self._worlds.get(world_size)
        if mask is None:
            mask = self._masks.get(0, 0)
            for rank in range(1, world_size):
                mask &= self._masks.get(rank, 0)
            self._worlds[world_size] = mask
        return mask


@functools.lru_cache(maxsize=_CACHED_TABLES)
def decode_table(raw: bytes) -> ObjectTable:
    """The table that ``raw`` encodes.

    Raises:
        ValueError: ``raw`` is no whole number of entries, or repeats a place.
    """
    if len(raw) % _ENTRY.size:
        raise ValueError(f"object table has {len(raw)} bytes, expected entries of {_ENTRY.size}")
    entries = list(_ENTRY.iter_unpack(raw))
    table = ObjectTable({Place(rank, group): nbytes for rank, group, nbytes in entries})
    if table.raw != raw:
        raise ValueError("object table repeats a place or is out of order")
    return table


ENTRY_BYTES = _ENTRY.size
"""Bytes of one entry of an encoded table."""


class StoredObjects(Mapping[Place, StoredObject]):
    """A chunk's objects by place.

    Args:
        table: places and sizes.
        digests: all extent digests, one after the other, in the table's order.

    Raises:
        ValueError: the number of digests is not the table's.
    """

    __slots__ = ("digests", "table")

    def __init__(self, table: ObjectTable, digests: bytes) -> None:
        if len(digests) != table.num_digests * EXTENT_DIGEST_BYTES:
            raise ValueError(
                f"found {len(digests)} bytes of digests, expected"
                f" {table.num_digests * EXTENT_DIGEST_BYTES}"
            )
        self.table = table
        self.digests = digests

    @classmethod
    def of(cls, objects: Mapping[Place, StoredObject]) -> StoredObjects:
        """The compact form of any mapping."""
        table = ObjectTable({place: stored.nbytes for place, stored in objects.items()})
        digests = b"".join(b"".join(objects[place].digests) for place in table.entries)
        return cls(decode_table(table.raw), digests)

    def __getitem__(self, place: Place) -> StoredObject:
        entry = self.table.entries[place]
        start = entry.first_digest * EXTENT_DIGEST_BYTES
        end = start + entry.num_digests * EXTENT_DIGEST_BYTES
        return StoredObject(
            entry.nbytes,
            tuple(
                self.digests[at : at + EXTENT_DIGEST_BYTES]
                for at in range(start, end, EXTENT_DIGEST_BYTES)
            ),
        )

    def __iter__(self) -> Iterator[Place]:
        return iter(self.table.entries)

    def __len__(self) -> int:
        return len(self.table.entries)

    def __contains__(self, place: object) -> bool:
        return place in self.table.entries

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StoredObjects):
            return self.table.raw == other.table.raw and self.digests == other.digests
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self.table.raw, self.digests))

    def nbytes(self, place: Place) -> int:
        """Bytes of one object; ``KeyError`` if there is none."""
        return self.table.entries[place].nbytes

    def group_mask(self, world_size: int) -> int:
        """Bit mask of the groups of which every rank below ``world_size`` has an object."""
        return self.table.group_mask(world_size)
