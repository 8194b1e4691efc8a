"""``backup``: manifest and store of a data dir, copied as a pair that belongs together.

Order of writes: all under the name of a partial backup: store -> manifest, taken after it,
so that it knows every model that the store has -> ``backup.json``, which makes it a backup
-> the backup's name. A pair of one binding always starts (rule 6 of a start); what is not
whole has neither the name nor ``backup.json``, and ``restore`` takes it for nothing.

The copy is made chunk by chunk. It is no frozen moment of the whole store, and need not be:
a chunk stands for itself, and its bytes are checked on the way. What that buys: no reading
transaction stays open, so a full store goes on writing and evicting all the while.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from lmcache_persist import __version__, failpoints
from lmcache_persist.binding import Binding
from lmcache_persist.datadir import DataDir, DataDirLock, ReaderLock, make_data_dir
from lmcache_persist.errors import DataDirUnusable, FormatTooNew, Unbound
from lmcache_persist.manifest import Manifest, files, serialized
from lmcache_persist.posix import sync_folder
from lmcache_persist.server import backup_file, crashes, recovery
from lmcache_persist.server.backup_file import Descriptor
from lmcache_persist.server.offline import existing_data_dir, refuse_if_resetting, used_data_dir
from lmcache_persist.server.recovery import StoreState
from lmcache_persist.server.room import Say, say_and_check_room
from lmcache_persist.server.state import utc_now
from lmcache_persist.store import copying, pieces
from lmcache_persist.store.base import ChunkRecord
from lmcache_persist.store.data_file import DATA_NAME
from lmcache_persist.store.format import FORMAT_VERSION
from lmcache_persist.store.offline import OfflineStore
from lmcache_persist.store.pieces import Assembler, Part

PARTIAL_SUFFIX = ".partial"


@dataclass(frozen=True, slots=True)
class Held:
    """What a source holds at the beginning; names as in :class:`~.base.Usage`."""

    chunks: int
    objects: int
    bytes: int
    used_bytes: int
    capacity_bytes: int


class Source(Protocol):
    """What is backed up: a live server, or the files of a data dir."""

    @property
    def binding(self) -> Binding:
        """The binding that holds."""

    @property
    def held(self) -> Held:
        """What there is at the beginning."""

    @property
    def bad_chunks(self) -> int:
        """Chunks met so far that proved bad, and are left out."""

    def parts(self) -> Iterable[list[Part]]:
        """The store, in pieces."""

    def manifest(self) -> bytes:
        """The manifest, after the store was handed out."""


def back_up(
    source: Source,
    dest: Path,
    *,
    say: Say = lambda text: None,
    on_chunk: Callable[[ChunkRecord], None] = lambda record: None,
) -> Descriptor:
    """Make a backup.

    Args:
        source: of what.
        dest: where; absent, its folder is there.
        say: told the room that is needed, before anything is made.
        on_chunk: told of each chunk that was copied.

    Durable: on return.

    Raises:
        DataDirUnusable: ``dest`` is there already, or cannot be made.
        DiskTooSmall: there is not enough room; both numbers are named.
        DataDirLocked: somebody else makes this very backup.
        FormatTooNew: a server of another version has another store.
        PersistError: source or destination failed; nothing has the backup's name.
    """
    _check_understood(source.binding)
    partial = _partial_of(dest)
    held = source.held
    capacity_bytes = copying.capacity_for(held.used_bytes, held.chunks)
    say_and_check_room(
        say,
        dest.parent,
        capacity_bytes,
        what="the backup",
        way_out="free space, or choose another place",
    )
    paths = make_data_dir(partial)
    with DataDirLock.acquire(partial) as lock:
        try:
            descriptor = _copy(source, paths, capacity_bytes, on_chunk)
            failpoints.hit("backup.before_descriptor")
            backup_file.write(partial, descriptor)
            failpoints.hit("backup.before_rename")
            os.rename(partial, dest)
            sync_folder(dest.parent)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise DataDirUnusable(
                f"backup {dest} cannot be made: {error.strerror or error}",
                hint="mend that, then back up again; nothing half-made is left",
            ) from error
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        lock.release()
    failpoints.hit("backup.after_rename")
    return descriptor


def partial_name(dest: Path) -> Path:
    """Where a backup lies while it is made."""
    return dest.with_name(dest.name + PARTIAL_SUFFIX)


def _check_understood(binding: Binding) -> None:
    if binding.store_format_version != FORMAT_VERSION:
        raise FormatTooNew(
            f"the store has format {binding.store_format_version}, expected {FORMAT_VERSION}",
            hint="back up with the version of lmcache-persist that serves it",
            found=binding.store_format_version,
            expected=FORMAT_VERSION,
        )


def _partial_of(dest: Path) -> Path:
    """Where it is made; what an interrupted backup left there is removed."""
    if os.path.lexists(dest):
        raise DataDirUnusable(
            f"{dest} is there already, expected a name for a new folder",
            hint="a backup is never written over another one: choose another name",
        )
    if not dest.parent.is_dir():
        raise DataDirUnusable(
            f"{dest.parent} is no folder, expected one to make the backup in",
            hint="make that folder first, or choose another place",
        )
    partial = partial_name(dest)
    if os.path.lexists(partial):
        existing_data_dir(partial)
        # Somebody who is still at it holds the lock.
        with DataDirLock.acquire(partial):
            shutil.rmtree(partial, ignore_errors=True)
    return partial


def _copy(
    source: Source,
    paths: DataDir,
    capacity_bytes: int,
    on_chunk: Callable[[ChunkRecord], None],
) -> Descriptor:
    """Store, then manifest; what the backup will say of itself."""
    left_out, copied = _copy_store(source, paths, capacity_bytes, on_chunk)
    manifest = _copy_manifest(source, paths)
    total, binding = copied.total, source.binding
    # What its totals count and a walk no longer finds is bad, or was evicted before its turn.
    left_out = max(left_out, source.held.chunks - total.chunks)
    return Descriptor(
        made_at=utc_now(),
        version=__version__,
        binding_id=binding.binding_id,
        chunk_size=binding.chunk_size,
        store_uuid=binding.store_uuid,
        capacity_bytes=source.held.capacity_bytes,
        chunks=total.chunks,
        objects=total.objects,
        bytes=total.nbytes,
        left_out_chunks=left_out,
        manifest_digest=blake3(manifest).hexdigest(),
        data_file_bytes=(paths.store / DATA_NAME).stat().st_size,
    )


def _copy_store(
    source: Source,
    paths: DataDir,
    capacity_bytes: int,
    on_chunk: Callable[[ChunkRecord], None],
) -> tuple[int, copying.Tally]:
    """Chunks that were left out, and what was copied."""
    binding, assembler = source.binding, Assembler()
    with copying.StoreCopy.make(paths.store, capacity_bytes, binding.store_uuid, binding) as copy:
        for parts in source.parts():
            for record, contents in assembler.feed(parts):
                copy.add(record, contents)
                on_chunk(record)
        assembler.end()
        copy.finish()
    return assembler.incomplete, copy.copied


def _copy_manifest(source: Source, paths: DataDir) -> bytes:
    data = source.manifest()
    files.write_new(paths.manifest, data)
    with contextlib.closing(Manifest.open(paths.manifest)) as manifest:
        found = manifest.binding()
        if found is not None and found != source.binding:
            # Of files that were left by a rebind which stopped before the manifest.
            manifest.rebind(found.binding_id, source.binding)
        elif found is None:
            raise DataDirUnusable(
                "the manifest that was copied is unbound, and its store is not",
                hint="lmcache-persist recover DIR rebuilds the manifest; then back up again",
            )
    return paths.manifest.read_bytes()


class FilesSource:
    """The files of a data dir that nobody serves; made by :meth:`open`."""

    def __init__(self, paths: DataDir, store: OfflineStore, binding: Binding) -> None:
        self._paths = paths
        self._store = store
        self.binding = binding
        self.bad_chunks = 0
        usage = store.usage()
        self.held = Held(
            usage.chunks, usage.objects, usage.bytes, usage.used_bytes, usage.capacity_bytes
        )

    @classmethod
    @contextlib.contextmanager
    def open(cls, data_dir: Path) -> Iterator[FilesSource]:
        """Open under the shared lock; a server that starts meanwhile is refused.

        Raises:
            DataDirLocked: a server holds the data dir: ask that one.
            DataDirUnusable: it is no data dir.
            Unbound: there is nothing to back up.
            StartupRefused, StoreDamaged: a start would not take the data dir as it is.
        """
        paths = used_data_dir(data_dir)
        with ReaderLock.acquire(data_dir):
            refuse_if_resetting(paths)
            found = recovery.look(paths, deep=crashes.crashed_last_time(paths))
            recovery.check_together(found, data_dir)
            recovery.refuse_if_damaged(found, paths)
            if found.binding is None or found.store is StoreState.ABSENT:
                raise Unbound(f"data dir {data_dir} has nothing that could be backed up")
            with OfflineStore.open(paths.store) as store:
                yield cls(paths, store, found.binding)

    def parts(self) -> Iterator[list[Part]]:
        """See :class:`Source`."""
        cursor = pieces.beginning(self._store)
        while cursor:
            piece = pieces.cut(self._store, cursor)
            self.bad_chunks += piece.bad_chunks
            yield piece.parts
            cursor = piece.cursor

    def manifest(self) -> bytes:
        """See :class:`Source`."""
        return serialized(self._paths.manifest)
