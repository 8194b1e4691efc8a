"""``recover``: a lost manifest made anew from the stamp in the store. Offline.

Order of writes: what cannot be read is moved away -> a new, empty manifest -> its binding,
in the one transaction of any bind. A crash in between leaves a manifest that is absent or
unbound beside a bound store: every start refuses that, and ``recover`` goes on from there.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from lmcache_persist import failpoints
from lmcache_persist.binding import Binding
from lmcache_persist.datadir import DataDir, DataDirLock
from lmcache_persist.errors import ManifestUnreadable, StoreMismatch
from lmcache_persist.manifest import Manifest, ManifestSnapshot, files
from lmcache_persist.printable import command
from lmcache_persist.server import backup_file, crashes, recovery
from lmcache_persist.server.losses import amount_of, losses_of
from lmcache_persist.server.offline import Confirm, refuse_if_resetting, used_data_dir
from lmcache_persist.server.rebind import complete
from lmcache_persist.server.recovery import Found, StoreState
from lmcache_persist.server.room import Say, say_and_check_manifest_room
from lmcache_persist.store.offline import OfflineStore
from lmcache_persist.units import moment


def recover(
    data_dir: Path,
    confirm: Confirm = lambda losses: None,
    *,
    say: Say = lambda text: None,
) -> list[str]:
    """Make a manifest that is absent, unreadable or unbound anew; a good one is left alone.

    Args:
        data_dir: of a server that does not run.
        confirm: called before a manifest is moved aside, with what is not in the new one.
        say: told the room that is needed, before anything is changed.

    Returns:
        What was done, in sentences.

    Durable: on return. Threads: one, with no other in the process.

    Raises:
        DataDirLocked: a server holds the data dir.
        DiskTooSmall: there is no room for the manifest; both numbers are named.
        StoreMismatch: a good manifest and the store disagree, or the store has no stamp;
            nothing was changed.
        SchemaTooNew, FormatTooNew, ManifestBusy: as they say; nothing was changed.
        PersistError: the disk failed; recover again.
    """
    paths = used_data_dir(data_dir)
    with DataDirLock.acquire(paths.root):
        backup_file.refuse_to_change(paths.root)
        refuse_if_resetting(paths)
        found, damage = _look(paths)
        if damage is None and found.binding is not None:
            return _of_good(found, found.binding, paths, say)
        stamp = _stamp_of(found, paths, damage)
        say_and_check_manifest_room(say, paths.root)
        done = []
        if damage is not None:
            confirm(_losses(paths, found, damage))
            moved = files.set_aside(paths.manifest)
            failpoints.hit("recover.after_set_aside")
            done.append(f"the manifest could not be read ({damage}) and is now {moved}")
        with contextlib.closing(Manifest.open(paths.manifest)) as manifest:
            manifest.bind(stamp)
        done.append(
            f"the manifest is made anew from the stamp of store {found.uuid}: chunk size"
            f" {stamp.chunk_size}, binding {stamp.binding_id[:12]}, bound at"
            f" {moment(stamp.bound_at)}; it knows the models again once their engines have"
            " registered"
        )
    return done


def _losses(paths: DataDir, found: Found, damage: str) -> list[str]:
    lines = [
        damage,
        (
            f"it is moved to {paths.manifest.name}{files.UNREADABLE_SUFFIX}, and a new one is made"
            " of the store's stamp"
        ),
        (
            "this throws away what it knew beside the binding: names of models, until their"
            " engines register, refusals, starts"
        ),
    ]
    if found.store is StoreState.PRESENT:
        with OfflineStore.open(paths.store) as store:
            usage = store.usage()
        lines.append(f"nothing that is stored is lost: {amount_of(losses_of(usage))}")
    return lines


def _look(paths: DataDir) -> tuple[Found, str | None]:
    """What is there, and why the manifest cannot be read."""
    deep = crashes.crashed_last_time(paths)
    try:
        return recovery.look(paths, deep=deep), None
    except ManifestUnreadable as error:
        return recovery.look_at_store(paths, deep=deep), error.message


def _of_good(found: Found, binding: Binding, paths: DataDir, say: Say) -> list[str]:
    recovery.check_together(found, paths.root)
    if complete(paths, found, say):
        return [f"the interrupted rebind to chunk size {binding.chunk_size} is complete"]
    return [f"nothing to do: the manifest is bound to chunk size {binding.chunk_size}"]


def _stamp_of(found: Found, paths: DataDir, damage: str | None) -> Binding:
    """The stamp to rebuild from.

    Raises:
        StoreMismatch: there is none that can be used.
    """
    hint = f"start afresh with: {command('reset', paths.root)}"
    if found.store is StoreState.ABSENT and damage is None:
        raise StoreMismatch(
            f"data dir {paths.root} is unbound and has no store: there is nothing to recover",
            hint=f"start it with: {command('serve', '--data-dir', paths.root)}",
        )
    if found.stamp is None:
        what = {
            StoreState.ABSENT: "it is absent",
            StoreState.DAMAGED: f"it is damaged ({found.damage})",
            StoreState.PRESENT: "it was never bound",
        }[found.store]
        raise StoreMismatch(
            f"the store in {paths.store} has no stamp to recover from: {what}", hint=hint
        )
    # As if the manifest had it: the same questions as at a start.
    assumed = ManifestSnapshot(0, found.stamp, [], [], [])
    recovery.check_together(replace(found, snapshot=assumed), paths.root)
    return found.stamp
