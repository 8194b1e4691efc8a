"""Checking a data dir that no server holds: ``verify`` on files.

Nothing is created or changed, and the data dir's lock is held, shared, all the while.
"Cannot be read" is never shown as "nothing there".
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lmcache_persist.datadir import DataDir, ReaderLock
from lmcache_persist.errors import (
    DataDirLocked,
    DataDirUnusable,
    ManifestBusy,
    ManifestUnreadable,
    PersistError,
    SchemaTooNew,
    StartupRefused,
    StoreDamaged,
    StoreIOError,
    StoreMismatch,
)
from lmcache_persist.geometry import Group, required_alignment
from lmcache_persist.identity import fingerprint
from lmcache_persist.manifest.catalog import ModelRow
from lmcache_persist.manifest.snapshot import ManifestSnapshot, read_snapshot
from lmcache_persist.printable import command
from lmcache_persist.server import recovery
from lmcache_persist.server.backup_file import is_backup, rebuild_hint
from lmcache_persist.store import offline as store_files
from lmcache_persist.store.base import Usage
from lmcache_persist.store.check import Progress, Violation
from lmcache_persist.store.data_file import DATA_NAME
from lmcache_persist.store.lmdb_open import StoreMeta

__all__ = [
    "Progress",
    "Violation",
    "check",
    "check_apart",
    "existing_data_dir",
    "refuse_if_resetting",
    "start_refusal",
    "used_data_dir",
]

Confirm = Callable[[Sequence[str]], None]
"""Shown what a verb is about to throw away; raises to leave everything as it is."""


_A_DATA_DIR = "give a server's data dir (its --data-dir)"


def existing_data_dir(
    data_dir: Path, *, what: str = "data dir", hint: str = _A_DATA_DIR
) -> DataDir:
    """The paths of a folder that is there.

    Args:
        data_dir: the folder.
        what: it is meant to be, for the error.
        hint: if it is not.

    Raises:
        DataDirUnusable: it is absent, no folder, or cannot be looked into.
    """
    _names(data_dir, what, hint)
    return DataDir(data_dir)


def used_data_dir(data_dir: Path) -> DataDir:
    """As :func:`existing_data_dir`, of a folder that a server has used.

    For verbs that take the lock: they make nothing in another folder.

    Raises:
        DataDirUnusable: as it does, or nothing in there is a server's.
    """
    names, paths = _names(data_dir, "data dir", _A_DATA_DIR), DataDir(data_dir)
    ours = (paths.manifest, paths.store, paths.lock, paths.resetting)
    if not any(name.startswith(path.name) for name in names for path in ours):
        raise DataDirUnusable(
            f"data dir {data_dir} has neither manifest nor store, expected a server's data dir",
            hint=_A_DATA_DIR,
        )
    return paths


def _names(folder: Path, what: str, hint: str) -> list[str]:
    try:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise DataDirUnusable(f"{what} {folder} is a file, expected a folder", hint=hint)
        return os.listdir(folder)
    except OSError as error:
        raise DataDirUnusable(
            f"{what} {folder} cannot be read: {error.strerror}",
            hint=f"{hint}, as a user that may read it",
        ) from error


def refuse_if_resetting(paths: DataDir) -> None:
    """For verbs that have nothing to look at then.

    Raises:
        DataDirUnusable: a reset was decided and is not finished.
    """
    if os.path.lexists(paths.resetting):
        raise DataDirUnusable(
            f"data dir {paths.root} is being reset or restored, and that was interrupted",
            hint=f"restore it again, or finish with: {command('reset', paths.root)}; a start"
            " does so, too, and is empty then",
        )


def start_refusal(data_dir: Path) -> StartupRefused | None:
    """What a start would refuse, whatever its flags; None if nothing, or if nobody can tell."""
    try:
        with ReaderLock.acquire(data_dir):
            recovery.check_together(recovery.look(DataDir(data_dir), deep=False), data_dir)
    except DataDirLocked:
        return None
    except StartupRefused as error:
        return error
    except PersistError:
        return None
    return None


def check_apart(source: Path, target: Path, what: str = "data dir") -> None:
    """Refuse to make something within what it is made of.

    Raises:
        DataDirUnusable: as said.
    """
    inside, outside = Path(os.path.realpath(target)), Path(os.path.realpath(source))
    if inside != outside and inside.is_relative_to(outside):
        raise DataDirUnusable(
            f"{target} lies in the {what} {source} itself, expected another place",
            hint="choose a folder outside of it, best on another disk",
        )


def read_manifest(paths: DataDir) -> ManifestSnapshot:
    """The manifest, from a private copy.

    Raises:
        DataDirUnusable: there is neither a manifest nor a store in use.
        StoreMismatch: there is a store in use only.
        ManifestUnreadable: the manifest makes no sense.
        SchemaTooNew, ManifestBusy, StoreIOError: as they say.
    """
    try:
        return read_snapshot(paths.manifest)
    except FileNotFoundError:
        pass
    except ManifestUnreadable as error:
        if is_backup(paths.root):
            error.hint = rebuild_hint(paths.root)
        raise
    recovery.check_together(recovery.look_at_store(paths, deep=False), paths.root)
    if has_data_file(paths.store):
        raise DataDirUnusable(
            f"data dir {paths.root} has no manifest, and a store that was never used",
            hint="nothing is lost: the next start makes what is missing",
        )
    raise DataDirUnusable(
        f"data dir {paths.root} has neither manifest nor store, expected a server's data dir",
        hint=_A_DATA_DIR,
    )


def has_data_file(directory: Path) -> bool:
    """Whether there is a store. Raises ``StoreIOError`` if that cannot be told."""
    try:
        os.stat(directory / DATA_NAME)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreIOError(f"the store in {directory} cannot be read: {error.strerror}") from error
    return True


def in_store(violation: Violation) -> Violation:
    """A violation of a store, as one of a data dir."""
    return replace(violation, where=f"store {violation.where}")


def expect(progress: Progress, usage: Usage | None) -> None:
    """Say how much there is to check, as far as the totals know."""
    if usage is not None:
        progress.total_objects = usage.objects + usage.stale_objects
        progress.total_bytes = usage.bytes + usage.stale_bytes


def usage_or_none(store: store_files.OfflineStore) -> Usage | None:
    """What is in a store, None if its totals are damaged, which a check says by itself."""
    try:
        return store.usage()
    except StoreDamaged:
        return None


def after_rebind(snapshot: ManifestSnapshot, meta: StoreMeta | None) -> ManifestSnapshot:
    """The manifest as the next start will have it, if a rebind was interrupted."""
    if snapshot.binding is None or meta is None:
        return snapshot
    return replace(snapshot, binding=snapshot.binding.after_rebind(meta.stamp, meta.replaced))


def check(
    data_dir: str | os.PathLike[str], *, progress: Progress | None = None
) -> Iterator[Violation]:
    """Everything that is wrong with a data dir: every digest, record, total, cross-reference.

    Never stops at the first. An iterator to be exhausted or closed: it holds the data
    dir's lock.

    Raises:
        DataDirLocked: a server holds the data dir.
        DataDirUnusable: it is no data dir, or cannot be read.
        SchemaTooNew, FormatTooNew: this version does not know what is right.
        ManifestBusy, StoreIOError: reading failed, which says nothing about the data.
    """
    root = Path(data_dir)
    paths = existing_data_dir(root)
    with ReaderLock.acquire(root):
        refuse_if_resetting(paths)
        snapshot: ManifestSnapshot | None = None
        try:
            snapshot = read_manifest(paths)
        except (SchemaTooNew, ManifestBusy):
            raise
        except (ManifestUnreadable, StoreMismatch) as error:
            yield Violation("manifest", error.message)
        if snapshot is not None:
            yield from check_manifest(snapshot)
        if has_data_file(paths.store):
            yield from _check_store(paths.store, snapshot, progress or Progress())
        elif snapshot is not None and snapshot.binding is not None:
            yield Violation(
                "store data file", f"it is absent, expected store {snapshot.binding.store_uuid}"
            )


def check_manifest(snapshot: ManifestSnapshot) -> Iterator[Violation]:
    """What is wrong with the manifest by itself."""
    for row in snapshot.models:
        yield from check_model(row)
        if snapshot.binding is None:
            yield Violation(
                f"manifest model {row.fingerprint}", "it was registered and nothing is bound"
            )


def check_model(row: ModelRow) -> Iterator[Violation]:
    """Whether a model is what its fingerprint says."""
    where = f"manifest model {row.fingerprint}"
    try:
        found = fingerprint(row.identity, row.groups, row.layouts)
        alignment = required_alignment([Group.from_json(group) for group in row.groups])
    except (PersistError, KeyError, ValueError, TypeError) as error:
        yield Violation(where, f"its identity or geometry makes no sense: {error}")
        return
    if found != row.fingerprint:
        yield Violation(where, f"its identity has the fingerprint {found}")
    if alignment != row.required_alignment:
        yield Violation(
            where, f"required alignment is {row.required_alignment}, expected {alignment}"
        )


def _check_store(
    directory: Path, snapshot: ManifestSnapshot | None, progress: Progress
) -> Iterator[Violation]:
    broken = store_files.looks_damaged(directory) or store_files.verify_pages(directory)
    if broken:
        yield Violation("store data file", broken)
        return
    try:
        with store_files.OfflineStore.open(directory) as store:
            usage = usage_or_none(store)
            if snapshot is not None:
                snapshot = after_rebind(snapshot, store.meta)
                yield from _check_cross_references(snapshot, store.meta, usage)
            expect(progress, usage)
            for violation in store.check(progress=progress):
                yield in_store(violation)
    except StoreDamaged as error:
        yield Violation("store", error.message)


def _check_cross_references(
    snapshot: ManifestSnapshot, meta: StoreMeta, usage: Usage | None
) -> Iterator[Violation]:
    stamp, binding = meta.stamp, snapshot.binding
    if binding is None:
        if stamp is not None:
            yield Violation(
                "store stamp", f"it is bound to {stamp.chunk_size} and the manifest is unbound"
            )
    elif meta.uuid != binding.store_uuid:
        yield Violation(
            "store uuid", f"found {meta.uuid}, the manifest expects {binding.store_uuid}"
        )
    elif stamp is not None and stamp != binding:
        yield Violation(
            "store stamp",
            f"found binding {stamp.binding_id} (chunk size {stamp.chunk_size}), the manifest"
            f" expects {binding.binding_id} (chunk size {binding.chunk_size})",
        )
    if usage is not None:
        yield from _check_usage(snapshot, usage, stamped=stamp is not None)


def _check_usage(snapshot: ManifestSnapshot, usage: Usage, *, stamped: bool) -> Iterator[Violation]:
    if usage.objects and not (stamped and snapshot.binding):
        yield Violation("store totals", f"{usage.objects} objects are there and nothing is bound")
        return
    for name, reason in misfits(snapshot).items():
        if name in usage.by_fingerprint:
            yield Violation("store totals", f"model {name} has objects, and {reason}")


def misfits(snapshot: ManifestSnapshot) -> dict[str, str]:
    """Models that cannot have objects under the binding, and why, by fingerprint.

    A model without a row is none: an older copy of the manifest may serve, and a full disk
    keeps a row from being written until there is room.
    """
    if snapshot.binding is None:
        return {}
    chunk_size = snapshot.binding.chunk_size
    return {
        row.fingerprint: f"its alignment {row.required_alignment} does not divide the chunk size"
        f" {chunk_size}"
        for row in snapshot.models
        if chunk_size % row.required_alignment
    }
