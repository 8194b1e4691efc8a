"""Reading a store: a live one beside its writer, or an offline one.

Transactions are short, one lookup or one object each, so that a reader never keeps freed
pages from being reused for long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import lmdb

from lmcache_persist import failpoints
from lmcache_persist.errors import ObjectCorrupt
from lmcache_persist.hashing import EXTENT_BYTES, extent_digest
from lmcache_persist.store import capacity, lmdb_open
from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import (
    BAD_RECORD,
    ChunkKey,
    ChunkRecord,
    Page,
    Place,
    Usage,
)
from lmcache_persist.store.check_part import PartCheck
from lmcache_persist.store.extent_reader import ExtentReader
from lmcache_persist.store.findings import CheckPart
from lmcache_persist.store.lmdb_errors import mapping_errors
from lmcache_persist.store.lmdb_gate import ReadGate
from lmcache_persist.store.lmdb_open import Databases
from lmcache_persist.store.lmdb_select import chooser_of, walk
from lmcache_persist.store.lmdb_usage import usage_of
from lmcache_persist.store.selection import Picked, Selection
from lmcache_persist.store.throttle import Throttle

logger = logging.getLogger(__name__)

PREVIEW_S = 0.1
"""Seconds of one step of a preview."""
LOOKS_PER_READ = 2048
"""Chunks that a preview looks at in one transaction, so that it never keeps pages for long."""
_LOOKS_PER_RECORD = 4
"""Entries that a page looks at, per record that it may hold: bad ones are passed over."""


class StoreReader(ReadGate):
    """The reading half of a disk tier on LMDB.

    Args:
        directory: the store's folder.
        env: its environment, open.
        dbs: its handles.

    Attributes:
        meta: what the store said of itself when it was opened.
        budget: its watermarks.
        binding_id: records of other bindings are stale and not found.
        corrupt_found: records and objects that were proven bad so far.

    Threads: any.

    Raises:
        FormatTooNew, StoreDamaged, StoreIOError: the store cannot be read.
    """

    def __init__(self, directory: Path, env: lmdb.Environment, dbs: Databases) -> None:
        super().__init__(env)
        self.directory = directory
        self.corrupt_found = 0
        self._dbs = dbs
        self._bad_records = Throttle(logger)
        self._taken: dict[ChunkKey, int] = {}
        self._bad: dict[ChunkKey, int] = {}  # the copies that are meant, by their serials
        with mapping_errors("the store cannot be read"), env.begin(buffers=True) as txn:
            self.meta = lmdb_open.read_meta(txn, dbs)
            page_bytes = txn.stat(dbs.main)["psize"]
            self._extents = ExtentReader(directory, txn, dbs.meta)
        self.budget = capacity.PageBudget.of(env.info()["map_size"], page_bytes)
        self.binding_id: str = self.meta.stamp.binding_id if self.meta.stamp else fmt.NO_BINDING

    def fileno(self) -> int:
        """A descriptor of the data file that is mapped, whatever is at its path by now."""
        return self._extents.fileno()

    def moved(self, budget: capacity.PageBudget) -> None:
        """Find one's way in a map that has another place and size; within :meth:`nobody_reading`.

        Raises:
            StoreIOError: the place is unknown; reads go through the map.
        """
        self.budget = budget
        self._extents.lose_place()
        with mapping_errors("the store cannot be read"), self._env.begin(buffers=True) as txn:
            self._extents.locate(txn, self._dbs.meta)

    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkRecord | None]:
        """See :meth:`DiskTier.find`."""
        with self.transaction() as txn:
            chunks, get = self._dbs.chunks, txn.get
            values = [get(key, db=chunks) for key in keys]
            raw = [None if value is None else bytes(value) for value in values]
        return [
            None if value is None else self._checked(key, value)
            for key, value in zip(keys, raw, strict=True)
        ]

    def scan(
        self, after: bytes, limit: int, bad: list[ChunkKey] | None = None
    ) -> list[ChunkRecord]:
        """See :meth:`DiskTier.scan`."""
        found: list[ChunkRecord] = []
        with self.transaction() as txn:
            cursor = txn.cursor(db=self._dbs.chunks)
            more = cursor.set_range(after) if after else cursor.first()
            if more and bytes(cursor.key()) == after:
                more = cursor.next()
            while more and len(found) < limit:
                key = ChunkKey(bytes(cursor.key()))
                record = self._checked(key, bytes(cursor.value()))
                if record is not None:
                    found.append(record)
                elif bad is not None and (key in self._bad or key in self._taken):
                    bad.append(key)
                more = cursor.next()
        return found

    def preview(self, selection: Selection, cursor: bytes, counted_bytes: int) -> Picked:
        """See :meth:`DiskTier.preview`."""
        picked = Picked(cursor=cursor)
        deadline = time.monotonic() + PREVIEW_S
        while picked.cursor is not None and time.monotonic() < deadline:
            with self.transaction() as txn:
                chooser = chooser_of(
                    txn, self._dbs, selection, self.binding_id, counted_bytes + picked.bytes
                )
                walk(
                    txn,
                    self._dbs,
                    chooser,
                    picked.cursor,
                    max_looks=LOOKS_PER_READ,
                    max_chunks=LOOKS_PER_READ,
                )
            picked.add_all(chooser.picked)
        return picked

    def page(self, after: bytes, limit: int, fingerprint: bytes = b"") -> Page:
        """See :meth:`DiskTier.page`."""
        records: list[ChunkRecord] = []
        start = max(after, fingerprint)
        with self.transaction() as txn:
            cursor = txn.cursor(db=self._dbs.chunks)
            more = cursor.set_range(start) if start else cursor.first()
            if more and after and bytes(cursor.key()) == after:
                more = cursor.next()
            last, looks = after, 0
            while more and len(records) < limit and looks < _LOOKS_PER_RECORD * limit:
                key = bytes(cursor.key())
                if not key.startswith(fingerprint):
                    return Page(records, None)
                last, looks = key, looks + 1
                try:
                    record = fmt.decode_record(bytes(cursor.value()))
                except fmt.FormatError:
                    record = None
                if record is not None and record.key == key:
                    records.append(record)
                more = cursor.next()
            more = more and bytes(cursor.key()).startswith(fingerprint)
        return Page(records, ChunkKey(last) if more else None)

    def check_part(self, cursor: bytes, budget_s: float, *, note: bool = False) -> CheckPart:
        """See :meth:`DiskTier.check_part`."""
        part = PartCheck(self, self._dbs, budget_s, note=note).run(cursor)
        for key, serial in part.bad.items() if note else ():
            with self._state:
                known = serial in (self._bad.get(key), self._taken.get(key))
            if not known:
                self._found_bad(key, serial)
        return part

    def _checked(self, key: ChunkKey, value: bytes) -> ChunkRecord | None:
        try:
            record = fmt.decode_record(value)
            if record.key == key:
                if record.serial in (self._bad.get(key), self._taken.get(key)):
                    return None  # proven bad, about to be dropped
                return record if record.binding_id == self.binding_id else None
            problem = f"it is the record of {record.key.hex()}"
        except fmt.FormatError as error:
            problem = str(error)
        self._found_bad(key, BAD_RECORD)
        self._bad_records.warning(
            f"store {self.directory}: record of chunk {key.hex()} is bad: {problem}"
        )
        return None

    def _found_bad(self, key: ChunkKey, serial: int) -> None:
        with self._state:
            self.corrupt_found += 1
            self._bad[key] = serial

    def read_into(
        self, record: ChunkRecord, place: Place, buffer: memoryview, *, note: bool = True
    ) -> bool:
        """See :meth:`DiskTier.read_into`; unless ``note``, what proves bad stays as it is."""
        stored = record.objects[place]
        if buffer.nbytes != stored.nbytes or buffer.readonly or not buffer.c_contiguous:
            raise ValueError(
                f"buffer has {buffer.nbytes} bytes (read-only: {buffer.readonly}), expected"
                f" {stored.nbytes}, writable and contiguous"
            )
        view = buffer.cast("B")
        parts = [view[at : at + EXTENT_BYTES] for at in range(0, len(view), EXTENT_BYTES)]
        with self.transaction() as txn:
            failpoints.hit("load.before_read")
            try:
                return all(
                    self._read_extent(txn, record, place, index, part, stored.digests[index])
                    for index, part in enumerate(parts)
                )
            except ObjectCorrupt:
                if note:
                    self._found_bad(record.key, record.serial)
                raise

    def read_part(self, record: ChunkRecord, place: Place, index: int, buffer: memoryview) -> bool:
        """See :meth:`DiskTier.read_part`."""
        with self.transaction() as txn:
            digest = record.objects[place].digests[index]
            try:
                return self._read_extent(txn, record, place, index, buffer, digest)
            except ObjectCorrupt:
                self._found_bad(record.key, record.serial)
                raise

    def _read_extent(
        self,
        txn: lmdb.Transaction[memoryview],
        record: ChunkRecord,
        place: Place,
        index: int,
        part: memoryview,
        digest: bytes,
    ) -> bool:
        value = txn.get(fmt.extent_key(record.serial, place, index), db=self._dbs.extents)
        if value is None:
            if not self._holds(txn, record):
                return False
            raise _corrupt(record, place, f"extent {index} is absent")
        if len(value) != len(part):
            raise _corrupt(record, place, f"extent {index} has {len(value)} bytes, not {len(part)}")
        self._extents.read(value, part)
        # At once, while the extent is in the processor's cache.
        if extent_digest(part) != digest:
            raise _corrupt(record, place, f"extent {index} has another digest")
        return True

    def _holds(self, txn: lmdb.Transaction[memoryview], record: ChunkRecord) -> bool:
        value = txn.get(record.key, db=self._dbs.chunks)
        if value is None:
            return False
        try:
            return fmt.decode_record(bytes(value)).serial == record.serial
        except fmt.FormatError:
            return False

    def usage(self) -> Usage:
        """See :meth:`DiskTier.usage`."""
        with self.transaction() as txn:
            return usage_of(txn, self._dbs, self.binding_id, self.budget)

    def counters(self) -> fmt.Counters:
        """Numbers that only grow."""
        with self.transaction() as txn:
            return lmdb_open.read_counters(txn, self._dbs)

    def take_bad(self) -> dict[ChunkKey, int]:
        """What was proven bad since the last call, as :meth:`DiskTier.drop` wants it."""
        with self._state:
            # Kept until the next call: by then they are dropped.
            self._taken, self._bad = self._bad, {}
            return dict(self._taken)

    def read_extent(self, value: memoryview, into: memoryview) -> None:
        """Copy an extent's value of a transaction that is still open.

        Raises:
            OSError: the disk failed.
            StoreIOError: likewise.
        """
        self._extents.read(value, into)

    def close(self, timeout_s: float) -> None:
        """See :meth:`ReadGate.close`."""
        super().close(timeout_s)
        self._extents.close()


def _corrupt(record: ChunkRecord, place: Place, problem: str) -> ObjectCorrupt:
    return ObjectCorrupt(
        f"object of rank {place.rank}, group {place.group} of chunk {record.key.hex()} is"
        f" bad: {problem}",
        key=record.key.hex(),
    )
