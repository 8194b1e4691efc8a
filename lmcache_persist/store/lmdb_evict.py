"""Making room in a store on LMDB: the oldest chunks go, in bounded transactions."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection
from typing import TypeVar

from lmcache_persist.errors import StoreFull
from lmcache_persist.store import lmdb_open
from lmcache_persist.store.base import ChunkKey, Dropped, WriteReport
from lmcache_persist.store.lmdb_errors import mapping_errors
from lmcache_persist.store.lmdb_transact import SLOW_READ_S, Transacts
from lmcache_persist.store.lmdb_txn import StoreTxn

logger = logging.getLogger(__name__)


_T = TypeVar("_T")


class Evicts(Transacts):
    """The part of a disk tier on LMDB that makes room in it."""

    def _turn(self) -> None:
        """An empty transaction, after which LMDB reuses pages freed before it."""

        def count(txn: StoreTxn) -> None:
            txn.counters.turns += 1

        try:
            self._transact(count)
        except StoreFull:
            logger.debug("store %s: no page left to turn with", self.directory)

    def _freed_pages_return(self) -> bool:
        """Let LMDB reuse what was freed; False while a slow read keeps it from that."""
        if not self._reader.older_reads_ended(SLOW_READ_S):
            return False
        # Pages count again two transactions after the one that freed them.
        self._turn()
        self._turn()
        return True

    def _live_pages(self) -> int:
        with mapping_errors("the store cannot be read"), self._env.begin() as txn:
            return lmdb_open.live_pages(txn, self._dbs)

    def _evict_to(self, target: int, spare: Collection[ChunkKey], report: WriteReport) -> None:
        """Evict down to ``target`` pages, in bounded transactions."""
        while self._live_pages() > target:
            evicted = self._evict_once(target, spare)
            if not evicted:
                break
            gone = set(evicted)
            report.evicted += [key for key in evicted if key not in report.written]
            lost = [key for key in report.written if key in gone]
            report.dropped += [Dropped(key, "no room beside its own batch") for key in lost]
            report.written = [key for key in report.written if key not in gone]
        self._turn()

    def _evict_once(self, target: int, spare: Collection[ChunkKey]) -> list[ChunkKey]:
        return self._remove_some(lambda txn, count: txn.evict(target, count, spare)) or []

    def _remove_some(
        self, remove: Callable[[StoreTxn, int], _T], at_most: int | None = None
    ) -> _T | None:
        """Have ``remove`` take away so many chunks; None while a slow read forbids it."""
        count = min(self._budget.chunks_per_eviction, at_most or sys.maxsize)
        while True:
            try:
                return self._transact(
                    lambda txn: remove(txn, count),  # noqa: B023 - called now
                    "evict.before_sync",
                    "evict.after_sync",
                )
            except StoreFull:
                # Only while a slow read keeps pages from being reused.
                if count == 1 or not self._reader.older_reads_ended(SLOW_READ_S):
                    return None
                count = max(1, count // 8)

    def evict(self) -> list[ChunkKey]:
        """See :meth:`DiskTier.evict`."""
        with self._writer:
            if self._live_pages() <= self._budget.high:
                return []
            return self._evict_once(self._budget.low, ())
