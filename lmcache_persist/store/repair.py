"""Mending a store: what is bad is dropped, what only counts or orders is put right.

Every step is one transaction of bounded size, so that the pages held back are enough for
it, and leaves nothing worse than it was: a repair that is killed can be done again. Steps:

1. counters that are lost are made anew, from the keys in use;
2. each chunk is examined; it is dropped if its record or an extent is proven bad, and
   gets a place in the order if it has none;
3. entries of ``order`` and ``extents`` that belong to no chunk are removed;
4. totals that are not the sum of the records are replaced.

Mending one thing can show another (two records that claimed one extent), so the steps are
gone through again until a round finds nothing.

Threads: the only writer of the store, beside readers.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import lmdb

from lmcache_persist import failpoints
from lmcache_persist.errors import StoreDamaged, StoreFull
from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import ChunkRecord, fingerprint_of
from lmcache_persist.store.capacity import PageBudget
from lmcache_persist.store.check import (
    Fault,
    Problem,
    Progress,
    ReadExtent,
    chunk_name,
    examine,
)
from lmcache_persist.store.findings import Mended, Violation
from lmcache_persist.store.lmdb_errors import mapping_errors
from lmcache_persist.store.lmdb_open import Databases, read_counters, read_meta
from lmcache_persist.store.tally import (
    Tally,
    entries,
    last_serial_and_order,
    sorted_serials,
    surplus_extents,
    surplus_of_chunks,
    surplus_order,
    tally,
    wrong_totals,
)

MAX_ROUNDS = 4
RECORDS_PER_LOOK = 256
BYTES_PER_LOOK = 64 << 20

_DROPPED = "dropped the chunk"
_REMOVED = "removed"
_Change = tuple[Mended, Callable[[Any], None]]


class Repair:
    """One repair of one store.

    Args:
        env: open for writing, by nobody else.
        dbs: its handles.
        budget: bounds the transactions.
        read: copies an extent's value, or None to leave out the digests.
        unwanted: chunks of the current binding to drop though they are well: reasons by
            fingerprint.
        progress: told of every chunk that was looked at, in the first round.
    """

    def __init__(
        self,
        env: lmdb.Environment,
        dbs: Databases,
        budget: PageBudget,
        *,
        read: ReadExtent | None = None,
        unwanted: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._env = env
        self._dbs = dbs
        self._step = budget.chunks_per_eviction
        self._read = read
        self._unwanted = dict(unwanted or {})
        self._progress = progress
        self._binding_id = ""
        self._unreadable: set[str] = set()

    def run(self) -> Iterator[Mended]:
        """Mend; yields what was wrong, after what was done about it is durable.

        To be exhausted: what is not asked for is not done.

        Durable: everything that was yielded.

        Raises:
            StoreDamaged: the store's own description cannot be read.
            StoreFull: no page is left to work with.
            StoreIOError: the disk failed; what was not yielded is as it was.
        """
        for _ in range(MAX_ROUNDS):
            found = 0
            for mended in self._round():
                if mended.done is None:
                    # It was tried, and is told once.
                    if mended.violation.where in self._unreadable:
                        continue
                    self._unreadable.add(mended.violation.where)
                else:
                    found += 1
                yield mended
            self._progress = None
            if not found:
                return

    def settle(self) -> None:
        """Remove what lost records left behind, and count anew; looks into no chunk.

        Durable: all of it, on return. Until then ``meta`` has the note of it.

        Raises:
            StoreDamaged, StoreFull, StoreIOError: as :meth:`run`; what was done is done.
        """
        for _ in range(MAX_ROUNDS):
            if not any([*self._leftovers(), *self._totals()]):
                break
        with mapping_errors("a repair of the store failed"):
            with self._env.begin(write=True) as txn:
                txn.delete(fmt.META_UNSETTLED, db=self._dbs.meta)

    def _round(self) -> Iterator[Mended]:
        yield from self._counters()
        yield from self._chunks()
        yield from self._leftovers()
        yield from self._totals()

    # -- one transaction --

    def _looking(self, look: Callable[[Any], Any]) -> Any:
        with mapping_errors("the store cannot be read"), self._env.begin(buffers=True) as txn:
            return look(txn)

    def _change(self, changes: list[_Change]) -> Iterator[Mended]:
        """Make the changes, in as few transactions as are allowed."""
        step, at = self._step, 0
        while at < len(changes):
            part = changes[at : at + step]
            try:
                with mapping_errors("a repair of the store failed"):
                    with self._env.begin(write=True) as txn:
                        for _, change in part:
                            change(txn)
                        failpoints.hit("repair.before_sync")
                    self._env.sync(True)
                    failpoints.hit("repair.after_sync")
            except StoreFull:
                if step == 1:
                    raise
                step = max(1, step // 8)
                continue
            at += len(part)
            yield from (mended for mended, _ in part)

    # -- the steps --

    def _counters(self) -> Iterator[Mended]:
        def look(txn: Any) -> tuple[str, fmt.Counters | None]:
            meta = read_meta(txn, self._dbs)
            self._binding_id = meta.stamp.binding_id if meta.stamp else fmt.NO_BINDING
            try:
                read_counters(txn, self._dbs)
            except StoreDamaged as error:
                return error.message, fmt.Counters(*last_serial_and_order(txn, self._dbs))
            return "", None

        problem, counters = self._looking(look)
        if counters is not None:
            mended = Mended(Violation("meta", problem), "made them anew from the keys in use")
            yield from self._change([(mended, partial(self._put_counters, counters=counters))])

    def _put_counters(self, txn: Any, counters: fmt.Counters) -> None:
        txn.put(fmt.META_COUNTERS, counters.encode(), db=self._dbs.meta)

    def _chunks(self) -> Iterator[Mended]:
        after: bytes | None = b""
        while after is not None:
            start = after
            found, after = self._looking(lambda txn: self._examine_some(txn, start))  # noqa: B023
            changes = []
            for key, record, problems in found:
                for problem in problems:
                    mended, change = self._remedy(key, record, problem)
                    if change is None:
                        yield mended
                    else:
                        changes.append((mended, change))
            yield from self._change(changes)

    def _examine_some(
        self, txn: Any, after: bytes
    ) -> tuple[list[tuple[bytes, ChunkRecord | None, list[Problem]]], bytes | None]:
        """What is wrong with the next few chunks, and the key to go on after."""
        found = []
        counters = read_counters(txn, self._dbs)
        cursor = txn.cursor(db=self._dbs.chunks)
        more = cursor.set_range(after) if after else cursor.first()
        if more and bytes(cursor.key()) == after:
            more = cursor.next()
        looked = nbytes = 0
        while more and looked < RECORDS_PER_LOOK and nbytes < BYTES_PER_LOOK:
            after = bytes(cursor.key())
            value = bytes(cursor.value())
            record, problems = examine(txn, self._dbs, after, value, counters, self._read)
            if record is not None:
                problems = problems or self._wanted(record)
                size = record.objects.table.nbytes
                nbytes += size if self._read else 0
                if self._progress is not None:
                    self._progress.advance(len(record.objects), size)
            if problems:
                found.append((after, record, problems))
            looked += 1
            more = cursor.next()
        return found, after if more else None

    def _wanted(self, record: ChunkRecord) -> list[Problem]:
        reason = self._unwanted.get(fingerprint_of(record.key))
        if reason is None or record.binding_id != self._binding_id:
            return []
        return [Problem(Fault.OBJECT, Violation(chunk_name(record.key), reason))]

    def _remedy(
        self, key: bytes, record: ChunkRecord | None, problem: Problem
    ) -> tuple[Mended, Callable[[Any], None] | None]:
        violation = problem.violation
        if problem.fault is Fault.UNREADABLE:
            return Mended(violation, None), None
        if record is None:
            done = "removed the record"
            remove = partial(self._delete, handle=self._dbs.chunks, key=key)
            return Mended(violation, done, key), remove
        if problem.fault is Fault.OBJECT:
            mended = Mended(violation, _DROPPED, record.key)
            return mended, partial(self._drop, record=record)
        if problem.fault is Fault.ORDER:
            done = "gave it a place in the order"
            return Mended(violation, done), partial(self._place, record=record)
        return Mended(violation, "raised the counters"), partial(self._raise, record=record)

    def _delete(self, txn: Any, handle: Any, key: bytes) -> None:
        txn.delete(key, db=handle)

    def _drop(self, txn: Any, record: ChunkRecord, *, extents: bool = True) -> None:
        """Remove a chunk with all that is its own; again is fine."""
        if not txn.delete(record.key, db=self._dbs.chunks):
            return
        order = fmt.order_key(record.order)
        if txn.get(order, db=self._dbs.order) == record.key:
            txn.delete(order, db=self._dbs.order)
        for place, entry in record.objects.table.entries.items() if extents else ():
            for index in range(entry.num_digests):
                txn.delete(fmt.extent_key(record.serial, place, index), db=self._dbs.extents)
        self._subtract(txn, record)

    def _subtract(self, txn: Any, record: ChunkRecord) -> None:
        """Keep totals right that were; wrong ones are replaced later, as a whole."""
        key = fmt.totals_key(record.binding_id, record.key)
        value = txn.get(key, db=self._dbs.totals)
        try:
            totals = fmt.Totals.decode(value) if value is not None else fmt.Totals()
        except fmt.FormatError:
            return
        totals.add(record, -1)
        if min(totals.chunks, totals.objects, totals.nbytes) < 0:
            return
        if totals.chunks:
            txn.put(key, totals.encode(), db=self._dbs.totals)
        else:
            txn.delete(key, db=self._dbs.totals)

    def _place(self, txn: Any, record: ChunkRecord) -> None:
        value = txn.get(record.key, db=self._dbs.chunks)
        if value is None:
            return  # dropped for another reason
        order = fmt.order_key(record.order)
        other = txn.get(order, db=self._dbs.order)
        if other is not None and self._owns(txn, other, record.order):
            counters = read_counters(txn, self._dbs)
            counters.order = max(counters.order, record.order) + 1
            self._put_counters(txn, counters)
            moved = replace(record, order=counters.order)
            txn.put(record.key, fmt.encode_record(moved), db=self._dbs.chunks)
            order = fmt.order_key(moved.order)
        txn.put(order, record.key, db=self._dbs.order)

    def _owns(self, txn: Any, key: bytes, order: int) -> bool:
        """Whether a chunk is there and has that place."""
        value = txn.get(key, db=self._dbs.chunks) if key else None
        if value is None:
            return False
        try:
            head = fmt.decode_head(value)
        except fmt.FormatError:
            return False
        return head.key == key and head.order == order

    def _raise(self, txn: Any, record: ChunkRecord) -> None:
        counters = read_counters(txn, self._dbs)
        counters.serial = max(counters.serial, record.serial)
        counters.order = max(counters.order, record.order)
        self._put_counters(txn, counters)

    def _leftovers(self) -> Iterator[Mended]:
        def look(txn: Any) -> tuple[Tally, bool, bool]:
            found = tally(txn, self._dbs)
            return (
                found,
                entries(txn, self._dbs.order) != found.chunks,
                entries(txn, self._dbs.extents) != found.extents,
            )

        found, orders, extents = self._looking(look)
        if orders:
            yield from self._remove_all(
                "order",
                self._dbs.order,
                lambda txn: (
                    (key, what) for key, what in surplus_order(txn, self._dbs) if what is not None
                ),
            )
        if extents:
            serials = sorted_serials(found)
            for walk in (
                lambda txn: surplus_extents(txn, self._dbs, serials),
                lambda txn: surplus_of_chunks(txn, self._dbs),
            ):
                yield from self._remove_all("extents", self._dbs.extents, walk)
            yield from self._same_serial(serials)

    def _same_serial(self, serials: array[int]) -> Iterator[Mended]:
        """Of chunks that share their extents, leave one."""
        twice = {one for one, other in itertools.pairwise(serials) if one == other}

        def look(txn: Any) -> list[ChunkRecord]:
            seen: set[int] = set()
            others = []
            for key, value in txn.cursor(db=self._dbs.chunks) if twice else ():
                try:
                    head = fmt.decode_head(value)
                except fmt.FormatError:
                    continue
                if head.key == key and head.serial in twice:
                    if head.serial in seen:
                        others.append(fmt.decode_record(bytes(value)))
                    seen.add(head.serial)
            return others

        yield from self._change(
            [
                (
                    Mended(
                        Violation(chunk_name(record.key), "another chunk has its serial"),
                        "removed the record",
                        record.key,
                    ),
                    partial(self._drop, record=record, extents=False),
                )
                for record in self._looking(look)
            ]
        )

    def _remove_all(
        self, name: str, handle: Any, walk: Callable[[Any], Iterator[tuple[bytes, str]]]
    ) -> Iterator[Mended]:
        """Remove what a walk yields; it is begun anew as long as it has more than is held."""
        more = True
        while more:
            keys = self._looking(lambda txn: _first(walk(txn), self._step))
            more = len(keys) == self._step
            yield from self._change(
                [
                    (
                        Mended(Violation(f"{name} {key.hex()}", what), _REMOVED),
                        partial(self._delete, handle=handle, key=key),
                    )
                    for key, what in keys
                ]
            )

    def _totals(self) -> Iterator[Mended]:
        def look(txn: Any) -> tuple[Tally, list[tuple[bytes, str]]]:
            found = tally(txn, self._dbs)
            return found, list(wrong_totals(txn, self._dbs, found))

        found, wrong = self._looking(look)
        yield from self._change(
            [
                (
                    Mended(Violation(f"totals {key.hex()}", what), "counted anew"),
                    partial(self._put_totals, key=key, totals=found.totals.get(key)),
                )
                for key, what in wrong
            ]
        )

    def _put_totals(self, txn: Any, key: bytes, totals: fmt.Totals | None) -> None:
        if totals is None:
            txn.delete(key, db=self._dbs.totals)
        else:
            txn.put(key, totals.encode(), db=self._dbs.totals)


def _first(items: Iterator[tuple[bytes, str]], count: int) -> list[tuple[bytes, str]]:
    return [pair for pair, _ in zip(items, range(count), strict=False)]
