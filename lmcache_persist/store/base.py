"""The disk tier's interface and the words it speaks in.

A *chunk* is written, found and evicted as a whole; it has one object per :class:`Place`
(rank and group). One server process owns a disk tier. In it exactly one thread, the
writer, changes the tier; any thread reads.

What a tier promises:

* what :meth:`DiskTier.write` reports as written is durable and reads back byte for byte
  until it is reported as evicted or dropped;
* what it does not report was not written;
* a read never yields bytes other than those written: altered ones are noticed;
* order of use, hits and totals survive a restart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, NamedTuple, NewType

from lmcache_persist.binding import Binding
from lmcache_persist.errors import StoreMismatch
from lmcache_persist.hashing import CHUNK_HASH_BYTES, ChunkHash
from lmcache_persist.identity import Fingerprint
from lmcache_persist.store.objects import Place, StoredObject, StoredObjects

if TYPE_CHECKING:
    from lmcache_persist.store.findings import CheckPart, Mended
    from lmcache_persist.store.selection import Picked, Selection

__all__ = [
    "ChunkKey",
    "ChunkRecord",
    "ChunkWrite",
    "DiskTier",
    "DropReason",
    "Dropped",
    "FingerprintUsage",
    "Page",
    "Place",
    "StoredObject",
    "StoredObjects",
    "Usage",
    "WriteReport",
    "check_replaced",
    "check_stamp",
    "chunk_hash_of",
    "chunk_key",
    "fingerprint_of",
]

ChunkKey = NewType("ChunkKey", bytes)
"""64 bytes: a model's fingerprint digest (32, raw), then the chunk hash (32)."""

MAX_PENDING_TOUCHES = 1 << 16
"""Chunks. Older pending touches are forgotten; they only order the eviction."""

READERS_GONE_S = 10.0
"""Seconds that closing waits for reads in progress, if not told otherwise."""

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
        evicted_chunks, dropped_chunks: since the tier was made; dropped are bad, stale or
            unwanted ones.
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


@dataclass(frozen=True, slots=True)
class Page:
    """Records in the order of keys, stale ones too.

    Attributes:
        records: all good.
        next: key to go on after; None at the end. A page may be short, or empty, before.
    """

    records: list[ChunkRecord]
    next: ChunkKey | None


_FOREIGN = "put back the store that belongs to the manifest"


def check_stamp(found: Binding | None, wanted: Binding) -> None:
    """Refuse to stamp over another binding.

    Raises:
        StoreMismatch: the store has a stamp, and it is not ``wanted``.
    """
    if found is not None and found != wanted:
        raise StoreMismatch(
            f"the store is stamped with binding {found.binding_id[:12]} (chunk size"
            f" {found.chunk_size}), expected {wanted.binding_id[:12]} (chunk size"
            f" {wanted.chunk_size})",
            hint=_FOREIGN,
            found=found.binding_id,
            expected=wanted.binding_id,
        )


def check_replaced(found: Binding | None, replaces: str) -> None:
    """Refuse to stamp over a binding that the caller does not speak of.

    Raises:
        StoreMismatch: the store has a stamp, and it is not of ``replaces``.
    """
    if found is not None and found.binding_id != replaces:
        raise StoreMismatch(
            f"the store is stamped with binding {found.binding_id[:12]}, expected"
            f" {replaces[:12]}, which is to be replaced",
            hint=_FOREIGN,
            found=found.binding_id,
            expected=replaces,
        )


