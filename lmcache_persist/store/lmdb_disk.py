"""The disk tier on LMDB.

Order of writes: extents, record, order and totals in one transaction, its sync, and only
then the report. What a crash leaves is the state before or after a transaction.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import lmdb

from lmcache_persist import failpoints
from lmcache_persist.binding import Binding
from lmcache_persist.errors import StoreFull
from lmcache_persist.store import capacity, data_file, lmdb_open, unsynced
from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import (
    MAX_PENDING_TOUCHES,
    READERS_GONE_S,
    ChunkKey,
    ChunkWrite,
    DiskTier,
    Dropped,
    DropReason,
    WriteReport,
    check_replaced,
    check_stamp,
)
from lmcache_persist.store.filesystem import keeps_preallocated_space
from lmcache_persist.store.findings import Mended
from lmcache_persist.store.lmdb_errors import mapping_errors
from lmcache_persist.store.lmdb_grow import GrowsInUse
from lmcache_persist.store.lmdb_open import Databases
from lmcache_persist.store.lmdb_reader import StoreReader
from lmcache_persist.store.lmdb_reads import StoreReads
from lmcache_persist.store.lmdb_txn import StoreTxn
from lmcache_persist.store.repair import Repair
from lmcache_persist.store.selection import Picked, Selection

logger = logging.getLogger(__name__)

_ATTEMPTS = 6
"""Tries to fit a batch, each after evicting twice as much as the one before."""

_CHUNKS_PER_PRUNE = 1024
"""Chunks that one step of a prune removes at most: the writer has other work, too."""

_SLOW_READ_S = 1.0
"""Seconds that a write without room waits for reads that keep freed pages."""

_T = TypeVar("_T")


class LmdbDisk(StoreReads, GrowsInUse, DiskTier):
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

    def stamp(self) -> Binding | None:
        """See :meth:`DiskTier.stamp`."""
        return self._stamp

    def write_stamp(self, binding: Binding) -> None:
        """See :meth:`DiskTier.write_stamp`."""
        with self._writer, mapping_errors("the store cannot be stamped"):
            check_stamp(self._stamp, binding)
            if self._stamp is None:
                value = fmt.encode_meta(binding.to_json())
                with self._env.begin(write=True) as txn:
                    txn.put(fmt.META_STAMP, value, db=self._dbs.meta)
                if self.relaxed:
                    self._env.sync(True)
                self._stamp = binding
                self._reader.binding_id = binding.binding_id
            failpoints.hit("bind.after_stamp")

    def restamp(self, binding: Binding, *, replaces: str) -> None:
        """See :meth:`DiskTier.restamp`; :meth:`finish_rebind` takes the note back."""
        with self._writer, mapping_errors("the store cannot be stamped anew"):
            check_replaced(self._stamp, replaces)
            with self._env.begin(write=True) as txn:
                note = fmt.encode_meta({"replaced": replaces})
                txn.put(fmt.META_STAMP, fmt.encode_meta(binding.to_json()), db=self._dbs.meta)
                txn.put(fmt.META_REBIND, note, db=self._dbs.meta)
                failpoints.hit("rebind.before_stamp")
            self._env.sync(True)
            failpoints.hit("rebind.after_stamp")
            self._stamp, self._replaced = binding, replaces
            self._reader.binding_id = binding.binding_id
            self._sweep_from = b""

    def finish_rebind(self) -> None:
        """Forget which binding the stamp replaced: the manifest has followed.

        Durable: on return. Threads: writer only.

        Raises:
            StoreIOError: the disk failed; the note is still there, and harmless.
        """
        with self._writer, mapping_errors("the store cannot be changed"):
            if self._replaced:
                with self._env.begin(write=True) as txn:
                    txn.delete(fmt.META_REBIND, db=self._dbs.meta)
                self._env.sync(True)
                self._replaced = ""

    @property
    def _binding_id(self) -> str:
        return self._stamp.binding_id if self._stamp else fmt.NO_BINDING

    # -- writing: the writer thread --

    def _transact(self, change: Callable[[StoreTxn], _T], before: str = "", after: str = "") -> _T:
        """Run ``change`` in one transaction and commit it; passes the failpoints named."""
        with mapping_errors("a write to the store failed"):
            with self._env.begin(write=True) as txn:
                changes = StoreTxn(txn, self._dbs, self._binding_id)
                result = change(changes)
                changes.finish()
                if before:
                    failpoints.hit(before)
            self._unsettled |= changes.lost
            if after:
                failpoints.hit(after)
            return result

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
        if not self._reader.older_reads_ended(_SLOW_READ_S):
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
                if count == 1 or not self._reader.older_reads_ended(_SLOW_READ_S):
                    return None
                count = max(1, count // 8)

    def evict(self) -> list[ChunkKey]:
        """See :meth:`DiskTier.evict`."""
        with self._writer:
            if self._live_pages() <= self._budget.high:
                return []
            return self._evict_once(self._budget.low, ())

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
                self._apply(touches[start : start + step], {})
            self._drop(bad)

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

    def _apply(
        self, touches: list[tuple[ChunkKey, int]], bad: Mapping[ChunkKey, int | None]
    ) -> list[ChunkKey]:
        def change(txn: StoreTxn) -> list[ChunkKey]:
            for key, hits in touches:
                txn.use(key, hits)
            return [key for key, serial in bad.items() if txn.drop(key, serial)]

        try:
            return self._transact(change)
        except StoreFull as error:
            logger.warning("store %s: touches are forgotten: %s", self.directory, error)
            return []

    def drop(self, copies: Mapping[ChunkKey, int | None]) -> list[ChunkKey]:
        """See :meth:`DiskTier.drop`; many chunks take several transactions."""
        with self._writer:
            return self._drop(copies)

    def _drop(self, copies: Mapping[ChunkKey, int | None]) -> list[ChunkKey]:
        dropped: list[ChunkKey] = []
        step, meant = self._budget.chunks_per_eviction, list(copies.items())
        for start in range(0, len(meant), step):
            dropped += self._apply([], dict(meant[start : start + step]))
        self._settle()
        return dropped

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
