"""A store made anew from the good chunks of another one: for backup, restore and shrinking.

Chunks keep their order of use, hits and age; everything else is given anew, so that the
copy holds no freed pages and nothing stale. Every digest is checked on the way: what is
made has the digests that the records of the source have.

The copy is not synced until :meth:`StoreCopy.finish`; a crash before that leaves something
to be thrown away, which is the caller's duty: he makes it under a name that nobody trusts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import lmdb

from lmcache_persist.binding import Binding
from lmcache_persist.errors import ObjectCorrupt, StoreFull, StoreIOError
from lmcache_persist.store import capacity, data_file, lmdb_open
from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import ChunkKey, ChunkRecord, ChunkWrite, Place, fingerprint_of
from lmcache_persist.store.lmdb_errors import mapping_errors
from lmcache_persist.store.lmdb_txn import StoreTxn
from lmcache_persist.store.offline import OfflineStore

BATCH_BYTES = 64 << 20
"""Bytes of one transaction of a copy."""

_SPARE_PAGES = 64
_TREE_BYTES_PER_CHUNK = 512  # an entry of the order and its share of half-full pages
_SHARE_OF_SLACK = 32


def capacity_for(used_bytes: int, chunks: int) -> int:
    """The capacity that takes what another store has in use.

    Args:
        used_bytes: of the source, as :attr:`.base.Usage.used_bytes`.
        chunks: of the source.
    """
    page = capacity.LMDB_PAGE_BYTES
    needed = used_bytes + chunks * _TREE_BYTES_PER_CHUNK
    needed = -(-(needed + needed // _SHARE_OF_SLACK) // page) + _SPARE_PAGES
    total = max(capacity.MIN_CAPACITY_BYTES // page, needed)
    while capacity.PageBudget.of(total * page).low < needed:
        total += max(1, total // 64)
    return total * page


@dataclass(slots=True)
class Tally:
    """Chunks, objects and bytes, by fingerprint."""

    by_model: dict[str, fmt.Totals] = field(default_factory=dict)

    def add(self, record: ChunkRecord) -> None:
        """One more chunk."""
        self.by_model.setdefault(fingerprint_of(record.key), fmt.Totals()).add(record)

    @property
    def total(self) -> fmt.Totals:
        """Of all models."""
        rows = self.by_model.values()
        return fmt.Totals(
            sum(row.chunks for row in rows),
            sum(row.objects for row in rows),
            sum(row.nbytes for row in rows),
        )


class StoreCopy:
    """A new store that is being filled; made by :meth:`make`.

    Attributes:
        copied: what was copied into it.
        binding_id: what chunks are written under.
        page_bytes: LMDB's.
        room_pages: that there were at the beginning below the low mark.
    """

    def __init__(self, directory: Path, env: lmdb.Environment, binding_id: str | None) -> None:
        self.copied = Tally()
        self._directory = directory
        self._env = env
        self._dbs = lmdb_open.open_databases(env, create=False)
        self._batch: list[tuple[ChunkRecord, Mapping[Place, bytes | memoryview]]] = []
        self._batch_bytes = 0
        with env.begin() as txn:
            self._budget = capacity.PageBudget.of(
                env.info()["map_size"], txn.stat(self._dbs.main)["psize"]
            )
            if binding_id is None:
                stamp = lmdb_open.read_meta(txn, self._dbs).stamp
                binding_id = stamp.binding_id if stamp else fmt.NO_BINDING
            self.binding_id = binding_id
            self.room_pages = self._budget.low - lmdb_open.live_pages(txn, self._dbs)
            # Places in the order are behind those that are taken.
            self._first_order = lmdb_open.read_counters(txn, self._dbs).order
        self.page_bytes = self._budget.page_bytes

    @classmethod
    def make(cls, directory: Path, capacity_bytes: int, uuid: str, binding: Binding | None) -> Self:
        """An empty store.

        Args:
            directory: absent, or without a data file.
            capacity_bytes: all of them are allocated.
            uuid: of the store.
            binding: what it is stamped with, and chunks are written under; None for none.

        Raises:
            DiskTooSmall: no room; says both numbers.
            ConfigError: the capacity is too small.
            StoreIOError: the disk failed.
        """
        capacity.PageBudget.of(capacity_bytes)
        lmdb_open.create(directory, capacity_bytes, uuid)
        lmdb_open.prepare(directory, capacity_bytes)
        env = lmdb_open.open_environment(directory, capacity_bytes, sync=False)
        try:
            copy = cls(directory, env, binding.binding_id if binding else fmt.NO_BINDING)
            if binding is not None:
                copy._stamp(binding)
        except BaseException:
            env.close()
            raise
        return copy

    @classmethod
    def into(cls, directory: Path, capacity_bytes: int) -> Self:
        """A store that is there already, and gets more; what is written is durable.

        What is added counts as used after all that it has.

        Args:
            directory: of a store in nobody's use, under the lock of its data dir.
            capacity_bytes: the store's.

        Raises:
            DiskTooSmall, StoreDamaged, StoreIOError: it cannot be opened for writing.
        """
        lmdb_open.prepare(directory, capacity_bytes)
        env = lmdb_open.open_environment(directory, capacity_bytes, sync=True)
        try:
            return cls(directory, env, None)
        except BaseException:
            env.close()
            raise

    def holds(self, key: ChunkKey) -> bool:
        """Whether a chunk is in it."""
        with mapping_errors("the store cannot be read"), self._env.begin() as txn:
            return txn.get(key, db=self._dbs.chunks) is not None

    def _stamp(self, binding: Binding) -> None:
        with mapping_errors("the new store cannot be stamped"):
            with self._env.begin(write=True) as txn:
                stamp = fmt.encode_meta(binding.to_json())
                txn.put(fmt.META_STAMP, stamp, db=self._dbs.meta)

    def refuses(self, record: ChunkRecord) -> bool:
        """Whether a chunk is too large for a store of this capacity, however empty."""
        return capacity.refusal(sizes_of(record), self._budget) is not None

    def add(self, record: ChunkRecord, contents: Mapping[Place, bytes | memoryview]) -> None:
        """One more chunk, with the order, hits and age of ``record``.

        Raises:
            StoreFull: there is no room for it.
            ObjectCorrupt: the contents are not what the record says.
            StoreIOError: the disk failed.
        """
        self._batch.append((record, contents))
        self._batch_bytes += record.objects.table.nbytes
        if self._batch_bytes >= BATCH_BYTES:
            self._write()

    def _write(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        with mapping_errors("the new store cannot be written"):
            with self._env.begin(write=True) as txn:
                changes = StoreTxn(txn, self._dbs, self.binding_id)
                for record, contents in batch:
                    self._put(changes, record, contents)
                changes.finish()
        for record, _ in batch:
            self.copied.add(record)

    def _put(
        self,
        changes: StoreTxn,
        record: ChunkRecord,
        contents: Mapping[Place, bytes | memoryview],
    ) -> None:
        pages = capacity.chunk_pages(sizes_of(record), self._budget.page_bytes)
        if changes.live_pages() + pages > self._budget.limit:
            raise StoreFull(
                f"the store in {self._directory} has no room for all chunks",
                hint="give it a larger capacity",
            )
        order = self._first_order + record.order
        changes.put(ChunkWrite(record.key, contents), order, like=record)
        made = changes.record(record.key)
        if made is None or made.objects != record.objects:
            raise ObjectCorrupt(
                f"chunk {record.key.hex()} is bad: its bytes are not what its record says",
                key=record.key.hex(),
            )
        changes.counters.order = max(changes.counters.order, order)

    def finish(self) -> None:
        """Write what is left, mark a clean end, make everything durable, and close.

        Durable: the store, its files and their names in its folder, on return.

        Raises:
            StoreFull, ObjectCorrupt, StoreIOError: as :meth:`add`.
        """
        if self._batch:
            self._write()
        with mapping_errors("the new store cannot be closed"):
            self._env.sync(True)
            with self._env.begin(write=True) as txn:
                clean = fmt.encode_meta({"clean": True})
                txn.put(fmt.META_SHUTDOWN, clean, db=self._dbs.meta)
            self._env.sync(True)
        self.close()
        with contextlib.suppress(FileNotFoundError):
            (self._directory / data_file.LOCK_NAME).unlink()
        data_file.sync_directory(self._directory)

    def close(self) -> None:
        """Give up, or end; again is allowed."""
        self._env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(slots=True)
class Plan:
    """Which chunks of a store another one of some capacity takes.

    Attributes:
        first_order: those used before this one are left out.
        kept: what is taken.
        stale: what is left out because it was stored under another binding.
        too_much: what is left out because there is no room for it.
    """

    first_order: int = 0
    kept: Tally = field(default_factory=Tally)
    stale: Tally = field(default_factory=Tally)
    too_much: Tally = field(default_factory=Tally)


def plan(store: OfflineStore, capacity_bytes: int) -> Plan:
    """What a store of this capacity takes of another one: the most recently used, to its low mark.

    Raises:
        ConfigError: there is no such capacity.
        StoreDamaged, StoreIOError: the store cannot be read.
    """
    found, budget = Plan(), capacity.PageBudget.of(capacity_bytes)
    pages = capacity.PageSum(budget.page_bytes)
    with contextlib.closing(store.records_by_use()) as records:
        for record in records:
            sizes = sizes_of(record)
            if record.binding_id != store.binding_id:
                found.stale.add(record)
            elif capacity.refusal(sizes, budget):
                found.too_much.add(record)
            elif found.first_order or pages.add(sizes) > budget.low:
                # Nor anything that was used before it, though some might fit.
                found.first_order = found.first_order or record.order + 1
                found.too_much.add(record)
            else:
                found.kept.add(record)
    return found


def copy_chunks(
    store: OfflineStore, planned: Plan, copy: StoreCopy, on_chunk: Callable[[ChunkRecord], None]
) -> Tally:
    """Fill a new store with what was planned; chunks that are proven bad are left out.

    Args:
        store: the source.
        planned: of that source.
        copy: the new store.
        on_chunk: told of each chunk that is taken.

    Returns:
        What was left out because it is bad.

    Raises:
        StoreError: reading or writing failed.
    """
    bad = Tally()
    with contextlib.closing(store.records_by_use()) as records:
        for record in records:
            if record.order < planned.first_order:
                break
            if record.binding_id != store.binding_id or copy.refuses(record):
                continue
            try:
                contents = read_chunk(store, record)
            except ObjectCorrupt:
                bad.add(record)
                continue
            copy.add(record, contents)
            on_chunk(record)
    return bad


def read_chunk(store: OfflineStore, record: ChunkRecord) -> dict[Place, memoryview]:
    """All objects of a chunk, every digest checked.

    Raises:
        ObjectCorrupt: one is proven bad.
        StoreIOError: reading failed.
    """
    contents = {}
    for place, nbytes in sizes_of(record).items():
        contents[place] = memoryview(bytearray(nbytes))
        if not store.read_into(record, place, contents[place]):
            raise StoreIOError(f"chunk {record.key.hex()} vanished while it was read")
    return contents


def sizes_of(record: ChunkRecord) -> dict[Place, int]:
    """Bytes of each object of a chunk."""
    return {place: record.objects.nbytes(place) for place in record.objects}
