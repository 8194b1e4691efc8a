"""The smallest correct disk tier: keeps everything in a dict. Oracle and test double."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from lmcache_persist import failpoints
from lmcache_persist.binding import Binding
from lmcache_persist.errors import ObjectCorrupt
from lmcache_persist.hashing import EXTENT_BYTES, extent_digest
from lmcache_persist.store import capacity
from lmcache_persist.store.base import (
    BAD_RECORD,
    READERS_GONE_S,
    ChunkKey,
    ChunkRecord,
    ChunkWrite,
    DiskTier,
    Dropped,
    DropReason,
    FingerprintUsage,
    Page,
    Place,
    StoredObject,
    StoredObjects,
    Usage,
    WriteReport,
    check_replaced,
    check_stamp,
    fingerprint_of,
)
from lmcache_persist.store.findings import CheckPart, Mended, Violation
from lmcache_persist.store.format import FORMAT_VERSION, decode_order_key, order_key
from lmcache_persist.store.selection import Chooser, Picked, Selection, bytes_in_scope

SWEEP_CHUNKS = 64
"""Stale chunks that one call removes at most, as a real tier's transaction would."""


def digests_of(content: bytes | memoryview) -> tuple[bytes, ...]:
    """The digest of each extent of an object."""
    view = memoryview(content).cast("B")
    return tuple(
        extent_digest(view[at : at + EXTENT_BYTES]) for at in range(0, len(view), EXTENT_BYTES)
    )


