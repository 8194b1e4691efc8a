"""What a start finds on disk, and what it makes of it (design section 4, rule 6).

Everything is looked at on private copies and read-only views first; only then is anything
opened for writing. *Missing or broken bytes are lost cache*: the server starts empty under
the same binding and says so. *Foreign bytes, or bytes without their manifest* are refused,
and a refusal changes nothing on disk.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

from lmcache_persist import hashing
from lmcache_persist.binding import MODE_AUTO, Binding
from lmcache_persist.config import DEFAULT_CAPACITY_BYTES, Settings
from lmcache_persist.datadir import DataDir
from lmcache_persist.errors import (
    BindingMismatch,
    FormatTooNew,
    StoreDamaged,
    StoreMismatch,
)
from lmcache_persist.manifest import ManifestSnapshot, read_snapshot
from lmcache_persist.printable import command
from lmcache_persist.server.backup_file import is_backup, rebuild_hint
from lmcache_persist.store import aside, capacity, data_file, meta_page, preallocation, unsynced
from lmcache_persist.store.format import FORMAT_VERSION
from lmcache_persist.store.offline import structure_problem, verify_pages
from lmcache_persist.store.peek_child import peek_in_child
from lmcache_persist.units import format_size, moment

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
        uuid: of the store, empty if it cannot be told.
        stamp: the store's, None if unbound or if it cannot be told.
        has_objects: whether any object is stored.
        format_version: of the store.
        capacity_bytes: of the store, 0 if it cannot be told.
        replaced: id of the binding that a rebind stamped over, until the manifest followed.
        unsound: what of a present store a start mends before it uses it.
        grown_over_bytes: the capacity setting that a growth of a live server overtook, or 0.
    """

    snapshot: ManifestSnapshot | None
    store: StoreState
    damage: str = ""
    uuid: str = ""
    stamp: Binding | None = None
    has_objects: bool = False
    format_version: int = 0
    capacity_bytes: int = 0
    replaced: str = ""
    unsound: str = ""
    grown_over_bytes: int = 0

    @property
    def held(self) -> Binding | None:
        """The manifest's binding."""
        return self.snapshot.binding if self.snapshot else None

    @property
    def binding(self) -> Binding | None:
        """The one that holds: the manifest's, or the one that a rebind was about to give it."""
        return self.held.after_rebind(self.stamp, self.replaced) if self.held else None

    @property
    def names(self) -> dict[str, str]:
        """Names of models by fingerprint, for people."""
        rows = self.snapshot.models if self.snapshot else []
        return {row.fingerprint: row.name for row in rows}


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do.

    Attributes:
        binding: that holds on, None if unbound.
        store_uuid: the uuid a new store is made with, None to let it choose.
        set_aside: move a damaged store away first.
        complete_stamp: the store still needs its stamp.
        replaces: id of the manifest's binding that a rebind stopped short of replacing.
        mend: why the store is to be mended before it is opened.
        notes: loud lines for the operator.
    """

    binding: Binding | None
    store_uuid: str | None = None
    set_aside: bool = False
    complete_stamp: bool = False
    notes: tuple[str, ...] = ()
    replaces: str = ""
    mend: str = ""


def look(
    paths: DataDir,
    *,
    deep: bool,
    thorough: bool = False,
    condemned: bool = False,
    mends: bool = False,
) -> Found:
    """Look at a data dir without changing it.

    Args:
        paths: the data dir's.
        deep: walk all tree pages of the store before it is mapped (after a crash that may
            have come from them); takes seconds per million objects.
        thorough: compare the store's databases with each other, too (after the last server
            found the store damaged, which may be no matter of pages).
        condemned: take a present store for damaged: servers keep dying of it.
        mends: the caller mends what does not count or order as it must in a store whose
            pages are well; without, such a store is damaged, too.

    Raises:
        StartupRefused: manifest or store is there and cannot be understood.
    """
    try:
        snapshot = read_snapshot(paths.manifest)
    except FileNotFoundError:
        snapshot = None
    found = look_at_store(paths, deep=deep, thorough=thorough, condemned=condemned, mends=mends)
    return replace(found, snapshot=snapshot)


def look_at_store(
    paths: DataDir,
    *,
    deep: bool,
    thorough: bool = False,
    condemned: bool = False,
    mends: bool = False,
) -> Found:
    """As :func:`look`, without the manifest."""
    if not data_file.exists(paths.store):
        return Found(None, StoreState.ABSENT)
    if condemned:
        return _damaged(paths, "servers keep crashing on it")
    lost_power = unsynced.lost_power_unsynced(paths.store)
    try:
        if (deep or thorough or lost_power) and (damage := verify_pages(paths.store)):
            return _damaged(paths, damage)
        found = peek_in_child(paths.store)
        unsound = found.unsound if found else ""
        if thorough and not unsound:
            unsound = structure_problem(paths.store) or ""
        if unsound and not mends:
            return _damaged(paths, unsound)
    except StoreDamaged as error:
        return _damaged(paths, error.message)
    if found is None:
        return Found(None, StoreState.ABSENT)
    return Found(
        None,
        StoreState.DAMAGED if lost_power else StoreState.PRESENT,
        "the machine lost power while durability was relaxed" if lost_power else "",
        uuid=found.uuid,
        stamp=found.stamp,
        has_objects=found.has_objects,
        format_version=found.format_version,
        capacity_bytes=found.capacity_bytes,
        replaced=found.replaced,
        unsound="" if lost_power else unsound,
        grown_over_bytes=found.grown_over_bytes,
    )


def _damaged(paths: DataDir, damage: str) -> Found:
    told = meta_page.capacity_told(paths.store, at_most=DEFAULT_CAPACITY_BYTES)
    return Found(None, StoreState.DAMAGED, damage, capacity_bytes=told)


def decide(found: Found, settings: Settings) -> Decision:
    """Start, start empty, or refuse.

    Raises:
        BindingMismatch: another fixed chunk size than the bound one is asked for.
        StoreMismatch: manifest and store do not belong together.
    """
    binding = found.binding
    if binding is None:
        return _decide_unbound(found, settings.data_dir)
    _check_settings(binding, settings)
    _check_understood(binding)
    notes = _notes(binding, settings)
    if found.store is StoreState.ABSENT:
        note = (
            f"the store is gone; starting empty under binding {binding.binding_id[:12]}"
            f" (chunk size {binding.chunk_size})"
        )
        return Decision(binding, binding.store_uuid, complete_stamp=True, notes=(note, *notes))
    if found.uuid:
        _check_belongs(found, binding, settings.data_dir)
    if found.store is StoreState.DAMAGED:
        note = (
            f"the store is damaged ({found.damage}) and set aside; starting empty under binding"
            f" {binding.binding_id[:12]} (chunk size {binding.chunk_size})"
        )
        return Decision(binding, binding.store_uuid, True, True, (note, *notes))
    replaces = found.held.binding_id if found.held and found.held != binding else ""
    if replaces:
        note = f"completing a rebind that was interrupted, to chunk size {binding.chunk_size}"
        notes = (note, *notes)
    return Decision(
        binding,
        complete_stamp=found.stamp is None,
        notes=notes,
        replaces=replaces,
        mend=found.unsound,
    )


def with_uuid(decision: Decision, found: Found) -> Decision:
    """The decision with the uuid of the store that will be opened, which its pool needs first."""
    kept = found.uuid if found.store is StoreState.PRESENT else ""
    return replace(decision, store_uuid=kept or decision.store_uuid or secrets.token_hex(16))


def warn_of_nothing(found: Found, paths: DataDir) -> None:
    """Tell a data dir that lost all it had from a new one: a start of either is unbound."""
    if found.snapshot is None and found.store is StoreState.ABSENT and paths.ballast.exists():
        log.warning(
            "%s had a server before (%s is there) and has neither manifest nor store any more:"
            " starting unbound and empty",
            paths.root,
            paths.ballast.name,
        )


def warn_of_size(found: Found, paths: DataDir, settings: Settings) -> None:
    """Say loudly what a new store gets where one was before whose size nobody knows any more."""
    if settings.capacity_is_set or found.capacity_bytes:
        return
    had_one = found.binding is not None or paths.ballast.exists()
    if found.store is StoreState.DAMAGED or (found.store is StoreState.ABSENT and had_one):
        log.warning(
            "nothing tells how large the store of %s was: the new one gets %s, the default;"
            " --capacity sets another size",
            paths.root,
            format_size(settings.capacity_bytes),
        )


def check_room(found: Found, paths: DataDir, settings: Settings) -> None:
    """Refuse a capacity that the store, or the disk, cannot have, before anything is changed.

    A damaged store, set aside or about to be, gives its room back where there is too little.

    Raises:
        ConfigError: the capacity is below the least, or the store's.
        DiskTooSmall: says both numbers.
    """
    capacity.PageBudget.of(settings.capacity_bytes)
    if found.store is StoreState.PRESENT:
        path = paths.store / data_file.DATA_NAME
        meta_page.check_capacity(path, settings.capacity_bytes)
        preallocation.check_room(paths.store, settings.capacity_bytes - path.stat().st_size)
    else:
        damaged_ones = (paths.store, aside.aside_of(paths.store))
        back = sum(aside.allocated_bytes(one) for one in damaged_ones)
        preallocation.check_room(
            paths.root, settings.capacity_bytes - back, way_out=no_room_hint(settings)
        )


def no_room_hint(settings: Settings) -> str:
    """The way out of a capacity that has no room: nobody lowers what nobody has set."""
    is_set = settings.capacity_set_by is not None
    return preallocation.LESS_CAPACITY if is_set else preallocation.SET_CAPACITY


def check_together(found: Found, data_dir: Path) -> None:
    """Refuse what a start would refuse whatever its flags are.

    Raises:
        StoreMismatch: manifest and store do not belong together, or are not understood.
        FormatTooNew: as it says.
    """
    if found.binding is None:
        _decide_unbound(found, data_dir)
        return
    _check_understood(found.binding)
    if found.uuid:
        _check_belongs(found, found.binding, data_dir)


def refuse_if_damaged(found: Found, paths: DataDir) -> None:
    """For verbs that change a store in place, or copy it.

    Raises:
        StoreDamaged: there is one, and it is damaged.
    """
    if found.store is StoreState.DAMAGED:
        raise damaged(paths, found.damage)


def damaged(paths: DataDir, why: str) -> StoreDamaged:
    """The one refusal of a store that is there and must not be mapped."""
    if is_backup(paths.root):
        hint = "nothing in it can be restored, and a backup is never mended: use another one"
    else:
        hint = set_aside_hint(paths.root)
    return StoreDamaged(f"the store in {paths.store} is damaged: {why}", hint=hint)


def set_aside_hint(data_dir: Path) -> str:
    """The way out of a broken store, whose repair is another one in its place."""
    return (
        "to keep it aside and have an empty one in its place (a start does so, too):"
        f" {command('verify', data_dir, '--repair')}; what can be read of it, if anything,"
        f" comes back with: {command('recover', data_dir, '--set-aside')}"
    )


def _check_belongs(found: Found, binding: Binding, data_dir: Path) -> None:
    if found.uuid != binding.store_uuid:
        raise StoreMismatch(
            f"the store has uuid {found.uuid}, the manifest is bound to {binding.store_uuid}",
            hint=_other_one(data_dir),
        )
    if found.stamp is None:
        if found.has_objects:
            raise StoreMismatch(
                "the store has objects and no stamp, so nothing says what they are",
                hint=f"start empty with: {command('reset', data_dir)}",
            )
        return
    if found.stamp.binding_id != binding.binding_id:
        raise StoreMismatch(
            f"the store is stamped with binding {found.stamp.binding_id[:12]} (chunk size"
            f" {found.stamp.chunk_size}), the manifest has {binding.binding_id[:12]} (chunk"
            f" size {binding.chunk_size})",
            hint=_other_one(data_dir),
        )


def _decide_unbound(found: Found, data_dir: Path) -> Decision:
    what = "there is no manifest" if found.snapshot is None else "the manifest is unbound"
    if found.store is StoreState.DAMAGED and not found.uuid:
        raise StoreMismatch(
            f"{what}, and the store beside it is damaged ({found.damage})",
            hint=f"put the manifest back, or start afresh with: {command('reset', data_dir)}",
        )
    if found.stamp is not None or found.has_objects:
        size = f", chunk size {found.stamp.chunk_size}" if found.stamp else ""
        raise StoreMismatch(
            f"{what}, but the store beside it is in use (uuid {found.uuid}{size})",
            hint=_rebuild(found, data_dir),
        )
    if found.store is StoreState.DAMAGED:
        return Decision(
            None, set_aside=True, notes=(f"the empty store is set aside: {found.damage}",)
        )
    return Decision(None, mend=found.unsound)


def _other_one(data_dir: Path) -> str:
    return (
        "put back the store or the manifest that belongs to the other one; or start afresh with:"
        f" {command('reset', data_dir)}"
    )


def _rebuild(found: Found, data_dir: Path) -> str:
    if is_backup(data_dir):
        return rebuild_hint(data_dir)
    if found.stamp is None:
        return f"put the manifest back, or start afresh with: {command('reset', data_dir)}"
    return (
        "rebuild the manifest from the store's stamp with:"
        f" {command('recover', data_dir)}; or start afresh with: {command('reset', data_dir)}"
    )


def _check_settings(binding: Binding, settings: Settings) -> None:
    if settings.chunk_size is not None and settings.chunk_size != binding.chunk_size:
        raise BindingMismatch(
            f"{settings.where('chunk_size')} is {settings.chunk_size}, but this data dir is bound"
            f" to {binding.chunk_size} since {moment(binding.bound_at)}",
            hint=f"set it to {binding.chunk_size} or auto there, use another --data-dir, or give up"
            " what is stored with: "
            + command("rebind", settings.data_dir, "--chunk-size", settings.chunk_size),
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
    if binding.store_format_version > FORMAT_VERSION:
        raise FormatTooNew(
            f"the manifest is bound to a store of format {binding.store_format_version},"
            f" expected at most {FORMAT_VERSION}",
            hint="start the version of lmcache-persist that wrote it",
            found=binding.store_format_version,
            expected=FORMAT_VERSION,
        )


def _notes(binding: Binding, settings: Settings) -> tuple[str, ...]:
    if binding.mode == MODE_AUTO and settings.base_chunk_size != binding.base_chunk_size:
        note = (
            f"base chunk size is {settings.base_chunk_size}, but this data dir was bound from"
            f" {binding.base_chunk_size}: it stays at chunk size {binding.chunk_size}"
        )
        return (note,)
    return ()
