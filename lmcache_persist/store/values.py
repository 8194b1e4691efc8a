"""What a disk tier is asked and answers with: keys, records, outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, NewType

from lmcache_persist.hashing import CHUNK_HASH_BYTES, ChunkHash
from lmcache_persist.identity import Fingerprint
from lmcache_persist.store.objects import Place, StoredObjects

ChunkKey = NewType("ChunkKey", bytes)
"""64 bytes: a model's fingerprint digest (32, raw), then the chunk hash (32)."""

BAD_RECORD = 0
"""In place of a serial, which is never 0: the copy whose record is proven bad by itself."""

FINGERPRINT_BYTES = 32
CHUNK_KEY_BYTES = FINGERPRINT_BYTES + CHUNK_HASH_BYTES


def chunk_key(fingerprint: Fingerprint, chunk_hash: ChunkHash) -> ChunkKey:
    """The key of a chunk of a model.

    Raises:
        ValueError: a part has not the right length.
    """
    key = bytes.fromhex(fingerprint) + chunk_hash
    if len(key) != CHUNK_KEY_BYTES or len(chunk_hash) != CHUNK_HASH_BYTES:
        raise ValueError(f"chunk key has {len(key)} bytes, expected {CHUNK_KEY_BYTES}")
    return ChunkKey(key)


def fingerprint_of(key: ChunkKey) -> Fingerprint:
    """The fingerprint in a chunk's key."""
    return Fingerprint(key[:FINGERPRINT_BYTES].hex())


def chunk_hash_of(key: ChunkKey) -> ChunkHash:
    """The chunk hash in a chunk's key."""
    return ChunkHash(key[FINGERPRINT_BYTES:])


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """What is known of a stored chunk.

    Attributes:
        key: its key.
        binding_id: the binding it was written under.
        objects: sizes and digests by place.
        serial: part of its extents' keys; a chunk written again gets another one.
        order: larger means more recently used.
        hits: how often it was touched.
        stored_at: seconds since 1970, of its first write.
    """

    key: ChunkKey
    binding_id: str
    objects: StoredObjects
    serial: int
    order: int
    hits: int
    stored_at: int


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """Objects of one chunk to be written.

    Places that the stored chunk has already are left as they are, absent ones are added;
    a stored chunk of another binding is replaced.

    Attributes:
        key: the chunk's key.
        objects: contents by place, contiguous and not empty. They must not change until
            the write returns.
    """

    key: ChunkKey
    objects: Mapping[Place, memoryview | bytes]


class DropReason(StrEnum):
    """Why a store did not become durable: the words of the metrics."""

    NO_SLOT = "no_slot"
    """No room in the pool, or the client's share of it is used up."""
    NOT_WRITTEN = "not_written"
    """Committed, but an extent of its slot was never written."""
    INCOMPLETE = "incomplete"
    """Another rank's part never came."""
    TOO_LARGE = "too_large"
    """The chunk can never fit the disk tier."""
    NO_ROOM = "no_room"
    """The disk tier had no room, even after eviction."""
    DISK_ERROR = "disk_error"
    """The disk failed."""
    STORE_GONE = "store_gone"
    """The store's file, or the manifest's, is not in its place any more."""


class Dropped(NamedTuple):
    """A chunk that was not written, and why (the text for a log line)."""

    key: ChunkKey
    reason: str
    kind: DropReason = DropReason.NO_ROOM


@dataclass(slots=True)
class WriteReport:
    """What a write did.

    Attributes:
        written: durable now, in the batch's order.
        dropped: not written.
        evicted: gone, to make room; may name a chunk of ``written`` of the same call
            never, of an earlier one always.
    """

    written: list[ChunkKey] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    evicted: list[ChunkKey] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FingerprintUsage:
    """What one model has in the tier."""

    chunks: int
    objects: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What is in the tier.

    Attributes:
        chunks, objects, bytes: of the current binding; of all while there is none.
        capacity_bytes: size of the tier.
        used_bytes: taken of it, with everything that storing costs; never above it.
        stale_objects, stale_bytes: of other bindings.
        by_fingerprint: of the current binding, by model.
        evicted_chunks, dropped_chunks, pruned_chunks: since the tier was made; dropped are
            bad, stale or unwanted ones, pruned those that operators had removed.
    """

    chunks: int
    objects: int
    bytes: int
    capacity_bytes: int
    used_bytes: int
    stale_objects: int
    stale_bytes: int
    by_fingerprint: dict[str, FingerprintUsage]
    evicted_chunks: int = 0
    dropped_chunks: int = 0
    pruned_chunks: int = 0


@dataclass(frozen=True, slots=True)
class Page:
    """Records in the order of keys, stale ones too.

    Attributes:
        records: all good.
        next: key to go on after; None at the end. A page may be short, or empty, before.
    """

    records: list[ChunkRecord]
    next: ChunkKey | None
