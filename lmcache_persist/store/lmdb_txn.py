"""One writing transaction on the store: the only code that changes records.

Whatever it changes, ``chunks``, ``extents``, ``order`` and ``totals`` agree when it ends. Only a
record that proves bad takes with it what it alone knew: what that leaves behind is noted in
``meta``, in the same transaction, and removed by :meth:`.repair.Repair.settle`.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Collection
from typing import Any

from lmcache_persist import failpoints
from lmcache_persist.errors import StoreDamaged
from lmcache_persist.hashing import EXTENT_BYTES, extent_digest
from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import ChunkKey, ChunkRecord, ChunkWrite
from lmcache_persist.store.lmdb_open import Databases, live_pages, read_counters
from lmcache_persist.store.lmdb_select import chooser_of, walk
from lmcache_persist.store.objects import (
    ObjectTable,
    Place,
    StoredObject,
    StoredObjects,
    num_extents,
)
from lmcache_persist.store.selection import Picked, Selection

_LOOKS_PER_SWEPT_CHUNK = 16
"""Chunks that a sweep looks at, per chunk that it may remove."""


class StoreTxn:
    """Changes to the store within one LMDB transaction.

    Args:
        txn: LMDB's transaction, for writing.
        dbs: the handles.
        binding_id: what new records are written under.

    Attributes:
        lost: whether a record proved bad.

    Threads: the one that began ``txn``.
    """

    def __init__(self, txn: Any, dbs: Databases, binding_id: str) -> None:
        self._txn = txn
        self._dbs = dbs
        self._binding_id = binding_id
        self._totals: dict[bytes, fmt.Totals] = {}
        self.lost = False
        self.counters = read_counters(txn, dbs)

    def live_pages(self) -> int:
        """Pages in use as of now, this transaction's changes included."""
        return live_pages(self._txn, self._dbs)

    def record(self, key: ChunkKey) -> ChunkRecord | None:
        """The record of a chunk; one that is proven bad is removed on the way."""
        value = self._txn.get(key, db=self._dbs.chunks)
        if value is None:
            return None
        record = _decode(value, key)
        if record is None:
            self._txn.delete(key, db=self._dbs.chunks)
            self.counters.dropped += 1
            self.lost = True
        return record

    def put(self, write: ChunkWrite, order: int, *, like: ChunkRecord | None = None) -> None:
        """Write a chunk, or add to it what it lacks, and give it its place in the order.

        Args:
            write: the chunk.
            order: its place.
            like: of another store, whose hits and age a new chunk gets.
        """
        held = self.record(write.key)
        if held is not None and held.binding_id != self._binding_id:
            self._remove(write.key, held)
            held = None
        objects = {place: held.objects[place] for place in held.objects} if held else {}
        if held:
            serial = held.serial
            self._txn.delete(fmt.order_key(held.order), db=self._dbs.order)
            self._total_of(held).add(held, -1)
        else:
            self.counters.serial += 1
            serial = self.counters.serial
        for place in sorted(write.objects):
            if place not in objects:
                objects[place] = self._put_extents(serial, place, write.objects[place])
        failpoints.hit("commit.after_extents")
        known = held or like
        record = ChunkRecord(
            write.key,
            self._binding_id,
            StoredObjects.of(objects),
            serial,
            order,
            known.hits if known else 0,
            known.stored_at if known else int(time.time()),
        )
        self._put_record(record)
        self._total_of(record).add(record)

    def _put_extents(self, serial: int, place: Place, data: bytes | memoryview) -> StoredObject:
        view = memoryview(data).cast("B")
        digests = []
        for index in range(num_extents(len(view))):
            extent = view[index * EXTENT_BYTES : (index + 1) * EXTENT_BYTES]
            digests.append(extent_digest(extent))
            key = fmt.extent_key(serial, place, index)
            if not self._txn.put(key, extent, db=self._dbs.extents, overwrite=False):
                raise StoreDamaged(f"extent {index} of {place} with serial {serial} exists")
        return StoredObject(len(view), tuple(digests))

    def _put_record(self, record: ChunkRecord) -> None:
        self._txn.put(record.key, fmt.encode_record(record), db=self._dbs.chunks)
        self._txn.put(fmt.order_key(record.order), record.key, db=self._dbs.order)

    def use(self, key: ChunkKey, hits: int) -> None:
        """Make a chunk the most recently used; absent ones are passed over."""
        held = self.record(key)
        if held is None:
            return
        self._txn.delete(fmt.order_key(held.order), db=self._dbs.order)
        self.counters.order += 1
        self._put_record(
            ChunkRecord(
                key,
                held.binding_id,
                held.objects,
                held.serial,
                self.counters.order,
                held.hits + hits,
                held.stored_at,
            )
        )

    def drop(self, key: ChunkKey, serial: int | None = None) -> bool:
        """Remove a chunk, if it has this serial; whether it was there.

        A record that is bad by itself counts as there.
        """
        if self._txn.get(key, db=self._dbs.chunks) is None:
            return False
        held = self.record(key)
        if held is None:
            return True
        if serial is not None and held.serial != serial:
            return False
        self._remove(key, held)
        self.counters.dropped += 1
        return True

    def _remove(self, key: ChunkKey, record: ChunkRecord) -> None:
        """Remove what lies under ``key``, with all that belongs to the record it holds."""
        self._txn.delete(key, db=self._dbs.chunks)
        order = fmt.order_key(record.order)
        if self._txn.get(order, db=self._dbs.order) in (key, record.key):
            self._txn.delete(order, db=self._dbs.order)
        table: ObjectTable = record.objects.table
        for place, entry in table.entries.items():
            for index in range(entry.num_digests):
                self._txn.delete(fmt.extent_key(record.serial, place, index), db=self._dbs.extents)
        self._total_of(record).add(record, -1)

    def evict(
        self, target_pages: int, max_chunks: int, spare: Collection[ChunkKey]
    ) -> list[ChunkKey]:
        """Remove the least recently used chunks until ``target_pages`` are in use.

        Args:
            target_pages: where to stop.
            max_chunks: where to stop, too.
            spare: chunks that are passed over.
        """
        evicted: list[ChunkKey] = []
        cursor = self._txn.cursor(db=self._dbs.order)
        found = cursor.first()
        while found and len(evicted) < max_chunks and self.live_pages() > target_pages:
            order, key = cursor.item()
            if key in spare:
                found = cursor.next()
                continue
            record = self.record(ChunkKey(key))
            if record is None or fmt.order_key(record.order) != order:
                # Leftover of a record that was bad.
                self._txn.delete(order, db=self._dbs.order)
            else:
                self._remove(record.key, record)
                self.counters.evicted += 1
                evicted.append(record.key)
            found = cursor.set_range(order)
        return evicted

    def sweep_stale(self, start: bytes, max_chunks: int) -> tuple[int, bytes | None]:
        """Remove chunks of other bindings, the least recently used first.

        Args:
            start: key of ``order`` to begin at, empty for the first.
            max_chunks: where to stop; a bounded number of others is passed over, too.

        Returns:
            Objects removed, and the key to go on at; None after the last.
        """
        objects = chunks = 0
        cursor = self._txn.cursor(db=self._dbs.order)
        found = cursor.set_range(start) if start else cursor.first()
        for _ in range(max_chunks * _LOOKS_PER_SWEPT_CHUNK):
            if not found:
                return objects, None
            order, key = cursor.item()
            if chunks == max_chunks:
                return objects, order
            record = self.record(ChunkKey(key))
            if record is None or record.binding_id == self._binding_id:
                found = cursor.set_range(order) and cursor.next()
                continue
            self._remove(ChunkKey(key), record)
            self.counters.dropped += 1
            chunks, objects = chunks + 1, objects + len(record.objects)
            found = cursor.set_range(order)
        return objects, cursor.key() if found else None

    def prune(self, selection: Selection, start: bytes, max_chunks: int) -> Picked:
        """Remove chunks that are meant, the least recently used first.

        Args:
            selection: which.
            start: key of ``order`` to begin at, empty for the first.
            max_chunks: where to stop; a bounded number of others is passed over, too.
        """
        chooser = chooser_of(self._txn, self._dbs, selection, self._binding_id)
        looks = max_chunks * _LOOKS_PER_SWEPT_CHUNK
        for record in walk(
            self._txn, self._dbs, chooser, start, max_looks=looks, max_chunks=max_chunks
        ):
            self._remove(record.key, record)
            self.counters.pruned += 1
        return chooser.picked

    def _total_of(self, record: ChunkRecord) -> fmt.Totals:
        key = fmt.totals_key(record.binding_id, record.key)
        totals = self._totals.get(key)
        if totals is None:
            value = self._txn.get(key, db=self._dbs.totals)
            try:
                totals = fmt.Totals.decode(value) if value is not None else fmt.Totals()
            except fmt.FormatError as error:
                raise StoreDamaged(f"totals are damaged: {error}") from error
            self._totals[key] = totals
        return totals

    def note_grown(self, over_bytes: int) -> None:
        """Note the setting that a growth overtakes; 0: there is none, or it is noted already."""
        if over_bytes:
            value = fmt.encode_meta({"over_bytes": over_bytes})
            self._txn.put(fmt.META_GROWN, value, db=self._dbs.meta)

    def finish(self) -> None:
        """Write totals and counters; to be called last."""
        for key, totals in self._totals.items():
            if totals.chunks == 0:
                self._txn.delete(key, db=self._dbs.totals)
                continue
            try:
                self._txn.put(key, totals.encode(), db=self._dbs.totals)
            except struct.error as error:
                raise StoreDamaged(f"totals would become {totals}") from error
        self._txn.put(fmt.META_COUNTERS, self.counters.encode(), db=self._dbs.meta)
        if self.lost:
            self._txn.put(fmt.META_UNSETTLED, fmt.encode_meta({}), db=self._dbs.meta)


def _decode(value: bytes, key: bytes) -> ChunkRecord | None:
    """The record in ``value``, or None if it is bad or another chunk's."""
    try:
        record = fmt.decode_record(value)
    except fmt.FormatError:
        return None
    return record if record.key == key else None