class MemoryDisk(DiskTier):
    """A disk tier without a disk: durable as long as the object lives.

    Args:
        capacity_bytes: counted as :mod:`lmcache_persist.store.capacity` does.
        uuid: 32 hex digits, or None for new ones.
    """

    backend = "memory"

    def __init__(self, capacity_bytes: int = 1 << 30, *, uuid: str | None = None) -> None:
        self.uuid = uuid or secrets.token_hex(16)
        self.format_version = FORMAT_VERSION
        self.capacity_bytes = capacity_bytes
        self._corrupt_found = 0
        self._budget = capacity.PageBudget.of(capacity_bytes)
        self._lock = threading.RLock()
        self._stamp: Binding | None = None
        self._records: dict[ChunkKey, ChunkRecord] = {}  # least recently used first
        self._contents: dict[tuple[int, Place], bytes] = {}
        self._pending: list[tuple[ChunkKey, ...]] = []
        self._bad: dict[ChunkKey, int | None] = {}
        self._next = 1

    @property
    def corrupt_found(self) -> int:
        """See :class:`DiskTier`."""
        return self._corrupt_found

    def stamp(self) -> Binding | None:
        """See :meth:`DiskTier.stamp`."""
        return self._stamp

    def write_stamp(self, binding: Binding) -> None:
        """See :meth:`DiskTier.write_stamp`."""
        check_stamp(self._stamp, binding)
        self._stamp = binding
        failpoints.hit("bind.after_stamp")

    def restamp(self, binding: Binding, *, replaces: str) -> None:
        """See :meth:`DiskTier.restamp`."""
        check_replaced(self._stamp, replaces)
        self._stamp = binding

    def write(self, batch: Sequence[ChunkWrite]) -> WriteReport:
        """See :meth:`DiskTier.write`."""
        report = WriteReport()
        failpoints.hit("commit.before_write")
        with self._lock:
            self.apply_touches()
            accepted = []
            for write in batch:
                reason = self._refusal(write)
                if reason:
                    report.dropped.append(Dropped(write.key, reason, DropReason.TOO_LARGE))
                else:
                    accepted.append(write)
            for write in accepted:
                self._put(write, report)
            # Tail first: the head of the batch ends up as the most recently used.
            for write in reversed(accepted):
                if write.key in self._records:
                    self._move_to_front(write.key, hits=0)
            report.written = [write.key for write in accepted if write.key in self._records]
            gone = set(report.evicted) & {write.key for write in accepted}
            report.evicted = [key for key in report.evicted if key not in gone]
            report.dropped += [Dropped(key, "no room beside its own batch") for key in gone]
        failpoints.hit("commit.after_sync")
        return report

    def _refusal(self, write: ChunkWrite) -> str | None:
        held = self._records.get(write.key)
        sizes = {place: memoryview(data).nbytes for place, data in write.objects.items()}
        if held is not None and self._is_current(held):
            sizes |= {place: held.objects.nbytes(place) for place in held.objects}
        return capacity.refusal(sizes, self._budget)

    def _put(self, write: ChunkWrite, report: WriteReport) -> None:
        held = self._records.get(write.key)
        if held is not None and not self._is_current(held):
            self._remove(write.key)
            held = None
        objects = dict(held.objects) if held else {}
        self._next += 1
        serial = held.serial if held else self._next
        for place, data in write.objects.items():
            if place not in objects:
                content = bytes(data)
                objects[place] = StoredObject(len(content), digests_of(content))
                self._contents[serial, place] = content
        self._records[write.key] = ChunkRecord(
            key=write.key,
            binding_id=self._stamp.binding_id if self._stamp else "",
            objects=StoredObjects.of(objects),
            serial=serial,
            order=self._next,
            hits=held.hits if held else 0,
            stored_at=held.stored_at if held else int(time.time()),
        )
        self._make_room(write.key, report)

    def _make_room(self, keep: ChunkKey, report: WriteReport) -> None:
        if self._used_pages() <= self._budget.limit:
            return
        while self._used_pages() > self._budget.low:
            oldest = next((key for key in self._records if key != keep), None)
            if oldest is None:
                return
            self._remove(oldest)
            report.evicted.append(oldest)

    def _used_pages(self) -> int:
        return sum(
            capacity.chunk_pages(self._sizes(record), self._budget.page_bytes)
            for record in self._records.values()
        )

    @staticmethod
    def _sizes(record: ChunkRecord) -> dict[Place, int]:
        return {place: record.objects.nbytes(place) for place in record.objects}

    def _is_current(self, record: ChunkRecord) -> bool:
        return record.binding_id == (self._stamp.binding_id if self._stamp else "")

    def _move_to_front(self, key: ChunkKey, hits: int) -> None:
        held = self._records.pop(key)
        self._next += 1
        self._records[key] = ChunkRecord(
            key,
            held.binding_id,
            held.objects,
            held.serial,
            self._next,
            held.hits + hits,
            held.stored_at,
        )

    def _remove(self, key: ChunkKey) -> None:
        record = self._records.pop(key)
        for place in record.objects:
            self._contents.pop((record.serial, place), None)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`DiskTier.touch`."""
        with self._lock:
            self._pending.append(tuple(keys))

    def apply_touches(self) -> None:
        """See :meth:`DiskTier.apply_touches`."""
        with self._lock:
            pending, self._pending = self._pending, []
            for keys in pending:
                for key in reversed(keys):
                    if key in self._records:
                        self._move_to_front(key, hits=1)
            bad, self._bad = self._bad, {}
            self.drop(bad)

    def drop(self, copies: Mapping[ChunkKey, int | None]) -> list[ChunkKey]:
        """See :meth:`DiskTier.drop`."""
        with self._lock:
            meant = [key for key, serial in copies.items() if self._is_copy(key, serial)]
            for key in meant:
                self._remove(key)
            return meant

    def _is_copy(self, key: ChunkKey, serial: int | None) -> bool:
        record = self._records.get(key)
        return record is not None and (serial in (None, record.serial) or record.key != key)

    def evict(self) -> list[ChunkKey]:
        """See :meth:`DiskTier.evict`."""
        with self._lock:
            evicted: list[ChunkKey] = []
            if self._used_pages() <= self._budget.high:
                return evicted
            for key in list(self._records):
                if self._used_pages() <= self._budget.low:
                    break
                self._remove(key)
                evicted.append(key)
            failpoints.hit("evict.after_sync")
            return evicted

    def sweep_stale(self) -> int:
        """See :meth:`DiskTier.sweep_stale`."""
        with self._lock:
            stale = [one for one in self._records.values() if not self._is_current(one)]
            for record in stale[:SWEEP_CHUNKS]:
                self._remove(record.key)
            return sum(len(record.objects) for record in stale[:SWEEP_CHUNKS])

    def prune(self, selection: Selection, cursor: bytes) -> Picked:
        """See :meth:`DiskTier.prune`."""
        with self._lock:
            self.apply_touches()
            picked = self._pick(selection, cursor, 0)
            for key in picked.keys:
                self._remove(key)
            return picked

    def preview(self, selection: Selection, cursor: bytes, counted_bytes: int) -> Picked:
        """See :meth:`DiskTier.preview`."""
        with self._lock:
            return self._pick(selection, cursor, counted_bytes)

    def _pick(self, selection: Selection, cursor: bytes, counted_bytes: int) -> Picked:
        held = [
            (one.binding_id, fingerprint_of(one.key), one.objects.table.nbytes)
            for one in self._records.values()
        ]
        binding_id = self._stamp.binding_id if self._stamp else ""
        held_bytes = bytes_in_scope(selection, held, binding_id) - counted_bytes
        chooser = Chooser(selection, binding_id, held_bytes=held_bytes, now=time.time())
        first = decode_order_key(cursor) if cursor else 0
        for record in self._records.values():
            if chooser.done:
                break
            if len(chooser.picked.keys) == SWEEP_CHUNKS:
                chooser.picked.cursor = order_key(record.order)
                break
            if record.order >= first:
                chooser.judge(record)
        return chooser.picked

    def scan(
        self, after: bytes, limit: int, bad: list[ChunkKey] | None = None
    ) -> list[ChunkRecord]:
        """See :meth:`DiskTier.scan`."""
        with self._lock:
            keys = sorted(key for key in self._records if key > after)
        return [record for record in self.find(keys) if record is not None][:limit]

    def page(self, after: bytes, limit: int, fingerprint: bytes = b"") -> Page:
        """See :meth:`DiskTier.page`."""
        with self._lock:
            keys = sorted(
                key for key in self._records if key > after and key.startswith(fingerprint)
            )
            records = [record for key in keys[:limit] if (record := self._records[key]).key == key]
        return Page(records, keys[limit - 1] if len(keys) > limit else None)

    def check_part(self, cursor: bytes, budget_s: float, *, note: bool = False) -> CheckPart:
        """See :meth:`DiskTier.check_part`; all of it is one part."""
        violations: list[Violation] = []
        bad: dict[ChunkKey, int] = {}
        nbytes = 0
        records = self.scan(b"", len(self._records))
        for record in records:
            for place, stored in record.objects.items():
                nbytes += stored.nbytes
                try:
                    self.read_into(record, place, memoryview(bytearray(stored.nbytes)))
                except ObjectCorrupt as error:
                    violations.append(Violation(f"chunk {record.key.hex()}", str(error)))
                    bad[record.key] = record.serial
                    break
        if not note:
            self._corrupt_found -= len(bad)
        objects = sum(len(record.objects) for record in records)
        return CheckPart(violations, bad, objects, nbytes, None)

    def repair(self) -> list[Mended]:
        """See :meth:`DiskTier.repair`; sums are not kept here, so none is ever wrong."""
        self.apply_touches()
        return []

    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkRecord | None]:
        """See :meth:`DiskTier.find`."""
        with self._lock:
            found: list[ChunkRecord | None] = []
            for key in keys:
                record = self._records.get(key)
                if record is not None and record.key != key:
                    self._corrupt_found += 1
                    self._bad[key] = BAD_RECORD
                    record = None
                found.append(record if record and self._is_current(record) else None)
            return found

    def read_into(self, record: ChunkRecord, place: Place, buffer: memoryview) -> bool:
        """See :meth:`DiskTier.read_into`."""
        stored = record.objects[place]
        if buffer.nbytes != stored.nbytes or buffer.readonly:
            raise ValueError(f"buffer has {buffer.nbytes} bytes, expected {stored.nbytes}")
        content = self._contents.get((record.serial, place))
        if content is None:
            return False
        if len(content) != stored.nbytes or digests_of(content) != stored.digests:
            self._corrupt_found += 1
            raise ObjectCorrupt(f"object {place} of chunk {record.key.hex()} has other bytes")
        buffer.cast("B")[:] = content
        return True

    def read_part(self, record: ChunkRecord, place: Place, index: int, buffer: memoryview) -> bool:
        """See :meth:`DiskTier.read_part`."""
        whole = memoryview(bytearray(record.objects.nbytes(place)))
        if not self.read_into(record, place, whole):
            return False
        buffer[:] = whole[index * EXTENT_BYTES : (index + 1) * EXTENT_BYTES]
        return True

    def last_serial(self) -> int:
        """See :meth:`DiskTier.last_serial`."""
        return self._next

    def usage(self) -> Usage:
        """See :meth:`DiskTier.usage`."""
        with self._lock:
            current = [one for one in self._records.values() if self._is_current(one)]
            stale = [one for one in self._records.values() if not self._is_current(one)]
            by_fingerprint: dict[str, FingerprintUsage] = {}
            for record in current:
                name = fingerprint_of(record.key)
                before = by_fingerprint.get(name, FingerprintUsage(0, 0, 0))
                by_fingerprint[name] = FingerprintUsage(
                    before.chunks + 1,
                    before.objects + len(record.objects),
                    before.bytes + record.objects.table.nbytes,
                )
            return Usage(
                chunks=len(current),
                objects=sum(len(one.objects) for one in current),
                bytes=sum(one.objects.table.nbytes for one in current),
                capacity_bytes=self.capacity_bytes,
                used_bytes=self._used_pages() * self._budget.page_bytes,
                stale_objects=sum(len(one.objects) for one in stale),
                stale_bytes=sum(one.objects.table.nbytes for one in stale),
                by_fingerprint=by_fingerprint,
            )

    def allocate(self, capacity_bytes: int, on_piece: Callable[[int], None]) -> None:
        """See :meth:`DiskTier.allocate`: memory is taken when it is used."""

    def give_back(self) -> None:
        """See :meth:`DiskTier.give_back`."""

    def grow(self, capacity_bytes: int, *, over_bytes: int = 0) -> None:
        """See :meth:`DiskTier.grow`."""
        with self._lock:
            self._budget = capacity.grown(self._budget, capacity_bytes)
            self.capacity_bytes = capacity_bytes

    def reads_end(self, timeout_s: float) -> bool:
        """See :meth:`DiskTier.reads_end`: none takes long."""
        return True

    def close(self, timeout_s: float = READERS_GONE_S) -> None:
        """See :meth:`DiskTier.close`."""
        self._pending.clear()
