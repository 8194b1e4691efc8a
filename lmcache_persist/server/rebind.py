"""``rebind``: another chunk size for a data dir, offline and in O(1).

Order of writes: stamp of the store, with a note of the binding that it replaced (one
transaction) -> manifest row -> the note is taken back. The first one decides: a crash
before it leaves the old binding; after it the new one holds, whoever looks, and the next
start or rebind brings the manifest along.
"""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta
from pathlib import Path

from lmcache_persist import geometry
from lmcache_persist.binding import MODE_FIXED, Binding
from lmcache_persist.datadir import DataDir, DataDirLock
from lmcache_persist.errors import AlignmentTooLarge, StoreDamaged, Unbound
from lmcache_persist.manifest import Manifest
from lmcache_persist.server import backup_file, crashes, recovery
from lmcache_persist.server.losses import amount, per_model, rows_of
from lmcache_persist.server.offline import Confirm, refuse_if_resetting, used_data_dir
from lmcache_persist.server.recovery import Found, StoreState
from lmcache_persist.server.room import Say, say_and_check_manifest_room
from lmcache_persist.server.state import utc_now
from lmcache_persist.store.format import FORMAT_VERSION
from lmcache_persist.store.lmdb_disk import LmdbDisk
from lmcache_persist.store.offline import OfflineStore


def rebind(
    data_dir: Path,
    chunk_size: int,
    confirm: Confirm,
    *,
    max_chunk_size: int = geometry.DEFAULT_MAX_CHUNK_SIZE,
    say: Say = lambda text: None,
) -> Binding:
    """Bind a data dir to another chunk size; what is stored becomes stale.

    Args:
        data_dir: of a server that does not run.
        chunk_size: tokens.
        confirm: called once all checks have passed, before anything is changed.
        max_chunk_size: tokens; larger ones are refused, as a server would.
        say: told the room that is needed, before anything is changed.

    Returns:
        The new binding, in mode ``fixed``, equal to none before it.

    Durable: on return. Threads: one, with no other in the process.

    Raises:
        GeometryError: no chunk size, or too large a one.
        DataDirLocked: a server holds the data dir.
        DiskTooSmall: there is no room for the manifest; both numbers are named.
        Unbound: there is no binding to replace.
        StartupRefused: what is there does not belong together; nothing was changed.
        PersistError: the disk failed; the old binding holds or the new one.
    """
    _check_size(chunk_size, max_chunk_size)
    paths = used_data_dir(data_dir)
    with DataDirLock.acquire(paths.root):
        backup_file.refuse_to_change(paths.root)
        refuse_if_resetting(paths)
        found = recovery.look(paths, deep=crashes.crashed_last_time(paths))
        recovery.check_together(found, data_dir)
        binding = found.binding
        if binding is None or found.held is None:
            raise Unbound(
                f"data dir {data_dir} is not bound yet, expected one that is",
                hint=f"lmcache-persist serve --data-dir {data_dir} --chunk-size {chunk_size}",
            )
        say_and_check_manifest_room(say, paths.root)
        confirm(_losses(paths, found, binding, chunk_size))
        new = _successor(binding, chunk_size)
        with contextlib.closing(Manifest.open(paths.manifest)) as manifest:
            if found.held != binding:
                manifest.rebind(found.held.binding_id, binding)
            _write(paths, found, manifest, binding, new)
    return new


def _check_size(chunk_size: int, maximum: int) -> None:
    geometry.check_base_chunk_size(chunk_size)
    if chunk_size > maximum:
        raise AlignmentTooLarge(
            f"--chunk-size is {chunk_size}, above the maximum of {maximum}",
            hint="choose a smaller one, or raise --max-chunk-size here and at the server",
        )


def _losses(paths: DataDir, found: Found, binding: Binding, chunk_size: int) -> list[str]:
    change = (
        f"{paths.root} is bound to chunk size {binding.chunk_size} since {binding.bound_at};"
        f" from now on it is bound to {chunk_size}"
    )
    if found.store is not StoreState.PRESENT:
        return [change, "there is no usable store: the next start makes an empty one"]
    with OfflineStore.open(paths.store) as store:
        usage = store.usage()
    loss = (
        f"this throws away {amount(usage.objects, usage.bytes)}: they are never found again, and"
        " removed while a server runs"
    )
    return [change, loss, *per_model(rows_of(usage), found.names)]


def _successor(before: Binding, chunk_size: int) -> Binding:
    return Binding.make(
        chunk_size=chunk_size,
        required_alignment=chunk_size,
        base_chunk_size=chunk_size,
        mode=MODE_FIXED,
        bound_at=_later_than(before.bound_at),
        winner="rebind",
        backend=before.backend,
        store_uuid=before.store_uuid,
        store_format_version=FORMAT_VERSION,
    )


def _later_than(before: str) -> str:
    """The time now; a little after ``before`` if the clock was set back behind it.

    The time is what tells two bindings of one store apart, so that it must never repeat.
    """
    now = utc_now()
    try:
        earliest = datetime.fromisoformat(before) + timedelta(microseconds=1)
        if datetime.fromisoformat(now) >= earliest:
            return now
    except (ValueError, TypeError):
        return now  # no time of ours, so not this one either
    return earliest.isoformat(timespec="microseconds")


def _write(
    paths: DataDir, found: Found, manifest: Manifest, binding: Binding, new: Binding
) -> None:
    if found.store is not StoreState.PRESENT:
        # Nothing is stamped: the next start makes a store for whatever the manifest says.
        manifest.rebind(binding.binding_id, new)
        return
    with contextlib.closing(LmdbDisk.open(paths.store, found.capacity_bytes)) as disk:
        if disk.uuid != binding.store_uuid:
            raise StoreDamaged(f"the store in {paths.store} is another one than a moment ago")
        disk.restamp(new, replaces=binding.binding_id)
        manifest.rebind(binding.binding_id, new)
        disk.finish_rebind()
