"""Creating and opening the LMDB environment.

Order of creation: everything is made in a hidden folder beside the data file, LMDB opens
and closes it once (it takes a preallocated file for no database of its own), the file
gets all of its blocks, and only then its name. A crash leaves the whole store or none.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lmdb

from lmcache_persist.binding import Binding
from lmcache_persist.errors import FormatTooNew, PersistError, StoreDamaged
from lmcache_persist.store import data_file, meta_page, preallocation
from lmcache_persist.store import format as fmt
from lmcache_persist.store.data_file import DATA_NAME, DIR_MODE, FILE_MODE, LOCK_NAME
from lmcache_persist.store.lmdb_errors import mapping_errors

MAX_READERS = 254
"""Reading transactions at once; one per thread, so far more than there ever are."""

NEW_NAME = ".new"
"""A store that is being made, in the folder of the one it is to be; nobody trusts it."""
_NAMES = ("meta", "chunks", "extents", "order", "totals")
_ROOM_FOR_FOLDERS_BYTES = 1 << 20
_GROUP_DIR_BITS, _GROUP_FILE_BITS = 0o050, 0o040
"""What a server's ``--group`` may be given: to list and to read."""


@dataclass(frozen=True, slots=True)
class Databases:
    """Handles of the store's databases (see :mod:`.format`); ``main`` is LMDB's own."""

    main: Any
    meta: Any
    chunks: Any
    extents: Any
    order: Any
    totals: Any

    def all(self) -> tuple[Any, ...]:
        """All of them."""
        return (self.main, self.meta, self.chunks, self.extents, self.order, self.totals)


@dataclass(frozen=True, slots=True)
class StoreMeta:
    """What ``meta`` says of the store.

    Attributes:
        replaced: the binding a rebind stamped over.
        grown_over_bytes: the capacity setting that a growth of a live server overtook, or 0.
    """

    uuid: str
    format_version: int
    stamp: Binding | None
    clean_shutdown: bool
    replaced: str = ""
    grown_over_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "stamp": self.stamp.to_json() if self.stamp else None}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> StoreMeta:
        """The inverse of :meth:`to_json`."""
        stamp = Binding.from_json(value["stamp"]) if value["stamp"] else None
        return cls(**{**value, "stamp": stamp})


def create(directory: Path, capacity_bytes: int, uuid: str | None) -> None:
    """Make an empty store of ``capacity_bytes`` in a folder that has none.

    Durable: the store, on return.

    Raises:
        DiskTooSmall: no room; nothing is left behind.
        StoreIOError: likewise.
    """
    made_directory = not directory.exists()
    hidden = directory / NEW_NAME
    with mapping_errors(f"a store in {directory} cannot be made"):
        try:
            directory.mkdir(mode=DIR_MODE, exist_ok=True)
            directory.chmod(DIR_MODE)
            preallocation.check_room(directory, capacity_bytes + _ROOM_FOR_FOLDERS_BYTES)
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir(mode=DIR_MODE)
            _make(hidden, capacity_bytes, uuid or secrets.token_hex(16))
            os.rename(hidden / DATA_NAME, directory / DATA_NAME)
        except (PersistError, OSError, lmdb.Error):
            shutil.rmtree(directory if made_directory else hidden, ignore_errors=True)
            raise
        shutil.rmtree(hidden)
    data_file.sync_directory(directory)
    data_file.sync_directory(directory.parent)


def _make(hidden: Path, capacity_bytes: int, uuid: str) -> None:
    env = open_environment(hidden, capacity_bytes, sync=True)
    try:
        dbs = open_databases(env, create=True)
        with env.begin(write=True) as txn:
            store = {"format_version": fmt.FORMAT_VERSION, "uuid": uuid}
            txn.put(fmt.META_STORE, fmt.encode_meta(store), db=dbs.meta)
            txn.put(fmt.META_COUNTERS, fmt.Counters().encode(), db=dbs.meta)
            txn.put(fmt.META_PROBE, secrets.token_bytes(fmt.PROBE_BYTES), db=dbs.meta)
    finally:
        env.close()
    (hidden / DATA_NAME).chmod(FILE_MODE)
    preallocation.preallocate(hidden / DATA_NAME, capacity_bytes)


def prepare(directory: Path, capacity_bytes: int) -> None:
    """Make an existing store ready to be opened for writing by its one server.

    The caller holds the data dir's lock, so a ``lock.mdb`` is a leftover.

    Raises:
        ConfigError: the capacity is below the store's.
        DiskTooSmall: the file cannot be given all of its blocks, or cannot grow.
        StoreDamaged: the file must not be mapped.
        StoreIOError: as said.
    """
    path = directory / DATA_NAME
    with mapping_errors(f"the store in {directory} cannot be opened"):
        problem = meta_page.length_problem(path)
        if problem:
            raise StoreDamaged(problem)
        meta_page.check_capacity(path, capacity_bytes)
        shutil.rmtree(directory / NEW_NAME, ignore_errors=True)
        (directory / LOCK_NAME).unlink(missing_ok=True)
        # What a group was given to read stays: that is for its server to say.
        _narrow(directory, DIR_MODE, _GROUP_DIR_BITS)
        _narrow(path, FILE_MODE, _GROUP_FILE_BITS)
        missing = capacity_bytes - path.stat().st_size
        if missing > 0:
            preallocation.check_room(directory, missing)
        preallocation.preallocate(path, capacity_bytes)


