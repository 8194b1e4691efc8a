"""``rebind``: another chunk size for a data dir, offline and in O(1).

Order of writes: stamp of the store, with a note of the binding that it replaced (one
transaction) -> manifest row -> the note is taken back. The first one decides: a crash
before it leaves the old binding; after it the new one holds, whoever looks, and the next
start or rebind brings the manifest along.
"""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from lmcache_persist import geometry
from lmcache_persist.binding import MODE_FIXED, Binding
from lmcache_persist.datadir import DataDir, DataDirLock
from lmcache_persist.errors import AlignmentTooLarge, StoreDamaged, Unbound
from lmcache_persist.manifest import Manifest
from lmcache_persist.printable import command
from lmcache_persist.server import backup_file, crashes, recovery
from lmcache_persist.server.losses import amount_of, losses_of, per_model
from lmcache_persist.server.offline import Confirm, refuse_if_resetting, used_data_dir
from lmcache_persist.server.recovery import Found, StoreState
from lmcache_persist.server.room import Say, say_and_check_manifest_room
from lmcache_persist.server.state import utc_now
from lmcache_persist.store.format import FORMAT_VERSION
from lmcache_persist.store.lmdb_disk import LmdbDisk
from lmcache_persist.store.offline import OfflineStore
from lmcache_persist.units import moment


class Outcome(Enum):
    """What a rebind has come to."""

    BOUND = "bound"
    """There is a new binding; what was stored is stale."""
    COMPLETED = "completed"
    """A rebind to this size was interrupted, and is complete now."""
    UNCHANGED = "unchanged"
    """The data dir is bound to this size already."""


class Rebound(NamedTuple):
    """What a rebind did.

    Attributes:
        binding: that holds now. A new one has mode ``fixed``, and equals none before it.
        outcome: how it came about.
    """

    binding: Binding
    outcome: Outcome


def rebind(
    data_dir: Path,
    chunk_size: int,
    confirm: Confirm,
    *,
    max_chunk_size: int = geometry.DEFAULT_MAX_CHUNK_SIZE,
    force: bool = False,
    say: Say = lambda text: None,
) -> Rebound:
    """Bind a data dir to another chunk size; what is stored becomes stale.

    Bound to that size already, it stays as it is, and nothing is asked: to repeat a rebind
    must cost nothing. Only one that was interrupted is completed.

    Args:
        data_dir: of a server that does not run.
        chunk_size: tokens.
        confirm: called once all checks have passed, before anything is changed.
        max_chunk_size: tokens; larger ones are refused, as a server would.
        force: a new binding also to the size that it has.
        say: told the room that is needed, before anything is changed.

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
                hint="start a server with: "
                + command("serve", "--data-dir", data_dir, "--chunk-size", chunk_size),
            )
        if chunk_size == binding.chunk_size and not force:
            completed = complete(paths, found, say)
            return Rebound(binding, Outcome.COMPLETED if completed else Outcome.UNCHANGED)
        say_and_check_manifest_room(say, paths.root)
        confirm(_losses(paths, found, binding, chunk_size))
        new = _successor(binding, chunk_size)
        with contextlib.closing(Manifest.open(paths.manifest)) as manifest:
            if found.held != binding:
                manifest.rebind(found.held.binding_id, binding)
            _write(paths, found, manifest, binding, new)
    return Rebound(new, Outcome.BOUND)


def complete(paths: DataDir, found: Found, say: Say) -> bool:
    """Let the manifest follow, if a rebind was interrupted that the store has.

    Args:
        paths: the data dir's, whose lock the caller holds.
        found: in it, checked together.
        say: told the room that is needed, before anything is changed.

    Returns:
        Whether there was one.

    Durable: on return.

    Raises:
        DiskTooSmall: there is no room for the manifest; both numbers are named.
        PersistError: the disk failed.
    """
    held, binding = found.held, found.binding
    if held is None or binding is None or held == binding:
        return False
    say_and_check_manifest_room(say, paths.root)
    with contextlib.closing(Manifest.open(paths.manifest)) as manifest:
        manifest.rebind(held.binding_id, binding)
    return True


def _check_size(chunk_size: int, maximum: int) -> None:
    geometry.check_base_chunk_size(chunk_size)
    if chunk_size > maximum:
        raise AlignmentTooLarge(
            f"--chunk-size is {chunk_size}, above the maximum of {maximum}",
            hint="choose a smaller one, or raise --max-chunk-size here and at the server",
        )


def _losses(paths: DataDir, found: Found, binding: Binding, chunk_size: int) -> list[str]:
    change = (
        f"{paths.root} is bound to chunk size {binding.chunk_size} since"
        f" {moment(binding.bound_at)}; from now on it is bound to {chunk_size}"
    )
    if chunk_size == binding.chunk_size:
        change = (
            f"{paths.root} is bound to chunk size {chunk_size} already, since"
            f" {moment(binding.bound_at)};"
            " a new binding to the same size changes nothing but what follows"
        )
    if found.store is not StoreState.PRESENT:
        return [change, "there is no usable store: the next start makes an empty one"]
    with OfflineStore.open(paths.store) as store:
        losses = losses_of(store.usage())
    loss = (
        f"this throws away {amount_of(losses)}: they are never found again, and removed while a"
        " server runs"
    )
    return [change, loss, *per_model(losses, found.names)]


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
