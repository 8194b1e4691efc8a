"""The disk tier on LMDB.

Order of writes: extents, record, order and totals in one transaction, its sync, and only
then the report. What a crash leaves is the state before or after a transaction.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import lmdb

from lmcache_persist.errors import StoreFull
from lmcache_persist.store import capacity, data_file, lmdb_open, unsynced
from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import READERS_GONE_S, ChunkKey, DiskTier
from lmcache_persist.store.filesystem import keeps_preallocated_space
from lmcache_persist.store.findings import Mended
from lmcache_persist.store.lmdb_errors import mapping_errors
from lmcache_persist.store.lmdb_grow import GrowsInUse
from lmcache_persist.store.lmdb_open import Databases
from lmcache_persist.store.lmdb_reader import StoreReader
from lmcache_persist.store.lmdb_stamp import Stamps
from lmcache_persist.store.lmdb_write import Writes
from lmcache_persist.store.repair import Repair
from lmcache_persist.store.selection import Picked, Selection

logger = logging.getLogger(__name__)

_CHUNKS_PER_PRUNE = 1024
"""Chunks that one step of a prune removes at most: the writer has other work, too."""


class LmdbDisk(Writes, Stamps, GrowsInUse, DiskTier):
    """A disk tier in one LMDB environment. Made by :meth:`open`.

    Attributes:
        directory: the store's folder.
        relaxed: whether commits are not synced.
        started_clean: whether the last server closed the store.
        space_guaranteed: whether preallocated space is promised by the file system.
    """

    backend = "lmdb"

    def __init__(
        self, directory: Path, env: lmdb.Environment, capacity_bytes: int, *, relaxed: bool
    ) -> None:
        self.directory = directory
        self.capacity_bytes = capacity_bytes
        self.relaxed = relaxed
        self._env = env
        self._dbs: Databases = lmdb_open.open_databases(env, create=False)
        self._writer = threading.RLock()
        self._closed = False
        self._unsettled = False
        self._touching = threading.Lock()
        self._touches: dict[ChunkKey, int] = {}  # hits, in the order to apply them
        self._reader = StoreReader(directory, env, self._dbs)
        meta = self._reader.meta
        self.uuid = meta.uuid
        self.format_version = meta.format_version
        self.started_clean = meta.clean_shutdown
        self.space_guaranteed = keeps_preallocated_space(directory)
        if not self.space_guaranteed:
            logger.warning(
                "store %s: this file system does not promise preallocated space; a full disk"
                " would end the server",
                directory,
            )
        self._stamp = meta.stamp
        self._replaced = meta.replaced
        self._budget = self._reader.budget
        # Where the next sweep goes on; None once nothing is stale.
        self._sweep_from: bytes | None = b"" if self.usage().stale_objects else None

    @classmethod
    def open(
        cls,
        directory: Path,
        capacity_bytes: int,
        *,
        uuid: str | None = None,
        relaxed: bool = False,
    ) -> LmdbDisk:
        """Open the store in ``directory`` for its one server; make it if there is none.

        The caller holds the data dir's lock. The data file has exactly ``capacity_bytes``,
        all of them allocated.

        Args:
            directory: the store's own folder.
            capacity_bytes: a multiple of 4096; may grow from one start to the next.
            uuid: 32 hex digits for a new store; a present one keeps its own.
            relaxed: do not sync. Nothing then survives a power loss for certain.

        Durable: a new store, on return.

        Raises:
            ConfigError: the capacity is too small, or below the present file.
            DiskTooSmall: the file system lacks room; nothing was made.
            FormatTooNew: a newer version wrote the store.
            StoreDamaged: the file must not be mapped.
            StoreIOError: as said.
        """
        capacity.PageBudget.of(capacity_bytes)
        if not (directory / data_file.DATA_NAME).exists():
            lmdb_open.create(directory, capacity_bytes, uuid)
        lmdb_open.prepare(directory, capacity_bytes)
        if relaxed:
            unsynced.mark_unsynced(directory)
        env = lmdb_open.open_environment(directory, capacity_bytes, sync=not relaxed)
        try:
            disk = cls(directory, env, capacity_bytes, relaxed=relaxed)
            disk._begin_use()
            if not relaxed:
                unsynced.clear_unsynced(directory)
        except BaseException:
            env.close()
            raise
        return disk

    def _begin_use(self) -> None:
        mode = {"relaxed": self.relaxed, "kernel_boot_id": unsynced.kernel_boot_id()}
        with mapping_errors("the store cannot be opened"):
            with self._env.begin(write=True) as txn:
                txn.delete(fmt.META_SHUTDOWN, db=self._dbs.meta)
                txn.put(fmt.META_MODE, fmt.encode_meta(mode), db=self._dbs.meta)
                self._unsettled = txn.get(fmt.META_UNSETTLED, db=self._dbs.meta) is not None
            self._env.sync(True)

    def sweep_stale(self) -> int:
        """See :meth:`DiskTier.sweep_stale`."""
        with self._writer:
            start = self._sweep_from
            if start is None:
                return 0
            swept = self._remove_some(lambda txn, count: txn.sweep_stale(start, count))
            if swept is None:
                return 0
            objects, self._sweep_from = swept
            if not self.usage().stale_objects:
                self._sweep_from = None
            return objects

    def prune(self, selection: Selection, cursor: bytes) -> Picked:
        """See :meth:`DiskTier.prune`."""
        with self._writer:
            self.apply_touches()  # what is in use now goes last
            picked = self._remove_some(
                lambda txn, count: txn.prune(selection, cursor, count), _CHUNKS_PER_PRUNE
            )
        if picked is None:
            raise StoreFull(
                f"the store in {self.directory} cannot be pruned: a slow read keeps freed pages",
                hint="prune again",
            )
        return picked

    def repair(self) -> list[Mended]:
        """See :meth:`DiskTier.repair`."""
        with self._writer:
            return list(Repair(self._env, self._dbs, self._budget).run())

    def close(self, timeout_s: float = READERS_GONE_S) -> None:
        """See :meth:`DiskTier.close`.

        Raises:
            StoreIOError: the clean shutdown could not be marked; it is closed all the same.
        """
        with self._writer:
            if self._closed:
                return
            try:
                self.apply_touches()
                self._mark_clean()
            finally:
                self._closed = True
                # Unmapping beneath a read is a SIGSEGV, so this waits, or raises.
                self._reader.close(timeout_s)
                if not self._map_lost:
                    self._env.close()
            if self.relaxed:
                unsynced.clear_unsynced(self.directory)

    def _mark_clean(self) -> None:
        with mapping_errors("the store cannot be closed"):
            self._env.sync(True)
            with self._env.begin(write=True) as txn:
                txn.put(fmt.META_SHUTDOWN, fmt.encode_meta({"clean": True}), db=self._dbs.meta)
            self._env.sync(True)
