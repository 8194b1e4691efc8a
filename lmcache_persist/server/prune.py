"""``prune``: take chunks away that an operator names. Here on the files of a data dir.

On a live server :mod:`.live_prune` does the same, message by message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from lmcache_persist.datadir import DataDir, DataDirLock, ReaderLock
from lmcache_persist.server import backup_file, crashes, recovery
from lmcache_persist.server.offline import refuse_if_resetting, used_data_dir
from lmcache_persist.server.recovery import Found, StoreState
from lmcache_persist.store.lmdb_disk import LmdbDisk
from lmcache_persist.store.offline import OfflineStore
from lmcache_persist.store.selection import Picked, Selection

Agree = Callable[[Iterator[Picked]], bool]
"""Given what would be removed, step by step and not looked at before: whether to go on.

Raises to leave everything as it is."""


def preview(data_dir: Path, selection: Selection) -> Iterator[Picked]:
    """What :func:`prune` would remove, step by step. Changes nothing.

    Raises:
        DataDirLocked: a server holds the data dir: ask that one.
        PersistError: the data dir cannot be read.
    """
    paths = used_data_dir(data_dir)
    with ReaderLock.acquire(data_dir):
        found = _look(paths)
        if found.store is StoreState.ABSENT:
            return
        with OfflineStore.open(paths.store) as store:
            yield from _preview(store, selection)


def _preview(store: OfflineStore, selection: Selection) -> Iterator[Picked]:
    counted_bytes, cursor = 0, b""
    while True:
        picked = store.preview(selection, cursor, counted_bytes)
        counted_bytes += picked.bytes
        yield picked
        if picked.cursor is None:
            return
        cursor = picked.cursor


def prune(
    data_dir: Path, selection: Selection, *, agree: Agree = lambda would: True
) -> Iterator[Picked]:
    """Remove chunks, step by step; each is durable when it is yielded.

    To be exhausted or closed; closed early, the store is whole and the rest is there.

    Args:
        data_dir: of a server that does not run.
        selection: what goes.
        agree: called once all checks have passed, before anything is changed, with the data
            dir locked: what it is shown is what goes.

    Threads: one, with no other in the process.

    Raises:
        ValueError: nothing limits the selection.
        DataDirLocked: a server holds the data dir: ask that one.
        StartupRefused, StoreDamaged: a start would not take the data dir as it is.
        PersistError: the disk failed.
    """
    if selection.is_everything:
        raise ValueError("a selection that means everything: that is what reset is for")
    paths = used_data_dir(data_dir)
    with DataDirLock.acquire(paths.root):
        backup_file.refuse_to_change(paths.root)
        found = _look(paths)
        if found.store is StoreState.ABSENT:
            return
        with OfflineStore.open(paths.store) as store:
            if not agree(_preview(store, selection)):
                return
        with contextlib.closing(LmdbDisk.open(paths.store, found.capacity_bytes)) as disk:
            cursor = b""
            while True:
                picked = disk.prune(selection, cursor)
                yield picked
                if picked.cursor is None:
                    return
                cursor = picked.cursor


def _look(paths: DataDir) -> Found:
    refuse_if_resetting(paths)
    found = recovery.look(paths, deep=crashes.crashed_last_time(paths))
    recovery.check_together(found, paths.root)
    recovery.refuse_if_damaged(found, paths)
    return found
