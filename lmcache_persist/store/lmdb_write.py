"""Writing batches of chunks into a store on LMDB, and making room for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmcache_persist import failpoints
from lmcache_persist.errors import StoreFull
from lmcache_persist.store import capacity
from lmcache_persist.store.base import ChunkKey, ChunkWrite, Dropped, DropReason, WriteReport
from lmcache_persist.store.lmdb_errors import mapping_errors
from lmcache_persist.store.lmdb_evict import Evicts
from lmcache_persist.store.lmdb_reads import StoreReads
from lmcache_persist.store.lmdb_touch import Touches
from lmcache_persist.store.lmdb_txn import StoreTxn

_ATTEMPTS = 6
"""Tries to fit a batch, each after evicting twice as much as the one before."""


class Writes(StoreReads, Evicts, Touches):
    """The part of a disk tier on LMDB that writes."""

    def write(self, batch: Sequence[ChunkWrite]) -> WriteReport:
        """See :meth:`DiskTier.write`; a batch of very many pages takes several transactions."""
        report = WriteReport()
        with self._writer:
            with mapping_errors("a write to the store failed"):
                failpoints.hit("commit.before_write")
            self.apply_touches()
            groups = self._split(batch, report)
            # The tail of the batch, over all groups, gets the oldest place in the order.
            top = self.counters().order + len(batch)
            places = {write.key: top - index for index, write in enumerate(batch)}
            for group in groups:
                self._write_group(group, places, report)
        return report

    def _split(self, batch: Sequence[ChunkWrite], report: WriteReport) -> list[list[ChunkWrite]]:
        """Sort out what can never fit; cut the rest by the pages a transaction may take."""
        groups: list[list[ChunkWrite]] = []
        pages = 0
        held = self.find([write.key for write in batch])
        for write, record in zip(batch, held, strict=True):
            sizes = {place: memoryview(data).nbytes for place, data in write.objects.items()}
            if record is not None:
                sizes |= {place: record.objects.nbytes(place) for place in record.objects}
            reason = capacity.refusal(sizes, self._budget)
            if reason:
                report.dropped.append(Dropped(write.key, reason, DropReason.TOO_LARGE))
                continue
            pages += self._pages(write)
            if not groups or pages > self._budget.pages_per_transaction:
                groups.append([])
                pages = self._pages(write)
            groups[-1].append(write)
        return groups

    def _pages(self, write: ChunkWrite) -> int:
        sizes = {place: memoryview(data).nbytes for place, data in write.objects.items()}
        return capacity.chunk_pages(sizes, self._budget.page_bytes)

    def _write_group(
        self, group: list[ChunkWrite], places: Mapping[ChunkKey, int], report: WriteReport
    ) -> None:
        def put_all(txn: StoreTxn) -> None:
            txn.counters.order = max(txn.counters.order, *places.values())
            for write in group:
                txn.put(write, places[write.key])

        needed = sum(self._pages(write) for write in group)
        room = self._budget.limit - needed
        own = {write.key for write in group}
        if self._live_pages() > room:
            self._evict_to(min(room, self._budget.low), places.keys(), report)
        if self._live_pages() > room:
            # Only the rest of the batch is left: it is larger than the tier.
            self._evict_to(room, own, report)
        for attempt in range(_ATTEMPTS):
            try:
                self._transact(put_all, "commit.before_sync", "commit.after_sync")
            except StoreFull:
                if not self._freed_pages_return():
                    report.dropped += [
                        Dropped(write.key, "a slow read keeps freed pages") for write in group
                    ]
                    return
                if attempt:
                    # An extent needs its pages in one piece.
                    self._evict_to(self._live_pages() - (needed << attempt), own, report)
            else:
                report.written += [write.key for write in group]
                report.evicted = [key for key in report.evicted if key not in own]
                return
        if len(group) == 1:
            report.dropped.append(Dropped(group[0].key, "no room, even after eviction"))
            return
        for write in group:
            self._write_group([write], places, report)
