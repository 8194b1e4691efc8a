"""The writer thread: takes committed chunks, puts many into one disk transaction.

Order of a commit: slots pinned -> extents and records in one transaction -> sync -> the
file is still in its place -> outcome posted to the loop, which publishes ``durable_seq``
and unpins the slots. While one transaction syncs, the next batch gathers in the queue:
that is the whole of group commit.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from lmcache_persist.errors import StoreBusy, StoreDamaged, StoreError, StoreFull
from lmcache_persist.store.base import (
    MAX_PENDING_TOUCHES,
    ChunkKey,
    ChunkWrite,
    DiskTier,
    DropReason,
    Place,
)
from lmcache_persist.store.throttle import Throttle

log = logging.getLogger(__name__)

MAX_BATCH_BYTES = 64 << 20
"""Bytes of one transaction: long enough to amortise a sync, short enough to bound a wait."""
MAX_BATCH_CHUNKS = 1024
IDLE_S = 0.5
"""Seconds between rounds when nothing is written: touches are applied, room is made."""
SWEEP_S = 0.25
"""Seconds of an idle round that stale chunks are removed for: no more than half of the disk."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WriteJob:
    """One chunk to write; ``token`` is the loop's own and comes back with the outcome.

    ``committed_s`` is the monotonic time of the commit that made it ready.
    """

    key: ChunkKey
    objects: Mapping[Place, memoryview]
    token: object
    committed_s: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all objects."""
        return sum(len(view) for view in self.objects.values())


class Task:
    """Something else to do with the disk tier, between batches; its result is a future."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.action = action
        self.future: Future[Any] = Future()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a batch, or of a round without one.

    Attributes:
        jobs: with whether each is durable.
        evicted: gone from disk.
        dropped: why, of jobs that are not durable; the disk failed where it says nothing.
        seconds: that the write took, its sync included; None without one, or if it failed.
        swept: stale objects removed.
    """

    jobs: Sequence[tuple[WriteJob, bool]] = ()
    evicted: Sequence[ChunkKey] = ()
    dropped: Mapping[ChunkKey, DropReason] = field(default_factory=dict)
    seconds: float | None = None
    swept: int = 0


class Writer:
    """Owns all writing to a disk tier.

    Args:
        disk: the tier; nobody else writes to it while this lives.
        deliver: called on the writer thread with each :class:`Outcome`; must not block.
        in_place: whether what is written can be found again; asked on the writer thread.

    Attributes:
        on_damage: called on the writer thread when the store's structure is found broken.
        failures: disk actions that failed so far.
        last_error: of the last disk action that failed.
        failing: whether no write succeeded since then.
        busy_since_s: monotonic time at which the disk action under way began, else None.

    Threads: ``submit``, ``touch``, ``drop``, ``run`` any; ``close`` one.
    """

    def __init__(
        self,
        disk: DiskTier,
        deliver: Callable[[Outcome], None],
        in_place: Callable[[], bool] = lambda: True,
    ) -> None:
        self._disk = disk
        self._deliver = deliver
        self._in_place = in_place
        self._queue: queue.SimpleQueue[WriteJob | Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._touched: deque[Sequence[ChunkKey]] = deque()
        self._touched_chunks = 0
        self._bad: list[Mapping[ChunkKey, int]] = []
        self._swept = 0
        self._failed, self._not_stored = Throttle(log), Throttle(log)
        self.on_damage: Callable[[str], None] = lambda text: None
        self.failures = 0
        self.failing = False
        self.last_error: str | None = None
        self.busy_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def backlog(self) -> int:
        """Jobs that wait."""
        return self._queue.qsize()

    def submit(self, job: WriteJob) -> None:
        """Queue a chunk; its slots stay untouched until the outcome is delivered."""
        self._queue.put(job)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Record hits of a prompt's chunks, head to tail; durable with a later batch.

        While the disk hangs, the oldest of very many are forgotten: they only order eviction.
        """
        with self._lock:
            self._touched.append(keys)
            self._touched_chunks += len(keys)
            while self._touched_chunks > MAX_PENDING_TOUCHES and len(self._touched) > 1:
                self._touched_chunks -= len(self._touched.popleft())

    def drop(self, copies: Mapping[ChunkKey, int]) -> None:
        """Remove chunks that are proven bad, before anything else is written.

        ``copies`` as for :meth:`DiskTier.drop`: what was stored since they were read stays.
        """
        with self._lock:
            self._bad.append(copies)

    def run(self, action: Callable[[], T]) -> Future[T]:
        """Have ``action`` done on the writer thread, after what is queued now.

        It should be short: commits wait for it. Its future is cancelled if the thread ends.
        """
        task = Task(action)
        self._queue.put(task)
        return task.future

    def close(self, timeout_s: float) -> bool:
        """Write what is queued, then end; False if that took too long (the rest is lost)."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        running = True
        while running:
            batch, task, running = self._gather()
            self._housekeeping()
            if batch:
                self._write(batch)
            if task is not None:
                self._do(task)
            if not batch and task is None:
                self._guard(self._disk.apply_touches)
            if running:
                self._make_room()
            if running and not batch and task is None:
                self._sweep()
        self._cancel_tasks()

    def _gather(self) -> tuple[list[WriteJob], Task | None, bool]:
        """Jobs up to the next task, that task, and whether to go on after them."""
        try:
            job = self._queue.get(timeout=IDLE_S)
        except queue.Empty:
            return [], None, True
        batch: list[WriteJob] = []
        nbytes = 0
        while isinstance(job, WriteJob):
            batch.append(job)
            nbytes += job.nbytes
            if nbytes >= MAX_BATCH_BYTES or len(batch) >= MAX_BATCH_CHUNKS:
                return batch, None, True
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                return batch, None, True
        return batch, job, job is not None

    def _do(self, task: Task) -> None:
        def action() -> None:
            try:
                task.future.set_result(task.action())
            except (StoreFull, StoreBusy) as error:
                task.future.set_exception(error)  # says nothing about the disk
            except BaseException as error:
                task.future.set_exception(error)
                raise

        if task.future.set_running_or_notify_cancel():
            self._guard(action)

    def _cancel_tasks(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                left = self._queue.get_nowait()
                if isinstance(left, Task):
                    left.future.cancel()

    def _housekeeping(self) -> None:
        with self._lock:
            touched, self._touched, self._touched_chunks = self._touched, deque(), 0
            bad, self._bad = self._bad, []
        for keys in touched:
            self._disk.touch(keys)
        for copies in bad:
            self._guard(lambda: self._disk.drop(copies))  # noqa: B023 - called now

    def _write(self, batch: list[WriteJob]) -> None:
        gone = {job.key: DropReason.STORE_GONE for job in batch}
        outcome = Outcome([(job, False) for job in batch], dropped=gone)
        if self._in_place():
            written = self._written(batch)
            # Asked again: a file that went away meanwhile took the batch along.
            if self._in_place():
                outcome = written
            else:  # what made room is gone, wherever the file is
                outcome = replace(outcome, evicted=written.evicted)
        self._deliver(outcome)

    def _written(self, batch: list[WriteJob]) -> Outcome:
        outcome = Outcome([(job, False) for job in batch])

        def write() -> None:
            nonlocal outcome
            begin_s = time.monotonic()
            report = self._disk.write([ChunkWrite(job.key, job.objects) for job in batch])
            self.failing = False
            durable = set(report.written)
            outcome = Outcome(
                [(job, job.key in durable) for job in batch],
                report.evicted,
                {key: kind for key, _, kind in report.dropped},
                time.monotonic() - begin_s,
            )
            for key, reason, _ in report.dropped:
                self._not_stored.warning(f"chunk {key.hex()[-16:]} not stored: {reason}")

        self._guard(write)
        return outcome

    def _make_room(self) -> None:
        while self._queue.empty():
            evicted: list[ChunkKey] = []
            self._guard(lambda: evicted.extend(self._disk.evict()))  # noqa: B023 - called now
            if not evicted:
                return
            self._deliver(Outcome(evicted=evicted))

    def _sweep(self) -> None:
        """Remove stale chunks for a while, as long as nothing waits to be written."""
        until = time.monotonic() + SWEEP_S
        more = True

        def sweep() -> None:
            nonlocal more
            swept = self._disk.sweep_stale()
            more = swept > 0
            self._swept += swept
            if more:
                self._deliver(Outcome(swept=swept))
            elif self._swept:
                log.info("%d stale objects are removed", self._swept)
                self._swept = 0

        while more and self._queue.empty() and time.monotonic() < until:
            more = False  # also if the disk fails
            self._guard(sweep)

    def _guard(self, action: Callable[[], object]) -> None:
        """Run a disk action; a failing disk costs cache, never the thread."""
        self.busy_since_s = time.monotonic()
        try:
            action()
        except StoreError as error:
            self._note_failure(str(error))
            if isinstance(error, StoreDamaged):
                self.on_damage(error.message)
        except OSError as error:
            self._note_failure(f"{type(error).__name__}: {error}")
        finally:
            self.busy_since_s = None

    def _note_failure(self, text: str) -> None:
        self.failures += 1
        self.failing = True
        self.last_error = text
        self._failed.warning(f"disk tier: {text}")
