"""What a start finds on disk, and what it makes of it (design section 4, rule 6).

Everything is looked at on private copies and read-only views first; only then is anything
opened for writing. *Missing or broken bytes are lost cache*: the server starts empty under
the same binding and says so. *Foreign bytes, or bytes without their manifest* are refused,
and a refusal changes nothing on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from lmcache_persist import hashing
from lmcache_persist.binding import MODE_AUTO, Binding
from lmcache_persist.config import Settings
from lmcache_persist.datadir import DataDir
from lmcache_persist.errors import (
    BindingMismatch,
    PersistError,
    StoreDamaged,
    StoreMismatch,
)
from lmcache_persist.manifest import ManifestSnapshot, read_snapshot
from lmcache_persist.store import data_file, lmdb_disk
from lmcache_persist.store.offline import peek, verify_pages

log = logging.getLogger(__name__)

BACKEND = "lmdb"


class StoreState(Enum):
    """What the store's folder holds."""

    ABSENT = auto()
    DAMAGED = auto()
    PRESENT = auto()


@dataclass(frozen=True, slots=True)
class Found:
    """What is on disk.

    Attributes:
        snapshot: of the manifest, None if there is none.
        store: the state of the store.
        damage: why it is damaged.
        uuid: of the store, empty unless present.
        stamp: the store's, None if unbound or not present.
        has_objects: whether any object is stored.
        format_version: of the store.
    """

    snapshot: ManifestSnapshot | None
    store: StoreState
    damage: str = ""
    uuid: str = ""
    stamp: Binding | None = None
    has_objects: bool = False
    format_version: int = 0

    @property
    def binding(self) -> Binding | None:
        """The manifest's."""
        return self.snapshot.binding if self.snapshot else None


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do.

    Attributes:
        binding: that holds on, None if unbound.
        store_uuid: the uuid a new store is made with, None to let it choose.
        set_aside: move a damaged store away first.
        complete_stamp: the store still needs its stamp.
        notes: loud lines for the operator.
    """

    binding: Binding | None
    store_uuid: str | None = None
    set_aside: bool = False
    complete_stamp: bool = False
    notes: tuple[str, ...] = ()


def look(paths: DataDir, *, deep: bool, condemned: bool = False) -> Found:
    """Look at a data dir without changing it.

    Args:
        paths: the data dir's.
        deep: walk all tree pages of the store before it is mapped (after a crash that may
            have come from them); takes seconds per million objects.
        condemned: take a present store for damaged: servers keep dying of it.

    Raises:
        StartupRefused: manifest or store is there and cannot be understood.
    """
    try:
        snapshot = read_snapshot(paths.manifest)
    except FileNotFoundError:
        snapshot = None
    try:
        if data_file.lost_power_unsynced(paths.store):
            return Found(
                snapshot,
                StoreState.DAMAGED,
                "the machine lost power while durability was relaxed",
            )
        if condemned and (paths.store / data_file.DATA_NAME).exists():
            return Found(snapshot, StoreState.DAMAGED, "servers keep crashing on it")
        if deep and (damage := verify_pages(paths.store)):
            return Found(snapshot, StoreState.DAMAGED, damage)
        found = peek(paths.store)
    except StoreDamaged as error:
        return Found(snapshot, StoreState.DAMAGED, error.message)
    if found is None:
        return Found(snapshot, StoreState.ABSENT)
    return Found(
        snapshot,
        StoreState.PRESENT,
        uuid=found.uuid,
        stamp=found.stamp,
        has_objects=found.has_objects,
        format_version=found.format_version,
    )


def decide(found: Found, settings: Settings) -> Decision:
    """Start, start empty, or refuse.

    Raises:
        BindingMismatch: another fixed chunk size than the bound one is asked for.
        StoreMismatch: manifest and store do not belong together.
    """
    binding = found.binding
    if binding is None:
        return _decide_unbound(found)
    _check_settings(binding, settings)
    _check_understood(binding)
    notes = _notes(binding, settings)
    if found.store is StoreState.ABSENT:
        note = (
            f"the store is gone; starting empty under binding {binding.binding_id[:12]}"
            f" (chunk size {binding.chunk_size})"
        )
        return Decision(binding, binding.store_uuid, complete_stamp=True, notes=(note, *notes))
    if found.store is StoreState.DAMAGED:
        note = (
            f"the store is damaged ({found.damage}) and set aside; starting empty under binding"
            f" {binding.binding_id[:12]} (chunk size {binding.chunk_size})"
        )
        return Decision(binding, binding.store_uuid, True, True, (note, *notes))
    if found.uuid != binding.store_uuid:
        raise StoreMismatch(
            f"the store has uuid {found.uuid}, the manifest is bound to {binding.store_uuid}",
            hint="put back the store or the manifest that belongs to the other one; with the"
            " store folder moved away the server starts empty",
        )
    if found.stamp is None:
        if found.has_objects:
            raise StoreMismatch(
                "the store has objects and no stamp, so nothing says what they are",
                hint="move the store folder away; the server then starts empty",
            )
        return Decision(binding, complete_stamp=True, notes=notes)
    if found.stamp.binding_id != binding.binding_id:
        raise StoreMismatch(
            f"the store is stamped with binding {found.stamp.binding_id[:12]} (chunk size"
            f" {found.stamp.chunk_size}), the manifest has {binding.binding_id[:12]} (chunk"
            f" size {binding.chunk_size})",
            hint="put back the manifest or the store that belongs to the other one; with the"
            " store folder moved away the server starts empty",
        )
    return Decision(binding, notes=notes)


def _decide_unbound(found: Found) -> Decision:
    what = "there is no manifest" if found.snapshot is None else "the manifest is unbound"
    if found.store is StoreState.DAMAGED:
        raise StoreMismatch(
            f"{what}, and the store beside it is damaged ({found.damage})",
            hint="put the manifest back, or move the store folder away to start afresh",
        )
    if found.stamp is not None or found.has_objects:
        size = f", chunk size {found.stamp.chunk_size}" if found.stamp else ""
        raise StoreMismatch(
            f"{what}, but the store beside it is in use (uuid {found.uuid}{size})",
            hint="put the manifest back, or move the store folder away to start afresh",
        )
    return Decision(None)


def _check_settings(binding: Binding, settings: Settings) -> None:
    if settings.chunk_size is not None and settings.chunk_size != binding.chunk_size:
        raise BindingMismatch(
            f"--chunk-size is {settings.chunk_size}, but this data dir is bound to"
            f" {binding.chunk_size} since {binding.bound_at}",
            hint=f"start with --chunk-size {binding.chunk_size} or auto, or use another --data-dir",
            found=binding.chunk_size,
            expected=settings.chunk_size,
        )


def _check_understood(binding: Binding) -> None:
    if binding.backend != BACKEND:
        raise StoreMismatch(
            f"the manifest is bound to backend {binding.backend!r}, expected {BACKEND!r}",
            hint="start the version of lmcache-persist that made it",
        )
    found = (binding.hash_algorithm, binding.hash_version)
    expected = (hashing.HASH_ALGORITHM, hashing.HASH_VERSION)
    if found != expected:
        raise StoreMismatch(
            f"the manifest is bound to hash {found[0]} version {found[1]},"
            f" expected {expected[0]} version {expected[1]}",
            hint="start the version of lmcache-persist that made it",
        )


def _notes(binding: Binding, settings: Settings) -> tuple[str, ...]:
    if binding.mode == MODE_AUTO and settings.base_chunk_size != binding.base_chunk_size:
        note = (
            f"base chunk size is {settings.base_chunk_size}, but this data dir was bound from"
            f" {binding.base_chunk_size}: it stays at chunk size {binding.chunk_size}"
        )
        return (note,)
    return ()


def carry_out(decision: Decision, paths: DataDir, settings: Settings) -> lmdb_disk.LmdbDisk:
    """Open the store as decided; the first thing that changes anything.

    Raises:
        PersistError: no room, or the disk failed.
    """
    for note in decision.notes:
        log.warning("%s", note)
    if decision.set_aside:
        moved = data_file.set_aside(paths.store)
        log.warning("the damaged store is now %s", moved)
    disk = lmdb_disk.LmdbDisk.open(
        paths.store,
        settings.capacity_bytes,
        uuid=decision.store_uuid,
        relaxed=settings.durability == "relaxed",
    )
    return _or_close(disk, lambda: _complete(disk, decision))


def _complete(disk: lmdb_disk.LmdbDisk, decision: Decision) -> None:
    if decision.complete_stamp and decision.binding is not None:
        disk.write_stamp(decision.binding)


def _or_close(disk: lmdb_disk.LmdbDisk, action: Callable[[], None]) -> lmdb_disk.LmdbDisk:
    try:
        action()
    except (PersistError, OSError):
        disk.close()
        raise
    return disk