def _narrow(path: Path, mode: int, group_bits: int) -> None:
    path.chmod(mode | (path.stat().st_mode & group_bits))


def open_environment(directory: Path, capacity_bytes: int, *, sync: bool) -> lmdb.Environment:
    """Open for reading and writing.

    Raises:
        StoreDamaged, StoreIOError: as :mod:`.lmdb_errors` maps.
    """
    with mapping_errors(f"the store in {directory} cannot be opened"):
        env = lmdb.open(
            str(directory),
            map_size=capacity_bytes,
            create=False,
            writemap=True,
            map_async=False,
            sync=sync,
            metasync=sync,
            mode=DIR_MODE,
            max_dbs=len(_NAMES),
            max_readers=MAX_READERS,
            lib_version=0,
        )
        try:
            # LMDB makes the lock file with the mode less the umask.
            (directory / LOCK_NAME).chmod(FILE_MODE)
        except OSError:
            env.close()
            raise
        return env


@contextmanager
def open_offline(directory: Path) -> Iterator[tuple[lmdb.Environment, Databases]]:
    """Open for reading without LMDB's lock file; nothing is created or changed.

    Only while nobody writes: the caller holds the data dir's lock, shared.

    Raises:
        FileNotFoundError: there is no data file.
        StoreDamaged: the file must not be mapped, or is none of ours.
        StoreIOError: as said.
    """
    path = directory / DATA_NAME
    problem = meta_page.length_problem(path)
    if problem:
        raise StoreDamaged(problem)
    with mapping_errors(f"the store in {directory} cannot be read"):
        env = lmdb.open(
            str(directory),
            map_size=meta_page.read_meta_page(path).map_bytes,
            create=False,
            readonly=True,
            lock=False,
            max_dbs=len(_NAMES),
        )
        try:
            yield env, open_databases(env, create=False)
        finally:
            env.close()


def open_databases(env: lmdb.Environment, *, create: bool) -> Databases:
    """Handles of all databases.

    Raises:
        StoreDamaged: one is absent.
    """
    try:
        handles = [env.open_db(name.encode(), create=create) for name in _NAMES]
    except lmdb.NotFoundError as error:
        raise StoreDamaged(f"the store in {env.path()} lacks a database") from error
    return Databases(env.open_db(None), *handles)


def read_meta(txn: Any, dbs: Databases) -> StoreMeta:
    """What ``meta`` says.

    Raises:
        FormatTooNew: a newer version wrote the store.
        StoreDamaged: something is absent or altered.
    """
    try:
        store = fmt.decode_meta(_required(txn, dbs, fmt.META_STORE))
        version = store["format_version"]
        if version > fmt.FORMAT_VERSION:
            raise FormatTooNew(
                f"the store has format {version}, expected at most {fmt.FORMAT_VERSION}",
                hint="start the version of lmcache-persist that wrote it",
                found=version,
                expected=fmt.FORMAT_VERSION,
            )
        stamp = txn.get(fmt.META_STAMP, db=dbs.meta)
        binding = Binding.from_json(fmt.decode_meta(stamp)) if stamp is not None else None
        clean = txn.get(fmt.META_SHUTDOWN, db=dbs.meta) is not None
        rebind = txn.get(fmt.META_REBIND, db=dbs.meta)
        replaced = str(fmt.decode_meta(rebind)["replaced"]) if rebind is not None else ""
        grown = txn.get(fmt.META_GROWN, db=dbs.meta)
        over = int(fmt.decode_meta(grown)["over_bytes"]) if grown is not None else 0
        return StoreMeta(store["uuid"], version, binding, clean, replaced, over)
    except (fmt.FormatError, KeyError, TypeError, ValueError) as error:
        raise StoreDamaged(f"the store's own description is damaged: {error}") from error


def read_counters(txn: Any, dbs: Databases) -> fmt.Counters:
    """The counters.

    Raises:
        StoreDamaged: absent or altered.
    """
    try:
        return fmt.Counters.decode(_required(txn, dbs, fmt.META_COUNTERS))
    except fmt.FormatError as error:
        raise StoreDamaged(f"the store's counters are damaged: {error}") from error


def _required(txn: Any, dbs: Databases, name: bytes) -> bytes:
    value = txn.get(name, db=dbs.meta)
    if value is None:
        raise fmt.FormatError(f"{name.decode()} is absent")
    return bytes(value)


def live_pages(txn: Any, dbs: Databases) -> int:
    """Pages in use, as LMDB counts them, without its free list."""
    pages = 2
    for handle in dbs.all():
        stat = txn.stat(handle)
        pages += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
    return pages
