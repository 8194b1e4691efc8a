"""``resize`` of a live server: its disk tier grows while it serves.

The room is taken on a thread of its own, then the writer thread takes the capacity into
use between its batches. Whoever asked asks again until that is done; if he does not, it is
done all the same. One growth at a time.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from concurrent.futures import CancelledError, Future
from typing import Any

from lmcache_persist import protocol
from lmcache_persist.datadir import DataDir
from lmcache_persist.errors import PersistError, StoreBusy, StoreError, StoreIOError
from lmcache_persist.server.state import ServerState
from lmcache_persist.server.wire import Answer
from lmcache_persist.store import capacity
from lmcache_persist.units import format_size

log = logging.getLogger(__name__)

GIVE_UP_S = 20.0
"""Seconds that a growth waits for reads and writes in progress to let it in."""
_RETRY_S = 0.25
_LOOK_S = 0.5


class LiveGrow:
    """Answers ``admin.grow``.

    Threads: the loop; ``stop`` and ``ended`` after it.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._numbers = itertools.count(1)
        self._last: _Growth | None = None

    def grow(self, message: protocol.AdminGrow, answer: Answer) -> None:
        """Start or join a growth, or tell how far it is; its refusal, if it failed.

        Raises:
            ConfigError: the capacity is less than the store's, or none.
            StoreBusy: the store grows to another one; or reads and writes did not let it in.
            DiskTooSmall: there is no such room; both numbers are named.
            StoreGone: the data dir does not hold the file that is in use any more.
            StoreError: the disk failed.
        """
        last = self._last
        if message.growth:
            if last is None or last.number != message.growth:
                raise StoreBusy(
                    f"growth {message.growth} is over, and another one was begun since",
                    hint="resize again",
                )
        elif last is None or last.result.done():
            last = self._start(message.capacity_bytes)
        elif last.capacity_bytes != message.capacity_bytes:
            raise StoreBusy(
                f"the store grows to {format_size(last.capacity_bytes)} already",
                hint="wait for that, then resize again",
            )
        answer(protocol.JsonReply(body=json.dumps(last.document()).encode()))

    def _start(self, capacity_bytes: int) -> _Growth:
        held = self._state.disk.capacity_bytes
        capacity.grown(capacity.PageBudget.of(held), capacity_bytes)
        self._last = _Growth(self._state, next(self._numbers), held, capacity_bytes)
        return self._last

    def stop(self) -> None:
        """Have a growth end early: what is allocated is given back, now or by the next start."""
        if self._last is not None:
            self._last.stop()

    def ended(self, timeout_s: float) -> bool:
        """Wait until no growth is under way; False if its thread hangs in the disk."""
        return self._last is None or self._last.ended(timeout_s)


class _Growth:
    """One growth, on a thread of its own.

    Attributes:
        result: objects in the store afterwards.

    Threads: any.
    """

    def __init__(
        self, state: ServerState, number: int, before_bytes: int, capacity_bytes: int
    ) -> None:
        self.number = number
        self.before_bytes = before_bytes
        self.capacity_bytes = capacity_bytes
        self.result: Future[int] = Future()
        self._state = state
        self._phase = "allocating"
        self._allocated_bytes = 0
        self._available_bytes: int | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="grower", daemon=True)
        self._thread.start()

    def document(self) -> dict[str, Any]:
        """How far it is. Raises what it failed with."""
        done, settings = self.result.done(), self._state.settings
        return {
            "growth": self.number,
            "phase": "done" if done else self._phase,
            "capacity_before_bytes": self.before_bytes,
            "capacity_bytes": self.capacity_bytes,
            "needed_bytes": self.capacity_bytes - self.before_bytes,
            "available_bytes": self._available_bytes,
            "allocated_bytes": self._allocated_bytes,
            "objects": self.result.result() if done else None,
            "capacity_set_bytes": settings.capacity_set_bytes,
            "capacity_set_by": settings.capacity_set_by,
        }

    def stop(self) -> None:
        """End early, if that is possible."""
        self._stopping.set()

    def ended(self, timeout_s: float) -> bool:
        """Wait for its end, for so long; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            objects = self._grow()
        except BaseException as error:  # noqa: BLE001 - raised where it is asked for
            log.warning("growth to %s: %s", format_size(self.capacity_bytes), error)
            self.result.set_exception(error)
        else:
            self.result.set_result(objects)

    def _grow(self) -> int:
        disk = self._state.disk
        self._state.files.require()
        if self.capacity_bytes > self.before_bytes:
            self._available_bytes = self._available()
            disk.allocate(self.capacity_bytes, self._on_piece)
        self._phase = "waiting"
        try:
            self._take_into_use()
        except StoreError:
            disk.give_back()
            raise
        if self.capacity_bytes > self.before_bytes:
            before, after = format_size(self.before_bytes), format_size(self.capacity_bytes)
            log.info("the store grew from %s to %s while in use", before, after)
        return disk.usage().objects

    def _available(self) -> int:
        folder = DataDir(self._state.settings.data_dir).store
        try:
            stats = os.statvfs(folder)
        except OSError as error:
            raise StoreIOError(f"{folder} cannot be looked at: {error.strerror}") from error
        return stats.f_bavail * stats.f_frsize

    def _on_piece(self, allocated_bytes: int) -> None:
        self._allocated_bytes = allocated_bytes
        self._check_stop()

    def _check_stop(self) -> None:
        if self._stopping.is_set():
            raise PersistError("the server stops", hint="resize while it is stopped, or later")

    def _take_into_use(self) -> None:
        until_s = time.monotonic() + GIVE_UP_S
        disk, writer = self._state.disk, self._state.writer

        def grow() -> None:
            self._state.files.require()
            disk.grow(self.capacity_bytes, over_bytes=self._over())

        while True:
            # Not on the writer: commits go on while a read hangs.
            if not disk.reads_end(max(0.0, until_s - time.monotonic())):
                raise _not_let_in("read")
            self._check_stop()
            task = writer.run(grow)
            try:
                self._wait_for(task, until_s)
            except StoreBusy:
                if time.monotonic() > until_s:
                    raise
                self._stopping.wait(_RETRY_S)
            else:
                return

    def _over(self) -> int:
        """The capacity setting that this overtakes, 0 for none."""
        set_to = self._state.settings.capacity_set_bytes or 0
        return set_to if set_to < self.capacity_bytes else 0

    def _wait_for(self, task: Future[None], until_s: float) -> None:
        """Wait for the writer; once it is at it, nothing is given back before it is done."""
        try:
            while True:
                try:
                    task.result(_LOOK_S)
                except TimeoutError:
                    if task.running() or (self._stopping.is_set() and task.cancel()):
                        self._check_stop()
                    elif time.monotonic() > until_s and task.cancel():
                        raise _not_let_in("written") from None
                else:
                    return
        except CancelledError as error:
            raise PersistError("the server stops") from error


def _not_let_in(what: str) -> StoreBusy:
    return StoreBusy(
        f"the store is being {what} for more than {GIVE_UP_S:g} s; it is as it was",
        hint="resize again when the disk has less to do; if it hangs: docs/troubleshooting.md",
    )
