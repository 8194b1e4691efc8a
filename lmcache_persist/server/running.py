"""A server that runs, from its address on to its stop.

Order of a stop: no more messages -> what is committed is written, for a bounded time ->
clean marks -> pool removed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from lmcache_persist import __version__
from lmcache_persist.config import Settings
from lmcache_persist.datadir import DataDirLock, Holder
from lmcache_persist.errors import ManifestError, PersistError, StoreError
from lmcache_persist.manifest import BootRow, Manifest
from lmcache_persist.posix import discard_output
from lmcache_persist.server.assembly import assemble
from lmcache_persist.server.first_start import FirstStart
from lmcache_persist.server.losses import objects_amount
from lmcache_persist.server.own_files import OwnFiles
from lmcache_persist.server.state import utc_now
from lmcache_persist.store.lmdb_disk import LmdbDisk
from lmcache_persist.store.pool import Pool
from lmcache_persist.store.unsynced import kernel_boot_id

if TYPE_CHECKING:
    from lmcache_persist.server.http import HttpServer

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
