"""``resize``: another capacity for a data dir. Offline.

Growing: the data file gets all of its new blocks, durable -> the store is opened with the
new capacity, which notes it. Shrinking: what fits is copied into a smaller store under a
hidden name, durable -> that takes the data file's name, which decides. A crash before the
decisive step leaves the old store, and what was made beside it goes with the next start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmcache_persist import failpoints
from lmcache_persist.datadir import DataDir, DataDirLock
from lmcache_persist.errors import StoreIOError, Unbound
from lmcache_persist.manifest import Manifest
from lmcache_persist.printable import command
from lmcache_persist.server import backup_file, crashes, recovery
from lmcache_persist.server.losses import Loss, amount_of, objects_amount, per_model
from lmcache_persist.server.offline import Confirm, refuse_if_resetting, used_data_dir
from lmcache_persist.server.recovery import Found, StoreState
from lmcache_persist.server.room import Say, say_and_check_room
from lmcache_persist.store import copying, data_file, lmdb_open, preallocation, unsynced
from lmcache_persist.store.base import ChunkRecord
from lmcache_persist.store.capacity import PageBudget
from lmcache_persist.store.lmdb_disk import LmdbDisk
from lmcache_persist.store.offline import OfflineStore
from lmcache_persist.units import approximate_size

OnChunk = Callable[[ChunkRecord], None]


@dataclass(frozen=True, slots=True)
class Resized:
    """What a resize did.

    Attributes:
        before: capacity in bytes.
        after: likewise.
        kept_objects: in the store now.
        dropped_objects: that had no room, were stale, or proved bad.
        dropped_bytes: theirs.
    """

    before: int
    after: int
    kept_objects: int
    dropped_objects: int
    dropped_bytes: int


def resize(
    data_dir: Path,
    capacity_bytes: int,
    confirm: Confirm,
    *,
    say: Say = lambda text: None,
    on_chunk: OnChunk = lambda record: None,
) -> Resized:
    """Give the store of a data dir another capacity.

    Args:
        data_dir: of a server that does not run.
        capacity_bytes: a multiple of 4096.
        confirm: called with what will be thrown away, if anything is.
        say: told the room that is needed, before anything is changed.
        on_chunk: told of each chunk that shrinking copies.

    Durable: on return. Threads: one, with no other in the process.

    Raises:
        ConfigError: there is no such capacity.
        DataDirLocked: a server holds the data dir.
        DiskTooSmall: the disk has too little room; both numbers are named.
        StartupRefused: a start would not take the data dir as it is; nothing was changed.
        Unbound: there is no store yet.
        PersistError: the disk failed; the old capacity holds, or the new one.
    """
    PageBudget.of(capacity_bytes)
    paths = used_data_dir(data_dir)
    with DataDirLock.acquire(paths.root):
        backup_file.refuse_to_change(paths.root)
        refuse_if_resetting(paths)
        found = recovery.look(paths, deep=crashes.crashed_last_time(paths))
        recovery.check_together(found, data_dir)
        recovery.refuse_if_damaged(found, paths)
        if found.store is StoreState.ABSENT:
            raise Unbound(
                f"data dir {data_dir} has no store, expected one",
                hint="one is made by: "
                + command("serve", "--data-dir", data_dir, "--capacity", capacity_bytes),
            )
        if capacity_bytes > found.capacity_bytes:
            return _grow(paths, found, capacity_bytes, say)
        if capacity_bytes == found.capacity_bytes:
            return _unchanged(paths, found)
        return _shrink(paths, found, capacity_bytes, confirm, say, on_chunk)


def _unchanged(paths: DataDir, found: Found) -> Resized:
    with OfflineStore.open(paths.store) as store:
        objects = store.usage().objects
    return Resized(found.capacity_bytes, found.capacity_bytes, objects, 0, 0)


def _grow(paths: DataDir, found: Found, capacity_bytes: int, say: Say) -> Resized:
    path = paths.store / data_file.DATA_NAME
    missing = max(0, capacity_bytes - path.stat().st_size)
    say_and_check_room(say, paths.store, missing)
    preallocation.preallocate(path, capacity_bytes)
    failpoints.hit("resize.after_preallocate")
    disk = LmdbDisk.open(paths.store, capacity_bytes)
    try:
        objects = disk.usage().objects
    finally:
        disk.close()
    return Resized(found.capacity_bytes, capacity_bytes, objects, 0, 0)


def _shrink(
    paths: DataDir,
    found: Found,
    capacity_bytes: int,
    confirm: Confirm,
    say: Say,
    on_chunk: OnChunk,
) -> Resized:
    hidden = paths.store / lmdb_open.NEW_NAME
    with OfflineStore.open(paths.store) as store:
        planned = copying.plan(store, capacity_bytes)
        losses = _losses(planned, capacity_bytes, found.names)
        _remove(hidden)
        more = "; the old file's room is given back at the end"
        say_and_check_room(say, paths.store, capacity_bytes, more)
        if losses:
            confirm(losses)
        _finish_rebind(paths, found)
        try:
            with copying.StoreCopy.make(hidden, capacity_bytes, found.uuid, found.binding) as copy:
                bad = copying.copy_chunks(store, planned, copy, on_chunk)
                copy.finish()
        except BaseException:
            _remove(hidden)
            raise
    failpoints.hit("resize.before_rename")
    try:
        os.rename(hidden / data_file.DATA_NAME, paths.store / data_file.DATA_NAME)
    except OSError as error:
        raise StoreIOError(f"the new store cannot take its place: {error.strerror}") from error
    data_file.sync_directory(paths.store)
    failpoints.hit("resize.after_rename")
    unsynced.clear_unsynced(paths.store)  # what the note was about is not there any more
    _remove(hidden)
    dropped = [planned.stale.total, planned.too_much.total, bad.total]
    return Resized(
        found.capacity_bytes,
        capacity_bytes,
        copy.copied.total.objects,
        sum(one.objects for one in dropped),
        sum(one.nbytes for one in dropped),
    )


def _finish_rebind(paths: DataDir, found: Found) -> None:
    """A copy has no note of what its stamp replaced, so the manifest has to follow before."""
    if found.held is None or found.binding is None or found.held == found.binding:
        return
    with contextlib.closing(Manifest.open(paths.manifest)) as manifest:
        manifest.rebind(found.held.binding_id, found.binding)


def _losses(planned: copying.Plan, capacity_bytes: int, names: dict[str, str]) -> list[str]:
    lines = []
    lost = [
        Loss(name, row.chunks, row.objects, row.nbytes)
        for name, row in planned.too_much.by_model.items()
    ]
    stale = planned.stale.total
    if lost:
        lines.append(
            f"this throws away {amount_of(lost)}, the least recently used, for which"
            f" {approximate_size(capacity_bytes)} have no room:"
        )
        lines += per_model(lost, names)
    if stale.chunks:
        lines.append(
            f"this throws away {objects_amount(stale.objects, stale.nbytes)} that are stale, which"
            " nobody finds"
        )
    return lines


def _remove(hidden: Path) -> None:
    shutil.rmtree(hidden, ignore_errors=True)
