"""``verify --repair`` on the files of a data dir that no server holds.

What is bad is dropped, counters are put right, and each is told after it is durable. A
repair that is killed leaves nothing worse than it was, and can be done again. Foreign
bytes, and bytes without their manifest, are no matter of repair: refused, nothing changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

from lmcache_persist import failpoints
from lmcache_persist.binding import Binding
from lmcache_persist.config import DEFAULT_CAPACITY_BYTES
from lmcache_persist.datadir import DataDir, DataDirLock
from lmcache_persist.errors import DiskTooSmall, StoreDamaged
from lmcache_persist.manifest import Manifest, ManifestSnapshot
from lmcache_persist.server import backup_file, recovery
from lmcache_persist.server.offline import (
    after_rebind,
    check_manifest,
    check_model,
    expect,
    has_data_file,
    in_store,
    misfits,
    read_manifest,
    refuse_if_resetting,
    usage_or_none,
    used_data_dir,
)
from lmcache_persist.store import offline as store_files
from lmcache_persist.store.aside import has_set_aside
from lmcache_persist.store.capacity import MIN_CAPACITY_BYTES
from lmcache_persist.store.check import Progress
from lmcache_persist.store.findings import Mended, Violation
from lmcache_persist.store.lmdb_disk import LmdbDisk
from lmcache_persist.store.lmdb_open import StoreMeta
from lmcache_persist.store.unsynced import clear_unsynced
from lmcache_persist.units import format_size


def repair(data_dir: Path, *, progress: Progress | None = None) -> Iterator[Mended]:
    """Mend a data dir; to be exhausted. Digests are checked on the way.

    Durable: everything that is yielded as done.

    Raises:
        DataDirLocked: a server holds the data dir, or readers did not end in time.
        DataDirUnusable: it is no data dir, is a backup, or cannot be written.
        ManifestUnreadable, StoreMismatch: nothing says what the store's bytes are; the
            hint names the verb that helps. Nothing was changed.
        SchemaTooNew, FormatTooNew: this version does not know what is right.
        PersistError: the disk failed; what was yielded before is done.
    """
    paths = used_data_dir(data_dir)
    with DataDirLock.acquire(data_dir):
        backup_file.refuse_to_change(paths.root)
        refuse_if_resetting(paths)
        snapshot = read_manifest(paths)
        damage, meta, has_objects = _first_look(paths)
        found = recovery.Found(
            snapshot,
            _state(paths, damage),
            damage,
            uuid=meta.uuid if meta else "",
            stamp=meta.stamp if meta else None,
            has_objects=has_objects,
            replaced=meta.replaced if meta else "",
        )
        recovery.check_together(found, data_dir)
        snapshot = after_rebind(snapshot, meta)
        good = yield from _mend_manifest(paths, snapshot)
        if found.store is recovery.StoreState.PRESENT:
            yield from _mend_store(paths, good, progress or Progress())
        elif damage or snapshot.binding is not None:
            yield from _replace_store(paths, snapshot, damage)


def _first_look(paths: DataDir) -> tuple[str, StoreMeta | None, bool]:
    """Why the store must not be mended, what it says of itself, whether it has objects."""
    if not has_data_file(paths.store):
        return "", None, False
    problem = store_files.looks_damaged(paths.store) or store_files.verify_pages(paths.store)
    if problem:
        return problem, None, False
    try:
        with store_files.OfflineStore.open(paths.store) as store:
            return "", store.meta, store.num_chunks() > 0
    except StoreDamaged as error:
        return error.message, None, False


def _state(paths: DataDir, damage: str) -> recovery.StoreState:
    if damage:
        return recovery.StoreState.DAMAGED
    present = has_data_file(paths.store)
    return recovery.StoreState.PRESENT if present else recovery.StoreState.ABSENT


def _mend_manifest(
    paths: DataDir, snapshot: ManifestSnapshot
) -> Generator[Mended, None, ManifestSnapshot]:
    """Forget models that are not what their fingerprints say; engines register again."""
    if snapshot.binding is None:
        # Only a lost binding makes that wrong, and `recover` knows the way back.
        yield from (Mended(violation, None) for violation in check_manifest(snapshot))
        return snapshot
    bad = {row.fingerprint: list(check_model(row)) for row in snapshot.models}
    bad = {name: violations for name, violations in bad.items() if violations}
    if bad:
        with contextlib.closing(Manifest.open(paths.manifest)) as manifest:
            manifest.forget_models(list(bad))
    for violations in bad.values():
        for violation in violations:
            yield Mended(violation, "forgot the model; its engine registers it again")
    return replace(snapshot, models=[row for row in snapshot.models if row.fingerprint not in bad])


def _mend_store(paths: DataDir, snapshot: ManifestSnapshot, progress: Progress) -> Iterator[Mended]:
    with store_files.OfflineStore.open(paths.store) as store:
        expect(progress, usage_or_none(store))
    with store_files.repairing(paths.store, unwanted=misfits(snapshot), progress=progress) as work:
        for mended in work.run():
            yield replace(mended, violation=in_store(mended.violation))
    # Every page was walked, every digest looked at: a start need not mistrust it any more.
    clear_unsynced(paths.store)


def _replace_store(paths: DataDir, snapshot: ManifestSnapshot, damage: str) -> Iterator[Mended]:
    """An empty store under the same binding; what is broken is kept aside, as at a start."""
    binding = snapshot.binding
    done = []
    told = store_files.capacity_told(paths.store, at_most=DEFAULT_CAPACITY_BYTES)
    if damage:
        before = has_set_aside(paths.store)
        aside = store_files.set_aside(paths.store)
        done.append(f"it is now {aside.name}{', and the one set aside before is gone' * before}")
        failpoints.hit("repair.after_set_aside")
    if binding is not None:
        done.append(_make_empty(paths, binding, told))
    expected = f", expected store {binding.store_uuid}" if binding else ""
    what = damage or f"it is absent{expected}"
    yield Mended(Violation("store data file", what), "; ".join(done))


def _make_empty(paths: DataDir, binding: Binding, told: int) -> str:
    """A store of the size of the one before, the least if that is unknown or has no room."""
    try:
        disk = LmdbDisk.open(paths.store, told or MIN_CAPACITY_BYTES, uuid=binding.store_uuid)
    except DiskTooSmall:
        # What is kept aside may be all that is left of the cache: it is not thrown away here.
        disk = LmdbDisk.open(paths.store, MIN_CAPACITY_BYTES, uuid=binding.store_uuid)
    with contextlib.closing(disk):
        disk.write_stamp(binding)
        size = disk.capacity_bytes
    done = f"made an empty one of {format_size(size)}"
    if size == told:
        return done
    no_room = f", there is no room for {format_size(told)}" if told else ""
    wanted = format_size(told) if told else "SIZE"
    return f"{done}{no_room}; start with --capacity {wanted}, or it stays that small"
