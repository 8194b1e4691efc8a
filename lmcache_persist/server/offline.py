"""Looking at a data dir that no server holds: ``inspect`` and ``verify`` on files.

Nothing is created or changed, and the data dir's lock is held, shared, all the while.
"Cannot be read" is never shown as "nothing there".
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lmcache_persist.datadir import DataDir, ReaderLock
from lmcache_persist.errors import (
    DataDirUnusable,
    ManifestBusy,
    ManifestUnreadable,
    PersistError,
    SchemaTooNew,
    StoreDamaged,
    StoreIOError,
)
from lmcache_persist.geometry import Group, required_alignment
from lmcache_persist.identity import fingerprint
from lmcache_persist.manifest.catalog import ModelRow
from lmcache_persist.manifest.snapshot import ManifestSnapshot, read_snapshot
from lmcache_persist.server.report import inspect_document
from lmcache_persist.store import offline as store_files
from lmcache_persist.store.base import Usage
from lmcache_persist.store.check import Violation
from lmcache_persist.store.data_file import DATA_NAME
from lmcache_persist.store.lmdb_open import StoreMeta

__all__ = ["Look", "Progress", "Violation", "check", "inspect_offline", "look", "look_at_manifest"]

Confirm = Callable[[Sequence[str]], None]
"""Shown what a verb is about to throw away; raises to leave everything as it is."""

_NO_STORE = Usage(
    chunks=0,
    objects=0,
    bytes=0,
    capacity_bytes=0,
    used_bytes=0,
    stale_objects=0,
    stale_bytes=0,
    by_fingerprint={},
)


class Look(NamedTuple):
    """What was seen: the document of ``inspect``, and why a part of it is unavailable."""

    document: dict[str, Any]
    problem: PersistError | None


def inspect_offline(data_dir: Path) -> dict[str, Any]:
    """The document of ``inspect`` from files; its store is "unavailable" if unreadable.

    Raises:
        DataDirLocked: a server holds the data dir: ask that one.
        DataDirUnusable: it is no data dir, or cannot be read.
        ManifestUnreadable, SchemaTooNew, ManifestBusy: as they say.
    """
    return look(data_dir).document


def look(data_dir: Path) -> Look:
    """As :func:`inspect_offline`, with the reason for an unavailable store."""
    paths = existing_data_dir(data_dir)
    with ReaderLock.acquire(data_dir):
        refuse_if_resetting(paths)
        snapshot = _manifest(paths)
        try:
            usage, meta = _usage(paths)
        except PersistError as error:
            return Look(inspect_document(snapshot, None, clean_shutdown=None), error)
    clean = meta.clean_shutdown if meta else None
    document = inspect_document(_after_rebind(snapshot, meta), usage, clean_shutdown=clean)
    return Look(document, None)


def look_at_manifest(data_dir: Path) -> dict[str, Any]:
    """The document of ``inspect`` with the store unavailable, beside a server that is hung.

    Raises:
        DataDirUnusable, ManifestUnreadable, SchemaTooNew, ManifestBusy: as they say.
    """
    snapshot = _manifest(existing_data_dir(data_dir))
    return inspect_document(snapshot, None, clean_shutdown=None)


def existing_data_dir(data_dir: Path) -> DataDir:
    """The paths of a folder that is there.

    Raises:
        DataDirUnusable: it is absent, no folder, or cannot be looked into.
    """
    try:
        mode = os.stat(data_dir).st_mode
        if not stat.S_ISDIR(mode):
            raise DataDirUnusable(
                f"data dir {data_dir} is a file, expected a folder",
                hint="give the --data-dir of a server",
            )
        os.listdir(data_dir)
    except OSError as error:
        raise DataDirUnusable(
            f"data dir {data_dir} cannot be read: {error.strerror}",
            hint="give the --data-dir of a server, as a user that may read it",
        ) from error
    return DataDir(data_dir)


def refuse_if_resetting(paths: DataDir) -> None:
    """For verbs that have nothing to look at then.

    Raises:
        DataDirUnusable: a reset was decided and is not finished.
    """
    if os.path.lexists(paths.resetting):
        raise DataDirUnusable(
            f"data dir {paths.root} is being reset or restored, and that was interrupted",
            hint=f"restore it again, or finish with: lmcache-persist reset {paths.root}; a start"
            " does so, too, and is empty then",
        )


def _manifest(paths: DataDir) -> ManifestSnapshot:
    try:
        return read_snapshot(paths.manifest)
    except FileNotFoundError:
        pass
    if _has_data_file(paths.store):
        raise ManifestUnreadable(
            f"data dir {paths.root} has a store and no manifest, expected both",
            hint=f"put the manifest back, or rebuild it with: lmcache-persist recover {paths.root}",
        )
    raise DataDirUnusable(
        f"data dir {paths.root} has neither manifest nor store, expected a server's data dir",
        hint="give the --data-dir of a server",
    )


def _has_data_file(directory: Path) -> bool:
    try:
        os.stat(directory / DATA_NAME)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreIOError(f"the store in {directory} cannot be read: {error.strerror}") from error
    return True


def _usage(paths: DataDir) -> tuple[Usage, StoreMeta | None]:
    if not _has_data_file(paths.store):
        return _NO_STORE, None
    # Mapping a broken tree can end the process: look with plain reads first.
    problem = store_files.looks_damaged(paths.store) or store_files.verify_pages(paths.store)
    if problem:
        raise StoreDamaged(f"the store in {paths.store} is damaged: {problem}")
    with store_files.OfflineStore.open(paths.store) as store:
        return store.usage(), store.meta


def _after_rebind(snapshot: ManifestSnapshot, meta: StoreMeta | None) -> ManifestSnapshot:
    """The manifest as the next start will have it, if a rebind was interrupted."""
    if snapshot.binding is None or meta is None:
        return snapshot
    return replace(snapshot, binding=snapshot.binding.after_rebind(meta.stamp, meta.replaced))


@dataclass(slots=True)
class Progress:
    """How far a check came. ``checked_objects`` counts those whose digests were looked at."""

    checked_objects: int = 0


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
            snapshot = _manifest(paths)
        except (SchemaTooNew, ManifestBusy):
            raise
        except ManifestUnreadable as error:
            yield Violation("manifest", error.message)
        if snapshot is not None:
            yield from _check_manifest(snapshot)
        if _has_data_file(paths.store):
            yield from _check_store(paths.store, snapshot, progress or Progress())
        elif snapshot is not None and snapshot.binding is not None:
            yield Violation(
                "store data file", f"it is absent, expected store {snapshot.binding.store_uuid}"
            )


def _check_manifest(snapshot: ManifestSnapshot) -> Iterator[Violation]:
    for row in snapshot.models:
        yield from _check_model(row)
        if snapshot.binding is None:
            yield Violation(
                f"manifest model {row.fingerprint}", "it was registered and nothing is bound"
            )


def _check_model(row: ModelRow) -> Iterator[Violation]:
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
            if snapshot is not None:
                snapshot = _after_rebind(snapshot, store.meta)
                yield from _check_cross_references(snapshot, store)
            for violation in store.check():
                yield replace(violation, where=f"store {violation.where}")
            progress.checked_objects += sum(len(record.objects) for record in store.records())
    except StoreDamaged as error:
        yield Violation("store", error.message)


def _check_cross_references(
    snapshot: ManifestSnapshot, store: store_files.OfflineStore
) -> Iterator[Violation]:
    stamp, binding = store.meta.stamp, snapshot.binding
    if binding is None:
        if stamp is not None:
            yield Violation(
                "store stamp", f"it is bound to {stamp.chunk_size} and the manifest is unbound"
            )
    elif store.meta.uuid != binding.store_uuid:
        yield Violation(
            "store uuid", f"found {store.meta.uuid}, the manifest expects {binding.store_uuid}"
        )
    elif stamp is not None and stamp != binding:
        yield Violation(
            "store stamp",
            f"found binding {stamp.binding_id} (chunk size {stamp.chunk_size}), the manifest"
            f" expects {binding.binding_id} (chunk size {binding.chunk_size})",
        )
    yield from _check_usage(snapshot, store.usage(), stamped=stamp is not None)


def _check_usage(snapshot: ManifestSnapshot, usage: Usage, *, stamped: bool) -> Iterator[Violation]:
    if usage.objects and not (stamped and snapshot.binding):
        yield Violation("store totals", f"{usage.objects} objects are there and nothing is bound")
        return
    models = {row.fingerprint: row for row in snapshot.models}
    for name in sorted(usage.by_fingerprint):
        # No row is no fault: an older copy of the manifest may serve, and a full disk keeps
        # a row from being written until there is room.
        row = models.get(name)
        if (
            row is not None
            and snapshot.binding
            and snapshot.binding.chunk_size % row.required_alignment
        ):
            yield Violation(
                "store totals",
                f"model {name} has objects, and its alignment {row.required_alignment} does not"
                f" divide the chunk size {snapshot.binding.chunk_size}",
            )
