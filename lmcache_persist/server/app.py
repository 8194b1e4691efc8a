"""The start of a server.

Order of a start: look at settings and data dir -> lock -> judge what is on disk -> room,
addresses, pool -> open manifest and store -> bind if the size is fixed -> sockets -> the
start's row -> ``ready``. What can be refused is refused before the data dir is changed: up
to the pool it is only the lock file that says who starts. ``running`` goes on from there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
from typing import TYPE_CHECKING

from lmcache_persist.binding import Binding
from lmcache_persist.config import Settings
from lmcache_persist.datadir import (
    DataDir,
    DataDirLock,
    Holder,
    Modes,
    make_data_dir,
)
from lmcache_persist.filesystems import check_file_system, pool_warning
from lmcache_persist.manifest import Manifest
from lmcache_persist.server import (
    backup_file,
    ballast,
    converge,
    crashes,
    logs,
    opening,
    recovery,
    reset,
    rights,
)
from lmcache_persist.server.binder import check_start_size, settle, start_candidate
from lmcache_persist.server.first_start import FirstStart
from lmcache_persist.server.loop import check_free
from lmcache_persist.server.losses import objects_amount
from lmcache_persist.server.running import STOP_SIGNALS, Server
from lmcache_persist.server.state import utc_now
from lmcache_persist.shm import PoolPaths
from lmcache_persist.store.lmdb_disk import LmdbDisk
from lmcache_persist.store.pool import Pool
from lmcache_persist.units import format_size

if TYPE_CHECKING:
    from lmcache_persist.server.http import HttpServer
    from lmcache_persist.server.upstream import Upstream

log = logging.getLogger(__name__)


def _give_up_start(number: int, _: object) -> None:
    """A stop before the server serves: unwinds what was made, the pool above all."""
    raise SystemExit(128 + number)


def serve(settings: Settings) -> int:
    """Serve a data dir until SIGTERM or SIGINT.

    Returns:
        The exit status: 0 after a clean stop, 1 if committed chunks had to be given up or
        the store could not be closed in good order.

    Raises:
        StartupRefused: what was found, what was expected, what resolves it; nothing on
            disk was changed.
        PersistError: the start failed.
    """
    os.umask(0o077)
    logs.configure(settings.log_level, settings.log_format)
    for number in STOP_SIGNALS:
        signal.signal(number, _give_up_start)
    for line in settings.describe():
        log.info("setting %s", line)
    for warning in settings.warnings():
        log.warning("%s", warning)
    network = check_file_system(settings.data_dir, allow_network_fs=settings.allow_network_fs)
    for warning in filter(None, (network, pool_warning(settings.pool_dir))):
        log.warning("%s", warning)
    first_start = FirstStart.of(settings.data_dir)
    paths = make_data_dir(settings.data_dir, group_id=settings.group_id)
    with (
        DataDirLock.acquire(paths.root, modes=Modes.of(settings.group_id)) as lock,
        first_start.undone_if_refused(),
    ):
        backup_file.refuse_to_change(paths.root)
        if reset.is_pending(paths):
            log.warning("a reset or restore of %s was interrupted: starting empty", paths.root)
            reset.finish(paths)
        crashed = crashes.crashed_last_time(paths)
        if crashed:
            log.warning("%s: the last server crashed; checking the store", paths.crash_log)
        found = recovery.look(
            paths,
            deep=crashed,
            thorough=crashes.found_damage(paths),
            condemned=crashes.keeps_crashing(paths),
            mends=True,
        )
        recovery.warn_of_nothing(found, paths)
        decision = recovery.with_uuid(recovery.decide(found, settings), found)
        recovery.warn_of_size(found, paths, settings)
        settings = _with_capacity(settings, found)
        recovery.check_room(found, paths, settings)
        return _start(settings, first_start, lock, decision)


def _start(
    settings: Settings, first_start: FirstStart, lock: DataDirLock, decision: recovery.Decision
) -> int:
    """The rest of a start, from the last things that may refuse it on; serves."""
    paths = lock.data_dir
    boot = Holder.of_process(
        boot_id=secrets.token_hex(16), endpoint=settings.listen, started_at=utc_now()
    )
    with contextlib.ExitStack() as stack:
        first = _first_server(settings, boot, decision.binding, stack)
        if decision.binding is None:
            check_start_size(settings, first)
        http = _http(settings, stack)
        check_free(settings.listen)
        # Who starts is said now: the pool may take a while.
        lock.announce(boot)
        pool = _pool(settings, decision.store_uuid)
        stack.callback(pool.close, remove=True)
        # From here on the data dir is changed.
        ballast.give_up_if_full(paths)
        manifest = stack.enter_context(contextlib.closing(Manifest.open(paths.manifest)))
        crash_log = crashes.watch(paths, anew=decision.set_aside)
        stack.callback(crashes.unwatch, crash_log)
        disk, binding = _disk(settings, paths, decision, manifest, first)
        try:
            server = Server(settings, first_start, lock, boot, manifest, disk, pool, http)
        except BaseException:
            disk.close()
            raise
        server.state.binding = binding
        server.service.converge(first)
        server.state.writer.on_damage = lambda text: crashes.note_damage(crash_log, text)
        return server.run()


def _with_capacity(settings: Settings, found: recovery.Found) -> Settings:
    """With the size that the store is to have; says so where that is no setting, or another."""
    held = found.capacity_bytes
    if not settings.capacity_is_set:
        settings = settings.for_store(held) if held else settings
        source = "not set: the store keeps its size" if held else "default of a new store"
        log.info("setting capacity = %s (%s)", format_size(settings.capacity_bytes), source)
    elif found.grown_over_bytes == settings.capacity_bytes < held:
        # Whoever grew it live may be asleep when the machine starts its services again.
        log.warning(
            "capacity is set to %s, which the store was grown beyond while it was in use: it"
            " keeps its %s; set that, or nothing",
            format_size(settings.capacity_bytes),
            format_size(held),
        )
        settings = settings.for_grown_store(held)
    elif found.store is recovery.StoreState.PRESENT and settings.capacity_bytes > held:
        log.info(
            "the store grows from %s to %s", format_size(held), format_size(settings.capacity_bytes)
        )
    return settings


def _first_server(
    settings: Settings, boot: Holder, binding: Binding | None, stack: contextlib.ExitStack
) -> Upstream | None:
    """The server that ``--chunk-size-from`` names, asked for a bounded time.

    Raises:
        BindingMismatch: it is bound to other boundaries than this data dir.
    """
    if settings.chunk_size_from is None:
        return None
    # A client's libraries are loaded by those only who are one.
    from lmcache_persist.server.upstream import Upstream

    label = f"server of {settings.data_dir}"
    first = Upstream(settings.chunk_size_from, label, boot.boot_id)
    stack.callback(first.close)
    seen = first.wait(converge.START_WAIT_S)
    if seen is None:
        log.warning("server %s gives no answer; this one starts without", first.url)
    converge.check_agrees(first, seen, binding, settings.data_dir)
    return first


def _http(settings: Settings, stack: contextlib.ExitStack) -> HttpServer | None:
    """Where the pages are to be, taken and not yet answering."""
    if settings.http is None:
        return None
    # Prometheus costs a start 0.1 s: only those who ask for it pay.
    from lmcache_persist.server.http import HttpServer

    http = HttpServer(settings.http)
    stack.callback(http.close)
    return http


def _pool(settings: Settings, store_uuid: str | None) -> Pool:
    if store_uuid is None:
        raise ValueError("a store that is to be opened has a uuid")
    return Pool.create(
        PoolPaths.of(settings.pool_dir, store_uuid),
        settings.pool_size_bytes,
        holder=f"pid {os.getpid()} on {socket.gethostname()}, data dir {settings.data_dir}",
        wait_s=settings.pool_wait_s,
        group_gid=settings.group_id,
        on_wait=lambda text: log.warning("%s", text),
    )


def _disk(
    settings: Settings,
    paths: DataDir,
    decision: recovery.Decision,
    manifest: Manifest,
    first: Upstream | None,
) -> tuple[LmdbDisk, Binding | None]:
    """The store, opened for writing; and the binding, if the size is known at a start."""
    binding = decision.binding
    disk = opening.carry_out(decision, paths, settings, manifest)
    try:
        rights.settle(paths, Modes.of(settings.group_id))
        ballast.take(paths)
        if binding is None:
            candidate = start_candidate(settings, disk, first)
            if candidate is not None:
                binding = settle(manifest, disk, candidate)
                log.info("bound to chunk size %d by %s", binding.chunk_size, binding.winner)
        usage = disk.usage()
    except BaseException:
        disk.close()
        raise
    if usage.stale_objects:
        what = objects_amount(usage.stale_objects, usage.stale_bytes)
        log.info("%s of another binding are removed bit by bit, while nothing is stored", what)
    return disk, binding
