"""Opening a store as a start decided: the first thing of a start that changes a store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from lmcache_persist.config import Settings
from lmcache_persist.datadir import DataDir
from lmcache_persist.errors import DiskTooSmall, PersistError, StoreDamaged, StoreFull
from lmcache_persist.manifest import Manifest
from lmcache_persist.printable import command
from lmcache_persist.server.recovery import Decision, no_room_hint
from lmcache_persist.store import aside, lmdb_disk
from lmcache_persist.store.offline import repairing, structure_problem, verify_pages

log = logging.getLogger(__name__)


def carry_out(
    decision: Decision, paths: DataDir, settings: Settings, manifest: Manifest
) -> lmdb_disk.LmdbDisk:
    """Open the store as decided; the first thing that changes anything.

    Raises:
        PersistError: no room, or the disk failed.
    """
    for note in decision.notes:
        log.warning("%s", note)
    if decision.replaces and decision.binding is not None:
        manifest.rebind(decision.replaces, decision.binding)
    if decision.set_aside:
        _set_aside(paths)
    try:
        if decision.mend:
            _mend(paths, decision.mend)
        disk = _open(decision, paths, settings)
    except StoreDamaged as error:
        if decision.binding is None:
            error.hint = f"start afresh with: {command('reset', settings.data_dir)}"
            raise
        # What a start looks at was well, and what opening for writing needs was not.
        log.warning(
            "the store is damaged (%s) and set aside; starting empty under binding %s",
            error.message,
            decision.binding.binding_id[:12],
        )
        _set_aside(paths)
        decision = replace(decision, store_uuid=decision.binding.store_uuid, complete_stamp=True)
        disk = _open(decision, paths, settings)
    return _or_close(disk, lambda: _complete(disk, decision))


def _mend(paths: DataDir, why: str) -> None:
    """Put right what only counts or orders, so that the chunks are kept.

    Raises:
        StoreDamaged: that cannot be done.
    """
    log.warning("the store does not add up (%s); mending it, which takes a while", why)
    if problem := verify_pages(paths.store):
        raise StoreDamaged(problem)
    try:
        with repairing(paths.store, digests=False) as work:
            mended = [one for one in work.run() if one.done]
    except StoreFull as error:
        raise StoreDamaged(f"{why}; it cannot be mended: {error.message}") from error
    if problem := structure_problem(paths.store):
        raise StoreDamaged(f"{problem}; a repair did not help")
    dropped = len({one.dropped for one in mended if one.dropped})
    log.warning(
        "the store is mended: %d things put right, %d chunks dropped; to check every digest,"
        " too: %s",
        len(mended),
        dropped,
        command("verify", paths.root),
    )


def _set_aside(paths: DataDir) -> None:
    if aside.has_set_aside(paths.store):
        log.warning(
            "one store at most is kept aside: %s of an earlier start is removed for this one",
            aside.aside_of(paths.store),
        )
    log.warning(
        "the damaged store is now %s; to take back what can still be read in it, stop the server"
        " and run: %s",
        aside.set_aside(paths.store),
        command("recover", paths.root, "--set-aside"),
    )


def _open(decision: Decision, paths: DataDir, settings: Settings) -> lmdb_disk.LmdbDisk:
    def attempt() -> lmdb_disk.LmdbDisk:
        return lmdb_disk.LmdbDisk.open(
            paths.store,
            settings.capacity_bytes,
            uuid=decision.store_uuid,
            relaxed=settings.durability == "relaxed",
        )

    try:
        return attempt()
    except DiskTooSmall as error:
        back = aside.allocated_bytes(aside.aside_of(paths.store))
        if not back or error.fields["available"] + back < error.fields["needed"]:
            error.hint = no_room_hint(settings)
            raise  # nothing is thrown away for a start that is refused all the same
        gone = aside.discard_set_aside(paths.store)
        log.warning("there is no room for the store beside the damaged one; removed %s", gone)
        return attempt()


def _complete(disk: lmdb_disk.LmdbDisk, decision: Decision) -> None:
    if decision.complete_stamp and decision.binding is not None:
        disk.write_stamp(decision.binding)
    disk.finish_rebind()


def _or_close(disk: lmdb_disk.LmdbDisk, action: Callable[[], None]) -> lmdb_disk.LmdbDisk:
    try:
        action()
    except (PersistError, OSError):
        disk.close()
        raise
    return disk