class DiskTier(ABC):
    """A disk tier. See the module's text for its promises.

    Attributes:
        backend: the kind of tier, as the manifest records it.
        uuid: 32 hex digits, given once at creation.
        format_version: of what is on disk.
        capacity_bytes: size of the tier.
    """

    backend: ClassVar[str]
    uuid: str
    format_version: int
    capacity_bytes: int

    @property
    @abstractmethod
    def corrupt_found(self) -> int:
        """Records and objects that were proven bad so far. Threads: any."""

    @abstractmethod
    def stamp(self) -> Binding | None:
        """The binding that the store is stamped with. Threads: any."""

    @abstractmethod
    def write_stamp(self, binding: Binding) -> None:
        """Stamp the store; the same stamp again changes nothing.

        Durable: the stamp, on return. Threads: writer only.

        Raises:
            StoreMismatch: there is another stamp.
            StoreIOError: the disk failed; the stamp is not written.
        """

    @abstractmethod
    def restamp(self, binding: Binding, *, replaces: str) -> None:
        """Stamp another binding over the present one: every stored chunk is stale at once.

        Args:
            binding: the new one.
            replaces: id of the binding that the manifest still has. It is noted in the
                store, so that a crash before the manifest has followed is understood.

        Durable: stamp and note together, on return. Threads: writer only.

        Raises:
            StoreMismatch: the stamp is of yet another binding.
            StoreIOError: the disk failed; the stamp is as it was.
        """

    @abstractmethod
    def write(self, batch: Sequence[ChunkWrite]) -> WriteReport:
        """Write chunks, given in prompt order: of one batch the tail is evicted first.

        Makes room by eviction. A chunk that can never fit is dropped and evicts nothing.
        Pending touches ride along.

        Durable: everything reported as written, on return. Threads: writer only.

        Raises:
            StoreIOError: the disk failed; nothing of the transaction in progress was
                written.
            StoreDamaged: the store's own structure is broken.
        """

    @abstractmethod
    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Note a use of a prompt's chunks, given head to tail.

        They become the most recently used, the head most of all, so that tails go first.
        Applied by the next write or :meth:`apply_touches`; a crash forgets what is pending.

        Threads: any.
        """

    @abstractmethod
    def apply_touches(self) -> None:
        """Apply pending touches, and drop the records that reads found bad.

        Durable: the order, on return. Threads: writer only.

        Raises:
            StoreIOError: the disk failed; the touches are forgotten.
        """

    @abstractmethod
    def drop(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Remove chunks that are proven bad or unwanted; absent ones are passed over.

        Returns:
            The keys that were there.

        Durable: the removal, on return. Threads: writer only.

        Raises:
            StoreIOError: the disk failed.
        """

    @abstractmethod
    def evict(self) -> list[ChunkKey]:
        """Background eviction: above the high watermark, go towards the low one.

        One bounded transaction; call again until it returns nothing.

        Durable: the eviction, on return. Threads: writer only.

        Raises:
            StoreIOError: the disk failed; nothing was evicted.
        """

    @abstractmethod
    def sweep_stale(self) -> int:
        """Remove chunks of other bindings, in one bounded transaction.

        Eviction takes them first anyway: they were all used before the present binding
        came about. This takes them before there is need for room.

        Returns:
            Objects removed; 0 if none was met this time.

        Durable: the removal, on return. Threads: writer only.

        Raises:
            StoreIOError: the disk failed; nothing was removed.
        """

    @abstractmethod
    def prune(self, selection: Selection, cursor: bytes) -> Picked:
        """Remove chunks that are meant, from ``cursor`` on, in one bounded transaction.

        Args:
            selection: which.
            cursor: empty for the first, then what the call before this one returned.

        Returns:
            What was removed, and where to go on.

        Durable: the removal, on return. Threads: writer only.

        Raises:
            StoreFull: a slow read keeps freed pages; nothing was removed. Try again.
            StoreIOError: the disk failed; nothing was removed.
        """

    @abstractmethod
    def preview(self, selection: Selection, cursor: bytes, counted_bytes: int) -> Picked:
        """What :meth:`prune` would remove from ``cursor`` on; reads a bounded while.

        Args:
            selection: which.
            cursor: empty for the first, then what the call before this one returned.
            counted_bytes: of what the calls before this one returned.

        Threads: any.

        Raises:
            StoreIOError: the disk failed.
        """

    @abstractmethod
    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkRecord | None]:
        """The records of chunks of the current binding; None for absent, stale or bad ones.

        A bad one is counted, and dropped by the writer later. Threads: any.

        Raises:
            StoreIOError: the disk failed.
        """

    @abstractmethod
    def scan(self, after: bytes, limit: int) -> list[ChunkRecord]:
        """Good records of the current binding in the order of keys, from behind ``after``.

        Args:
            after: a chunk key, or empty for the first.
            limit: at most so many; fewer mean that the end was reached.

        Threads: any.

        Raises:
            StoreIOError: the disk failed.
        """

    @abstractmethod
    def page(self, after: bytes, limit: int, fingerprint: bytes = b"") -> Page:
        """Good records, stale ones too, in the order of keys; for those who look.

        Args:
            after: a chunk key, or where one would be; empty for the first.
            limit: at most so many.
            fingerprint: of this model only (raw, 32 bytes), empty for all.

        Threads: any.

        Raises:
            StoreIOError: the disk failed.
        """

    @abstractmethod
    def check_part(self, cursor: bytes, budget_s: float) -> CheckPart:
        """Check a part of the tier, every digest of it; changes nothing by itself.

        Args:
            cursor: of the part before, empty for the first.
            budget_s: seconds, roughly.

        Threads: any.

        Raises:
            MalformedMessage: ``cursor`` is none.
            StoreIOError: the disk failed.
        """

    @abstractmethod
    def repair(self) -> list[Mended]:
        """Mend all but bad digests, which :meth:`check_part` finds; takes a while.

        Durable: what is returned as done. Threads: writer only.

        Raises:
            StoreIOError: the disk failed; what was done before is done.
        """

    @abstractmethod
    def read_into(self, record: ChunkRecord, place: Place, buffer: memoryview) -> bool:
        """Read one object and verify all of its digests.

        Args:
            record: from :meth:`find`.
            place: one of ``record.objects``.
            buffer: writable, contiguous, exactly the object's length. Its contents are
                undefined unless True is returned.

        Returns:
            False if the chunk was evicted since it was found.

        Threads: any.

        Raises:
            KeyError: the record has no such place.
            ValueError: the buffer has another length or cannot be written.
            ObjectCorrupt: the object is proven bad.
            StoreIOError: the disk failed, which says nothing about the object.
        """

    @abstractmethod
    def read_part(self, record: ChunkRecord, place: Place, index: int, buffer: memoryview) -> bool:
        """As :meth:`read_into`, for one extent of an object; ``buffer`` has its length."""

    @abstractmethod
    def last_serial(self) -> int:
        """The last serial given: chunks that are stored from now on have larger ones.

        Threads: any.
        """

    @abstractmethod
    def usage(self) -> Usage:
        """What is in the tier, in time independent of the number of chunks. Threads: any."""

    @abstractmethod
    def close(self, timeout_s: float = READERS_GONE_S) -> None:
        """Mark the shutdown as clean and close; again is allowed. Threads: writer only.

        Args:
            timeout_s: seconds to wait for reads in progress.
        """
