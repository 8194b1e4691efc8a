"""What is noted of chunks that are stored: that they were used, that they are bad."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence

from lmcache_persist.errors import StoreFull
from lmcache_persist.store.base import MAX_PENDING_TOUCHES, ChunkKey
from lmcache_persist.store.lmdb_transact import SLOW_READ_S, Transacts
from lmcache_persist.store.lmdb_txn import StoreTxn
from lmcache_persist.store.repair import Repair

logger = logging.getLogger(__name__)


class Touches(Transacts):
    """The part of a disk tier on LMDB that orders its chunks by use, and drops bad ones."""

    _touching: threading.Lock
    _touches: dict[ChunkKey, int]

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`DiskTier.touch`."""
        with self._touching:
            for key in reversed(keys):
                self._touches[key] = self._touches.pop(key, 0) + 1
            surplus = len(self._touches) - MAX_PENDING_TOUCHES
            for key in list(itertools.islice(self._touches, max(0, surplus))):
                del self._touches[key]

    def apply_touches(self) -> None:
        """See :meth:`DiskTier.apply_touches`; many touches take several transactions."""
        with self._writer:
            with self._touching:
                touches, self._touches = list(self._touches.items()), {}
            bad = self._reader.take_bad()
            step = self._budget.chunks_per_eviction
            for start in range(0, len(touches), step):
                self._use(touches[start : start + step])
            try:
                self._drop(bad)
            except StoreFull as error:
                logger.warning("%s", error)  # a read finds them bad again

    def _settle(self) -> None:
        """Remove what lost records left behind; a crash meanwhile leaves that to the next start."""
        if not self._unsettled:
            return
        try:
            Repair(self._env, self._dbs, self._budget).settle()
        except StoreFull as error:
            logger.warning("store %s: it is put in order later: %s", self.directory, error)
        else:
            self._unsettled = False

    def _use(self, touches: list[tuple[ChunkKey, int]]) -> None:
        def use(txn: StoreTxn) -> None:
            for key, hits in touches:
                txn.use(key, hits)

        try:
            self._transact(use)
        except StoreFull as error:
            logger.warning("store %s: touches are forgotten: %s", self.directory, error)

    def drop(self, copies: Mapping[ChunkKey, int | None]) -> list[ChunkKey]:
        """See :meth:`DiskTier.drop`; many chunks take several transactions."""
        with self._writer:
            return self._drop(copies)

    def _drop(self, copies: Mapping[ChunkKey, int | None]) -> list[ChunkKey]:
        dropped: list[ChunkKey] = []
        step, meant = self._budget.chunks_per_eviction, list(copies.items())
        while meant:
            part = meant[:step]
            try:
                dropped += self._transact(
                    lambda txn: [key for key, serial in part if txn.drop(key, serial)]  # noqa: B023
                )
            except StoreFull as error:
                if step == 1 or not self._reader.older_reads_ended(SLOW_READ_S):
                    raise StoreFull(
                        f"store {self.directory}: {len(meant)} bad chunks are not dropped: {error}",
                        hint="try again: a slow read keeps freed pages",
                    ) from error
                step = max(1, step // 8)
                continue
            del meant[: len(part)]
        self._settle()
        return dropped
