"""A server from start to end.

Order of a start: look at settings and data dir -> lock -> judge what is on disk -> room,
addresses, pool -> open manifest and store -> bind if the size is fixed -> sockets -> the
start's row -> ``ready``. What can be refused is refused before the data dir is changed: up
to the pool it is only the lock file that says who starts. Order of a stop: no more messages -> what
is committed is written, for a bounded time -> clean marks -> pool removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

from lmcache_persist import __version__
from lmcache_persist.binding import Binding
from lmcache_persist.config import Settings
from lmcache_persist.datadir import (
    DataDir,
    DataDirLock,
    Holder,
    Modes,
    make_data_dir,
)
from lmcache_persist.errors import ManifestError, PersistError, StoreError
from lmcache_persist.filesystems import check_file_system, pool_warning
from lmcache_persist.manifest import BootRow, Manifest
from lmcache_persist.posix import discard_output
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
from lmcache_persist.server.assembly import assemble
from lmcache_persist.server.binder import check_start_size, settle, start_candidate
from lmcache_persist.server.first_start import FirstStart
from lmcache_persist.server.loop import check_free
from lmcache_persist.server.losses import objects_amount
from lmcache_persist.server.own_files import OwnFiles
from lmcache_persist.server.state import utc_now
from lmcache_persist.shm import PoolPaths
from lmcache_persist.store.lmdb_disk import LmdbDisk
from lmcache_persist.store.pool import Pool
from lmcache_persist.store.unsynced import kernel_boot_id
from lmcache_persist.units import format_size

if TYPE_CHECKING:
    from lmcache_persist.server.http import HttpServer
    from lmcache_persist.server.upstream import Upstream

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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


def _say_ready(endpoint: str) -> None:
    """On stdout, for whoever started it; a server that cannot say so serves all the same."""
    try:
        sys.stdout.write(f"ready {endpoint}\n")
        sys.stdout.flush()
    except OSError as error:
        log.warning("stdout cannot be written (%s); ready at %s", error.strerror, endpoint)
        discard_output(sys.stdout.fileno())


class Server:
    """A running server: runs the loop over its parts, and takes it all down again."""

    def __init__(
        self,
        settings: Settings,
        first_start: FirstStart,
        lock: DataDirLock,
        boot: Holder,
        manifest: Manifest,
        disk: LmdbDisk,
        pool: Pool,
        http: HttpServer | None,
    ) -> None:
        self._settings = settings
        self._first_start = first_start
        self._lock = lock
        self._http = http
        self._start_recorded = False
        files = OwnFiles.of(lock.data_dir)
        self.state, self.service, self.loop = assemble(
            settings, boot.boot_id, manifest, disk, pool, files, started_at=boot.started_at
        )

    def run(self) -> int:
        """Listen, say ready, serve, stop."""
        state = self.state
        clean = False
        try:
            state.endpoint = self.loop.listen(self._settings.listen)
            self._socket_mode()
            self._lock.announce(
                Holder.of_process(
                    boot_id=state.boot_id, endpoint=state.endpoint, started_at=state.started_at
                )
            )
            if self._http is not None:
                self._http.start(self.service)
            # What may be refused was not: only now this counts as a start.
            self._record_start()
            for number in STOP_SIGNALS:
                signal.signal(number, lambda *_: self.loop.stop())
            self._first_start.served()
            log.info("ready at %s", state.endpoint)
            _say_ready(state.endpoint)
            self.loop.run()
            clean = True
        finally:
            closed = self._stop(clean=clean)
        return 0 if closed else 1

    def _record_start(self) -> None:
        """For ``inspect``. On a full disk a server starts without the row: caching goes on."""
        state = self.state
        boot = BootRow(
            boot_id=state.boot_id,
            started_at=state.started_at,
            pid=os.getpid(),
            version=__version__,
            kernel_boot_id=kernel_boot_id(),
        )
        try:
            state.manifest.start_boot(boot)
            self._start_recorded = True
        except ManifestError as error:
            log.warning("this start is not recorded: %s", error)

    def _record_end(self, *, clean: bool) -> None:
        if not self._start_recorded:
            return
        try:
            self.state.manifest.end_boot(self.state.boot_id, at=utc_now(), clean=clean)
        except PersistError as error:
            log.warning("the end of this start is not recorded: %s", error)

    def _socket_mode(self) -> None:
        if self.state.endpoint.startswith("ipc://"):
            path = self.state.endpoint.removeprefix("ipc://")
            gid = self._settings.group_id
            if gid is not None:
                os.chown(path, -1, gid)
            os.chmod(path, 0o600 if gid is None else 0o660)

    def _stop(self, *, clean: bool) -> bool:
        """Take it all down in bounded time; whether the store was closed in good order.

        If the disk hangs, the process ends right here, with exit status 1.
        """
        state, deadline = self.state, time.monotonic() + self._settings.shutdown_timeout_s
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # it stops already, and that takes bounded time
        self.service.growing.stop()
        self.loop.close()
        if self._http is not None:
            self._http.close()
        if state.upstream is not None:
            state.upstream.close()
        state.end_readers()
        drained = state.writer.close(max(0.1, deadline - time.monotonic()))
        recorded = state.end_clerk(max(0.1, deadline - time.monotonic()))
        grown = self.service.growing.ended(max(0.1, deadline - time.monotonic()))
        closed, hangs = False, not (drained and recorded and grown)
        # Not looked at again on a disk that hangs.
        lost = self._lost() if not hangs else bool(state.files.gone)
        if not drained:
            log.error("the disk did not take all committed chunks in time; giving them up")
        elif recorded and grown:
            try:
                state.disk.close(max(1.0, deadline - time.monotonic()))
                closed = True
            except StoreError as error:
                # The next start finds no clean mark, and what was durable.
                log.error("the store is not closed in good order: %s", error)
                hangs = state.readers_hang()
        if recorded:
            self._record_end(clean=clean and closed)
        state.pool.close(remove=True)
        if hangs:
            # A thread hangs in the disk: nothing may be closed under it, nothing waits for it.
            sys.stdout.flush()
            os._exit(1)
        state.files.close()
        state.mailbox.close()
        log.info("stopped")
        return closed and not lost

    def _lost(self) -> bool:
        """Whether the store ends in files that the next start does not find; says so."""
        files = self.state.files
        if files.look():
            return False
        try:
            usage = self.state.disk.usage()
            what = objects_amount(usage.objects, usage.bytes)
        except (StoreError, OSError) as error:
            what = f"what is stored ({error})"
        rescue = "" if files.removed else ", if it is not moved back before the next start"
        log.error("%s: with this stop %s are lost%s", files.gone, what, rescue)
        return True
