"""Checking a store that is in use, a little at a time.

Each part looks at what is there at its own moment, in transactions too short to keep
freed pages from being reused. What takes one moment for all of the store, comparing sums,
comes last, and only if the store is small enough for that.

A cursor is one letter, which says what the part looks at, and a key to go on after. They
grow from part to part.
"""

from __future__ import annotations

import itertools
import time
from typing import Any, Protocol

from lmcache_persist.errors import MalformedMessage, ObjectCorrupt
from lmcache_persist.store.base import BAD_RECORD, CHUNK_KEY_BYTES, ChunkKey, ChunkRecord
from lmcache_persist.store.check import Fault, check_counts, chunk_name, examine
from lmcache_persist.store.findings import CheckPart, Violation
from lmcache_persist.store.lmdb_open import Databases, read_counters
from lmcache_persist.store.tally import entries, surplus_order, tally

CHUNKS, ORDER, COUNTS = b"c", b"o", b"s"
MAX_CURSOR_BYTES = 1 + CHUNK_KEY_BYTES

RECORDS_PER_LOOK = 64
ENTRIES_PER_LOOK = 1024
MAX_VIOLATIONS = 2048
"""Violations of a part, roughly; so many fit a message."""
MAX_COUNTED_AT_ONCE = 500_000
"""Chunks whose sums are compared in one transaction; takes about 1.5 us each."""


class _Reader(Protocol):
    """What is needed of :class:`.lmdb_reader.StoreReader`."""

    def transaction(self) -> Any: ...

    def read_into(
        self, record: ChunkRecord, place: Any, buffer: memoryview, *, note: bool
    ) -> bool: ...


def check_cursor(cursor: bytes) -> None:
    """Refuse what is no cursor.

    Raises:
        MalformedMessage: as said.
    """
    kind, key = cursor[:1], cursor[1:]
    if kind not in (b"", CHUNKS, ORDER, COUNTS) or (kind == CHUNKS and len(key) != CHUNK_KEY_BYTES):
        raise MalformedMessage(
            f"cursor of {len(cursor)} bytes is none of a check, expected one of an answer, or none"
        )


class PartCheck:
    """One part of a check.

    Args:
        reader: of the store.
        dbs: the handles.
        budget_s: seconds after which the part ends.
        note: let the reader know of what proves bad, as any other read does.

    Threads: any, one each.
    """

    def __init__(
        self, reader: _Reader, dbs: Databases, budget_s: float, *, note: bool = False
    ) -> None:
        self._reader = reader
        self._note = note
        self._dbs = dbs
        self._until = time.monotonic() + budget_s
        self._violations: list[Violation] = []
        self._notes: list[str] = []
        self._bad: dict[ChunkKey, int] = {}
        self._objects = self._bytes = 0

    def run(self, cursor: bytes) -> CheckPart:
        """Look from ``cursor`` on.

        Raises:
            MalformedMessage: it is no cursor.
            StoreIOError, StoreDamaged: as reading does.
        """
        check_cursor(cursor)
        kind, after = cursor[:1] or CHUNKS, cursor[1:]
        following: bytes | None
        if kind == CHUNKS:
            following = self._chunks(after)
        elif kind == ORDER:
            following = self._order(after)
        else:
            self._counts()
            following = None
        return CheckPart(
            self._violations, self._bad, self._objects, self._bytes, following, self._notes
        )

    def _chunks(self, after: bytes) -> bytes:
        while time.monotonic() < self._until and len(self._violations) < MAX_VIOLATIONS:
            records, last, more = self._look(after)
            for at, record in enumerate(records):
                self._digests(record)
                if time.monotonic() >= self._until and at + 1 < len(records):
                    return CHUNKS + record.key
            if not more:
                return self._after_chunks()
            after = last
        return CHUNKS + after

    def _look(self, after: bytes) -> tuple[list[ChunkRecord], bytes, bool]:
        """All but digests of a few chunks; the last key looked at, and whether there are more."""
        records: list[ChunkRecord] = []
        last = after
        with self._reader.transaction() as txn:
            counters = read_counters(txn, self._dbs)
            cursor = txn.cursor(db=self._dbs.chunks)
            more = cursor.set_range(after) if after else cursor.first()
            if more and bytes(cursor.key()) == after:
                more = cursor.next()
            while more and len(records) < RECORDS_PER_LOOK:
                last = bytes(cursor.key())
                value = bytes(cursor.value())
                record, problems = examine(txn, self._dbs, last, value, counters, None)
                for problem in problems:
                    self._violations.append(problem.violation)
                    if problem.fault in (Fault.RECORD, Fault.OBJECT):
                        self._bad[ChunkKey(last)] = record.serial if record else BAD_RECORD
                if record is not None:
                    records.append(record)
                more = cursor.next()
        return records, last, bool(more)

    def _digests(self, record: ChunkRecord) -> None:
        self._objects += len(record.objects)
        self._bytes += record.objects.table.nbytes
        if record.key in self._bad:
            return
        for place, stored in record.objects.items():
            buffer = memoryview(bytearray(stored.nbytes))
            try:
                if not self._reader.read_into(record, place, buffer, note=self._note):
                    return  # evicted meanwhile
            except ObjectCorrupt as error:
                self._violations.append(Violation(chunk_name(record.key), str(error)))
                self._bad[record.key] = record.serial
                return

    def _after_chunks(self) -> bytes:
        with self._reader.transaction() as txn:
            chunks, order = entries(txn, self._dbs.chunks), entries(txn, self._dbs.order)
        # A small store's order is walked, if need be, where its sums are compared.
        return COUNTS if chunks == order or chunks <= MAX_COUNTED_AT_ONCE else ORDER

    def _order(self, after: bytes) -> bytes:
        while time.monotonic() < self._until and len(self._violations) < MAX_VIOLATIONS:
            with self._reader.transaction() as txn:
                looked = list(surplus_order(txn, self._dbs, after, ENTRIES_PER_LOOK))
            self._violations += [
                Violation(f"order {order.hex()}", what) for order, what in looked if what
            ]
            if len(looked) < ENTRIES_PER_LOOK:
                return COUNTS
            after = looked[-1][0]
        return ORDER + after

    def _counts(self) -> None:
        with self._reader.transaction() as txn:
            number = entries(txn, self._dbs.chunks)
            if number <= MAX_COUNTED_AT_ONCE:
                found = check_counts(txn, self._dbs, tally(txn, self._dbs))
                self._violations += itertools.islice(found, MAX_VIOLATIONS)
                if next(found, None) is not None:
                    self._notes.append(f"more than {MAX_VIOLATIONS} sums and leftovers are wrong")
                return
        self._notes.append(
            f"sums were not compared: {number} chunks are too many for one moment of a live"
            " server; --repair does it, or verify with the server stopped"
        )
