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
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from lmcache_persist.binding import Binding
from lmcache_persist.errors import StoreMismatch
from lmcache_persist.store.objects import Place, StoredObject, StoredObjects
from lmcache_persist.store.values import (
    BAD_RECORD,
    CHUNK_KEY_BYTES,
    FINGERPRINT_BYTES,
    ChunkKey,
    ChunkRecord,
    ChunkWrite,
    Dropped,
    DropReason,
    FingerprintUsage,
    Page,
    Usage,
    WriteReport,
    chunk_hash_of,
    chunk_key,
    fingerprint_of,
)

if TYPE_CHECKING:
    from lmcache_persist.store.findings import CheckPart, Mended
    from lmcache_persist.store.selection import Picked, Selection

__all__ = [
    "BAD_RECORD",
    "CHUNK_KEY_BYTES",
    "FINGERPRINT_BYTES",
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

MAX_PENDING_TOUCHES = 1 << 16
"""Chunks. Older pending touches are forgotten; they only order the eviction."""

READERS_GONE_S = 10.0
"""Seconds that closing waits for reads in progress, if not told otherwise."""

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
    def drop(self, copies: Mapping[ChunkKey, int | None]) -> list[ChunkKey]:
        """Remove chunks that are proven bad or unwanted; absent ones are passed over.

        Args:
            copies: by key, the serial of the copy that is meant, so that one that was stored
                since then stays; :data:`BAD_RECORD` for one whose record is bad by itself,
                None for whichever is there.

        Returns:
            The keys of what was there and went.

        Durable: the removal, on return. Threads: writer only.

        Raises:
            StoreFull: a slow read keeps freed pages; some may have gone.
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
    def scan(
        self, after: bytes, limit: int, bad: list[ChunkKey] | None = None
    ) -> list[ChunkRecord]:
        """Good records of the current binding in the order of keys, from behind ``after``.

        Args:
            after: a chunk key, or empty for the first.
            limit: at most so many; fewer mean that the end was reached.
            bad: gets the keys of records on the way that are bad, or about to be dropped.

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
    def check_part(self, cursor: bytes, budget_s: float, *, note: bool = False) -> CheckPart:
        """Check a part of the tier, every digest of it; changes nothing by itself.

        Args:
            cursor: of the part before, empty for the first.
            budget_s: seconds, roughly.
            note: take what is proven bad as after a read: counted, found no more, and
                dropped by the writer later.

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
    def allocate(self, capacity_bytes: int, on_piece: Callable[[int], None]) -> None:
        """Take the room that :meth:`grow` needs, while the tier is in use.

        Args:
            capacity_bytes: more than the tier has, a multiple of 4096.
            on_piece: told now and then how many bytes were taken; may raise to end it.

        Durable: the room, on return, but not the capacity. Threads: any, one at a time.

        Raises:
            DiskTooSmall: there is no such room; says both numbers. All is as it was.
            StoreIOError: the disk failed; all is as it was.
        """

    @abstractmethod
    def give_back(self) -> None:
        """Undo :meth:`allocate`; after a growth it has no effect. Threads: any, but no growth."""

    @abstractmethod
    def grow(self, capacity_bytes: int, *, over_bytes: int = 0) -> None:
        """Take the new capacity into use, after :meth:`allocate`; the same again is allowed.

        Args:
            capacity_bytes: as there.
            over_bytes: a setting that this overtakes, noted with it: a start that still has
                it is not refused. 0 for none.

        Durable: the capacity, on return. Threads: writer only; reads wait a bounded while.

        Raises:
            ConfigError: the capacity is less than the tier's, or none.
            StoreBusy: reads or writes in progress take too long; nothing was changed.
            StoreIOError: the disk failed; ``capacity_bytes`` says which capacity is in use.
        """

    @abstractmethod
    def reads_end(self, timeout_s: float) -> bool:
        """Wait until all reads in progress now have ended; False if one does not.

        Threads: any.
        """

    @abstractmethod
    def close(self, timeout_s: float = READERS_GONE_S) -> None:
        """Mark the shutdown as clean and close; again is allowed. Threads: writer only.

        Args:
            timeout_s: seconds to wait for reads in progress.
        """
