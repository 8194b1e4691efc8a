"""Looking at a store that no server holds; nothing is created or changed.

The caller holds the data dir's lock, shared: beside a writer these are not safe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import lmdb.verify

from lmcache_persist.binding import Binding
from lmcache_persist.errors import StoreDamaged, StoreIOError
from lmcache_persist.store import data_file, lmdb_open, meta_page, unsynced
from lmcache_persist.store import format as fmt
from lmcache_persist.store.aside import set_aside
from lmcache_persist.store.base import ChunkKey, ChunkRecord
from lmcache_persist.store.capacity import PageBudget
from lmcache_persist.store.check import Progress, Violation, check_store
from lmcache_persist.store.lmdb_open import Databases, StoreMeta
from lmcache_persist.store.lmdb_reader import StoreReader
from lmcache_persist.store.lmdb_reads import StoreReads
from lmcache_persist.store.lmdb_select import record_of
from lmcache_persist.store.lmdb_usage import usage_of
from lmcache_persist.store.meta_page import capacity_told
from lmcache_persist.store.repair import Repair
from lmcache_persist.store.tally import entries

__all__ = [
    "OfflineStore",
    "StorePeek",
    "Violation",
    "capacity_told",
    "check",
    "looks_damaged",
    "peek",
    "repairing",
    "set_aside",
    "structure_problem",
    "verify_pages",
]


@dataclass(frozen=True, slots=True)
class StorePeek:
    """What a start wants to know of a store before it opens it for writing.

    Attributes:
        uuid: 32 hex digits.
        format_version: of what is on disk.
        stamp: the binding it is stamped with.
        has_objects: whether any chunk is stored.
        clean_shutdown: whether its last server closed it.
        capacity_bytes: what it was made for, or grown to.
        size_bytes: length of the data file.
        replaced: id of the binding that a rebind stamped over, until the manifest followed.
        unsound: what must be mended before anything can be written: counters, totals.
        grown_over_bytes: the capacity setting that a growth of a live server overtook, or 0.
    """

    uuid: str
    format_version: int
    stamp: Binding | None
    has_objects: bool
    clean_shutdown: bool
    capacity_bytes: int
    size_bytes: int
    replaced: str = ""
    unsound: str = ""
    grown_over_bytes: int = 0


def peek(directory: Path) -> StorePeek | None:
    """What is in a folder that may hold a store; None if it holds no data file.

    Raises:
        FormatTooNew: a newer version wrote it.
        StoreDamaged: it must not be mapped, or is none of ours.
        StoreIOError: it cannot be read.
    """
    path = directory / data_file.DATA_NAME
    if not path.exists():
        return None
    with lmdb_open.open_offline(directory) as (env, dbs), env.begin(buffers=True) as txn:
        meta = lmdb_open.read_meta(txn, dbs)
        return StorePeek(
            uuid=meta.uuid,
            format_version=meta.format_version,
            stamp=meta.stamp,
            has_objects=txn.stat(dbs.chunks)["entries"] > 0,
            clean_shutdown=meta.clean_shutdown,
            capacity_bytes=env.info()["map_size"],
            size_bytes=path.stat().st_size,
            replaced=meta.replaced,
            unsound=_unsound(txn, dbs, env.info()["map_size"]),
            grown_over_bytes=meta.grown_over_bytes,
        )


def _unsound(txn: Any, dbs: Databases, map_bytes: int) -> str:
    try:
        usage_of(txn, dbs, fmt.NO_BINDING, PageBudget.of(map_bytes))
    except StoreDamaged as error:
        return error.message
    return ""


def looks_damaged(directory: Path) -> str | None:
    """Why a store must not be mapped as it is; None if a quick look finds nothing.

    Length and meta pages are looked at, with plain reads. A store that was not synced
    when the machine went down has all of its pages verified.

    Raises:
        FileNotFoundError: there is no data file.
        StoreIOError: it cannot be read.
    """
    problem = meta_page.length_problem(directory / data_file.DATA_NAME)
    if problem is None and unsynced.lost_power_unsynced(directory):
        return verify_pages(directory)
    return problem


def verify_pages(directory: Path) -> str | None:
    """Walk all tree pages without mapping them: the first problem, or None.

    Takes about 2 s per million records. Source: measured with lmdb 3.0.0.

    Raises:
        FileNotFoundError: there is no data file.
        StoreIOError: it cannot be read.
    """
    try:
        problems = lmdb.verify.verify(str(directory))  # type: ignore[no-untyped-call]
    except FileNotFoundError:
        raise
    except lmdb.verify.VerifyError as error:
        return str(error)
    except OSError as error:
        raise StoreIOError(f"the store in {directory} cannot be read: {error}") from error
    return str(problems[0]) if problems else None


def structure_problem(directory: Path) -> str | None:
    """The first thing by which the store's databases disagree; None if nothing does.

    Only after :func:`verify_pages`: the store is mapped. No digest is looked at, a bad
    extent costs its chunk and no more.

    Raises:
        FileNotFoundError: there is no data file.
        StoreDamaged, StoreIOError: it cannot be read.
    """
    with OfflineStore.open(directory) as store:
        with contextlib.closing(store.check(digests=False)) as violations:
            first = next(violations, None)
    return None if first is None else str(first)


class OfflineStore(StoreReads):
    """A read-only view of a store; made by :meth:`open`.

    Attributes:
        meta: uuid, format version, stamp, clean shutdown.
        capacity_bytes: what it was made for.
    """

    def __init__(self, directory: Path, env: lmdb.Environment, dbs: Databases) -> None:
        self._dbs = dbs
        self._reader = StoreReader(directory, env, dbs)
        self.meta: StoreMeta = self._reader.meta
        self.capacity_bytes: int = env.info()["map_size"]

    @classmethod
    @contextmanager
    def open(cls, directory: Path) -> Iterator[OfflineStore]:
        """Open, and close at the end of the block.

        Raises:
            FileNotFoundError: there is no data file.
            FormatTooNew: a newer version wrote it.
            StoreDamaged: it must not be mapped, or is none of ours.
            StoreIOError: it cannot be read.
        """
        with lmdb_open.open_offline(directory) as (env, dbs):
            store = cls(directory, env, dbs)
            try:
                yield store
            finally:
                store._reader.close(0.0)

    def records(self) -> Iterator[ChunkRecord]:
        """Every good record, stale ones too, in the order of keys. To be exhausted or closed."""
        with self._reader.transaction() as txn:
            for key, value in txn.cursor(db=self._dbs.chunks):
                try:
                    record = fmt.decode_record(bytes(value))
                except fmt.FormatError:
                    continue
                if record.key == bytes(key):
                    yield record

    def records_by_use(self) -> Generator[ChunkRecord, None, None]:
        """Every good record, stale ones too, the most recently used first.

        To be exhausted or closed.
        """
        with self._reader.transaction() as txn:
            cursor = txn.cursor(db=self._dbs.order)
            more = cursor.last()
            while more:
                record = record_of(txn, self._dbs, ChunkKey(bytes(cursor.value())))
                if record is not None and fmt.order_key(record.order) == bytes(cursor.key()):
                    yield record
                more = cursor.prev()

    @property
    def binding_id(self) -> str:
        """Chunks of another binding are stale."""
        return self._reader.binding_id

    def num_chunks(self) -> int:
        """Entries of the database of records, good or bad."""
        with self._reader.transaction() as txn:
            return entries(txn, self._dbs.chunks)

    def check(
        self, *, digests: bool = True, progress: Progress | None = None
    ) -> Generator[Violation, None, None]:
        """Everything that is wrong. To be exhausted or closed.

        Args:
            digests: read every extent, too.
            progress: told of every chunk that was looked at.
        """
        read = self._reader.read_extent if digests else None
        with self._reader.transaction() as txn:
            yield from check_store(txn, self._dbs, read, progress)


@contextmanager
def repairing(
    directory: Path,
    *,
    unwanted: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    digests: bool = True,
) -> Iterator[Repair]:
    """A repair of the store in ``directory``, to be run in the block.

    The caller holds the data dir's lock, exclusively, and has walked the tree pages.

    Raises:
        FileNotFoundError: there is no data file.
        StoreDamaged: it must not be mapped, or is none of ours.
        StoreIOError: as said.
    """
    capacity_bytes = meta_page.read_meta_page(directory / data_file.DATA_NAME).map_bytes
    lmdb_open.prepare(directory, capacity_bytes)
    env = lmdb_open.open_environment(directory, capacity_bytes, sync=True)
    try:
        reader = StoreReader(directory, env, dbs := lmdb_open.open_databases(env, create=False))
        try:
            yield Repair(
                env,
                dbs,
                reader.budget,
                read=reader.read_extent if digests else None,
                unwanted=unwanted,
                progress=progress,
            )
        finally:
            reader.close(0.0)
    finally:
        env.close()
        (directory / data_file.LOCK_NAME).unlink(missing_ok=True)


def check(directory: Path, *, digests: bool = True) -> Iterator[Violation]:
    """Everything that is wrong with the store in ``directory``, tree pages included.

    Never stops at the first; stops where going on would need what is broken.

    Raises:
        FileNotFoundError: there is no data file.
        FormatTooNew: a newer version wrote it.
        StoreIOError: it cannot be read.
    """
    problem = meta_page.length_problem(directory / data_file.DATA_NAME) or verify_pages(directory)
    if problem:
        yield Violation("data file", problem)
        return
    with OfflineStore.open(directory) as store:
        yield from store.check(digests=digests)
