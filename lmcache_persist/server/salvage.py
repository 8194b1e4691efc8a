"""``recover --set-aside``: what is good in a store that was set aside, taken back. Offline.

Order of writes: the store aside is put in order -> chunks are copied, many in one
transaction -> the present store is closed cleanly -> the store aside is removed, unless it
still has chunks for which there is no room. Killed, it can be done again: what was copied
is there already.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmcache_persist import failpoints
from lmcache_persist.config import DEFAULT_CAPACITY_BYTES
from lmcache_persist.datadir import DataDir, DataDirLock
from lmcache_persist.errors import StoreDamaged, StoreMismatch, Unbound
from lmcache_persist.printable import command
from lmcache_persist.server import backup_file, crashes, recovery
from lmcache_persist.server.offline import refuse_if_resetting, used_data_dir
from lmcache_persist.server.recovery import Found, StoreState
from lmcache_persist.store import copying, data_file
from lmcache_persist.store.aside import aside_of, discard_set_aside
from lmcache_persist.store.base import ChunkRecord
from lmcache_persist.store.offline import OfflineStore
from lmcache_persist.store.salvage import Salvaged, make_readable
from lmcache_persist.store.salvage import salvage as take_back


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was done.

    Attributes:
        salvaged: chunks, by what became of them.
        aside: where the store was set aside.
        removed: whether it is gone now.
    """

    salvaged: Salvaged
    aside: Path
    removed: bool


def salvage(
    data_dir: Path, *, on_chunk: Callable[[ChunkRecord], None] = lambda record: None
) -> Outcome | None:
    """Copy what is good in ``store.damaged`` into the store, up to the point where it evicts.

    Args:
        data_dir: of a server that does not run.
        on_chunk: told of each chunk that is taken.

    Returns:
        None if nothing is set aside.

    Durable: on return. Threads: one, with no other in the process.

    Raises:
        DataDirLocked: a server holds the data dir.
        StartupRefused: a start would not take the data dir as it is; nothing was changed.
        StoreDamaged: nothing can be had from it, or the present store is damaged, too.
        StoreMismatch: another store is set aside there.
        Unbound: there is no store to copy into.
        PersistError: the disk failed; do it again.
    """
    paths = used_data_dir(data_dir)
    with DataDirLock.acquire(paths.root):
        backup_file.refuse_to_change(paths.root)
        refuse_if_resetting(paths)
        found = recovery.look(paths, deep=crashes.crashed_last_time(paths))
        recovery.check_together(found, data_dir)
        recovery.refuse_if_damaged(found, paths)
        aside = aside_of(paths.store)
        if not data_file.exists(aside):
            return None
        if found.binding is None or found.store is StoreState.ABSENT:
            raise Unbound(
                f"data dir {data_dir} has no store to take anything into, expected one",
                hint=f"one is made by: {command('verify', data_dir, '--repair')}",
            )
        dropped = _make_readable(aside, max(DEFAULT_CAPACITY_BYTES, found.capacity_bytes))
        salvaged = _copy(paths, found, aside, on_chunk)
        salvaged.dropped = dropped
        failpoints.hit("salvage.before_removal")
        removed = not salvaged.no_room.total.chunks
        if removed:
            discard_set_aside(paths.store)
    return Outcome(salvaged, aside, removed)


def _make_readable(aside: Path, at_most: int) -> int:
    try:
        return make_readable(aside, at_most=at_most)
    except StoreDamaged as error:
        raise StoreDamaged(
            f"nothing can be had from {aside}: {error.message}",
            hint=f"to have its space back: {shlex.join(['rm', '-r', str(aside)])}",
        ) from error


def _copy(
    paths: DataDir, found: Found, aside: Path, on_chunk: Callable[[ChunkRecord], None]
) -> Salvaged:
    with OfflineStore.open(aside) as source:
        if source.meta.uuid != found.uuid:
            raise StoreMismatch(
                f"the store in {aside} has uuid {source.meta.uuid}, expected {found.uuid}",
                hint="its chunks are of another binding and can never be found here: remove it",
            )
        with copying.StoreCopy.into(paths.store, found.capacity_bytes) as copy:
            salvaged = take_back(source, copy, on_chunk)
            copy.finish()
    return salvaged
