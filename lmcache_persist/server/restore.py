"""``restore``: a data dir from a backup. Offline.

Order of writes: the mark of a reset, durable, under which all that lies in the folder
counts as removed -> store -> manifest -> the mark is removed, which decides. A crash before
that leaves the mark: the next start, reset or restore throws away what was restored so far.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lmcache_persist import failpoints
from lmcache_persist.binding import Binding
from lmcache_persist.datadir import DataDir, DataDirLock, ReaderLock, make_data_dir
from lmcache_persist.errors import DataDirUnusable, PersistError
from lmcache_persist.manifest import Manifest, ManifestSnapshot, files
from lmcache_persist.printable import command
from lmcache_persist.server import backup_file, recovery, reset
from lmcache_persist.server.backup_file import Descriptor
from lmcache_persist.server.losses import amount
from lmcache_persist.server.offline import check_apart, existing_data_dir
from lmcache_persist.server.recovery import Found
from lmcache_persist.server.room import MANIFEST_BYTES, Say, say_and_check_room
from lmcache_persist.server.state import utc_now
from lmcache_persist.store import copying
from lmcache_persist.store.base import ChunkRecord
from lmcache_persist.store.offline import OfflineStore

_HARMLESS = re.compile(r"server\.(lock|sock)|ballast|crash(\.[12])?\.log|lost\+found|resetting")
"""What a folder may hold that is to become a data dir."""
_OF_A_SERVER = re.compile(r"manifest\.sqlite.*|store(\.damaged)?")
"""What a reset removes besides."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did.

    Attributes:
        descriptor: of the backup.
        binding: of the data dir now.
        capacity_bytes: of its store.
        objects: in it.
        no_room_objects: of the backup, that are left out for the capacity.
        bad_objects: of the backup, that proved bad and are left out.
        manifest_rebuilt: from the store's stamp: the backup's manifest is lost.
    """

    descriptor: Descriptor
    binding: Binding
    capacity_bytes: int
    objects: int
    no_room_objects: int
    bad_objects: int
    manifest_rebuilt: bool


def restore(
    backup: Path,
    data_dir: Path,
    *,
    capacity_bytes: int | None = None,
    new_id: bool = False,
    say: Say = lambda text: None,
    on_chunk: Callable[[ChunkRecord], None] = lambda record: None,
) -> Restored:
    """Make a data dir from a backup, which stays as it is.

    Args:
        backup: a folder that ``backup`` made.
        data_dir: absent, or without manifest and store.
        capacity_bytes: of the store; as it was by default.
        new_id: give the store a uuid of its own, and so the data dir a binding of its own,
            to the same chunk size: for a second server beside the first.
        say: told the room that is needed, what has no room, and that the backup's manifest is
            lost, before anything is changed.
        on_chunk: told of each chunk that was copied.

    Durable: on return. Threads: one, with no other in the process.

    Raises:
        DataDirUnusable: the backup is none, or the data dir is in use.
        ConfigError: there is no such capacity.
        DiskTooSmall: there is not enough room; both numbers are named.
        DataDirLocked: a server holds either folder.
        PersistError: a disk failed; the data dir is empty, or marked as being reset.
    """
    source = existing_data_dir(backup, what="backup", hint=backup_file.A_BACKUP)
    backup_file.expect_backup(backup)
    check_apart(backup, data_dir, "backup")
    if os.path.isdir(data_dir):
        _refuse_foreign(data_dir)  # before a lock file is made in it
    with ReaderLock.acquire(backup):
        descriptor, found, lost_manifest = _judged(source)
        if lost_manifest:
            say(
                f"warning: {lost_manifest}: it is rebuilt from the stamp in the backup's store, and"
                " knows the models again once their engines have registered"
            )
        if capacity_bytes is None:
            capacity_bytes = descriptor.capacity_bytes
        with OfflineStore.open(source.store) as store:
            planned = copying.plan(store, capacity_bytes)
            lost = planned.too_much.total
            if lost.chunks:
                out = amount(lost.chunks, lost.objects, lost.nbytes)
                say(f"{out} of the backup have no room and stay out")
            binding = _binding(found, new_id=new_id)
            needed = capacity_bytes + MANIFEST_BYTES
            needed += 0 if lost_manifest else source.manifest.stat().st_size
            with _empty_data_dir(data_dir, needed, say) as paths, _marked(paths):
                failpoints.hit("restore.after_mark")
                with copying.StoreCopy.make(
                    paths.store, capacity_bytes, binding.store_uuid, binding
                ) as copy:
                    bad = copying.copy_chunks(store, planned, copy, on_chunk)
                    copy.finish()
                failpoints.hit("restore.after_store")
                if lost_manifest:
                    _rebuild_manifest(paths, binding)
                else:
                    _restore_manifest(source, paths, found, binding)
                failpoints.hit("restore.after_manifest")
    return Restored(
        descriptor,
        binding,
        capacity_bytes,
        copy.copied.total.objects,
        lost.objects,
        bad.total.objects,
        bool(lost_manifest),
    )


def why_not(backup: Path) -> PersistError | None:
    """Why a backup cannot be restored at all; None if it can, but for what proves bad in it."""
    try:
        with ReaderLock.acquire(backup):
            _judged(DataDir(backup))
    except PersistError as error:
        return error
    return None


def _judged(source: DataDir) -> tuple[Descriptor, Found, str]:
    """A backup, what is in it, and why its manifest is lost; the stamp stands in for that one."""
    descriptor = backup_file.read(source.root)
    lost_manifest = backup_file.manifest_problem(source.root, descriptor)
    if lost_manifest:
        found = recovery.look_at_store(source, deep=True)
        recovery.refuse_if_damaged(found, source)
        if found.stamp is None or found.stamp.binding_id != descriptor.binding_id:
            raise backup_file.unusable(
                source.root, f"{lost_manifest}, and its store has another stamp"
            )
        found = replace(found, snapshot=ManifestSnapshot(0, found.stamp, [], [], []))
    else:
        found = recovery.look(source, deep=True)
    recovery.check_together(found, source.root)
    recovery.refuse_if_damaged(found, source)
    return descriptor, found, lost_manifest


@contextlib.contextmanager
def _empty_data_dir(data_dir: Path, needed: int, say: Say) -> Iterator[DataDir]:
    """The data dir, locked and without anything, and with so much room on its disk."""
    there = os.path.lexists(data_dir)
    if not there:
        say_and_check_room(say, _nearest_folder(data_dir), needed)
    paths = make_data_dir(data_dir)
    with DataDirLock.acquire(paths.root):
        _clear(paths)
        if there:  # what an interrupted restore left does not count
            say_and_check_room(say, paths.root, needed)
        yield paths


@contextlib.contextmanager
def _marked(paths: DataDir) -> Iterator[None]:
    """What is made meanwhile counts at the end; if that is not reached, it is removed."""
    reset.mark(paths)
    try:
        yield
        reset.unmark(paths)
    except BaseException:
        with contextlib.suppress(PersistError):
            reset.finish(paths)
        raise


def _nearest_folder(path: Path) -> Path:
    return next(folder for folder in path.parents if folder.is_dir())


def _binding(found: Found, *, new_id: bool) -> Binding:
    held = found.binding
    if held is None:
        raise DataDirUnusable(
            "the backup is unbound, so there is nothing in it",
            hint="restore another backup, or start a server on a new folder",
        )
    if not new_id:
        return held
    return Binding.make(
        chunk_size=held.chunk_size,
        required_alignment=held.required_alignment,
        base_chunk_size=held.base_chunk_size,
        mode=held.mode,
        bound_at=utc_now(),
        winner=held.winner,
        backend=held.backend,
        store_uuid=secrets.token_hex(16),
        store_format_version=held.store_format_version,
    )


def _clear(paths: DataDir) -> None:
    """What an interrupted reset or restore left goes; anything else is refused."""
    if reset.is_pending(paths):
        reset.finish(paths)
    _refuse_foreign(paths.root)
    others = _others(paths.root)
    if others:
        raise _in_the_way(
            paths.root, others[0], f"throw away what it holds with: {command('reset', paths.root)}"
        )


def _others(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if not _HARMLESS.fullmatch(name))


def _refuse_foreign(root: Path) -> None:
    """Refuse a folder with something in it that no reset removes.

    Raises:
        DataDirUnusable: as said.
    """
    foreign = [name for name in _others(root) if not _OF_A_SERVER.fullmatch(name)]
    if foreign:
        raise _in_the_way(root, foreign[0], "move that away")


def _in_the_way(root: Path, name: str, way_out: str) -> DataDirUnusable:
    return DataDirUnusable(
        f"{root} holds {name!r}, expected an absent or empty folder",
        hint=f"restore into another folder, or {way_out}",
    )


def _rebuild_manifest(paths: DataDir, binding: Binding) -> None:
    with contextlib.closing(Manifest.open(paths.manifest)) as manifest:
        manifest.bind(binding)


def _restore_manifest(source: DataDir, paths: DataDir, found: Found, binding: Binding) -> None:
    files.write_new(paths.manifest, source.manifest.read_bytes())
    if found.held is not None and found.held != binding:
        with contextlib.closing(Manifest.open(paths.manifest)) as manifest:
            manifest.rebind(found.held.binding_id, binding)
