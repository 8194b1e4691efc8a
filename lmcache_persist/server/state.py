"""What all parts of a running server share, and how slow work leaves the loop.

Nothing on the loop waits for a disk: manifest work runs on the *clerk* (one thread, so
that it stays in order), the disk tier's index is searched by the *finder*, its objects are
read by the *readers*, writes are the writer thread's. So a disk that hangs below the readers
delays no lookup that wants nothing of it. Results come back through the mailbox.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from lmcache_persist.binding import Binding
from lmcache_persist.config import Settings
from lmcache_persist.manifest import Manifest
from lmcache_persist.server.mailbox import Mailbox
from lmcache_persist.server.metrics import Counters, Histograms
from lmcache_persist.server.own_files import OwnFiles
from lmcache_persist.store.base import DiskTier
from lmcache_persist.store.memory import MemoryTier
from lmcache_persist.store.pool import Pool
from lmcache_persist.store.sequence import CommitSequence
from lmcache_persist.store.writer import Writer

if TYPE_CHECKING:
    from lmcache_persist.server.upstream import Upstream

T = TypeVar("T")

NUM_READERS = 2
"""Threads that read the disk tier; two keep a disk busy, and two cores are the small case."""

_READING = ("finder", "reader")


def utc_now() -> str:
    """The wall clock as the manifest keeps it: UTC, ISO 8601 with microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


class Timers:
    """Callables with a time, for the loop."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._tiebreak = itertools.count()

    def call_in(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run ``action`` on the loop after ``delay_s`` seconds."""
        heapq.heappush(self._heap, (time.monotonic() + delay_s, next(self._tiebreak), action))

    def run_due(self) -> None:
        """Run what is due."""
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()

    def next_in_s(self, at_most: float) -> float:
        """Seconds until the next one is due, ``at_most`` if that is sooner."""
        if not self._heap:
            return at_most
        return max(0.0, min(at_most, self._heap[0][0] - time.monotonic()))


@dataclass(slots=True)
class ServerState:
    """The parts of one server. The loop owns all of it; see each part for its threads.

    Attributes:
        files: of the data dir, and whether they are still in their place.
        reading: disk reads under way, by a number, with the monotonic time of their start.
        started_s: monotonic time of the start.
        turned_s: of the loop's last turn.
    """

    settings: Settings
    boot_id: str
    manifest: Manifest
    disk: DiskTier
    pool: Pool
    memory: MemoryTier
    sequence: CommitSequence
    mailbox: Mailbox
    writer: Writer
    files: OwnFiles
    binding: Binding | None
    endpoint: str
    started_at: str
    upstream: Upstream | None = None
    longest_turn_s: float = 0.0
    counters: Counters = field(default_factory=Counters)
    histograms: Histograms = field(default_factory=Histograms)
    reading: dict[int, float] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)
    turned_s: float = field(default_factory=time.monotonic)
    timers: Timers = field(default_factory=Timers)
    clerk: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="clerk")
    )
    finder: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix=_READING[0])
    )
    readers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(NUM_READERS, thread_name_prefix=_READING[1])
    )

    def run(
        self,
        executor: ThreadPoolExecutor,
        work: Callable[[], T],
        then: Callable[[Future[T]], None],
    ) -> None:
        """Do ``work`` on another thread, then call ``then`` with its future on the loop."""
        executor.submit(work).add_done_callback(
            lambda future: self.mailbox.post(lambda: then(future))
        )

    def run_on_writer(self, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        """As :meth:`run`, on the writer thread."""
        self.writer.run(work).add_done_callback(
            lambda future: self.mailbox.post(lambda: then(future))
        )

    def end_readers(self) -> None:
        """Have finder and readers end; what they did not begin is dropped."""
        for executor in (self.finder, self.readers):
            executor.shutdown(wait=False, cancel_futures=True)

    def readers_hang(self) -> bool:
        """Whether one of them is still at something, a while after :meth:`end_readers`."""
        return any(thread.name.startswith(_READING) for thread in threading.enumerate())

    def end_clerk(self, timeout_s: float) -> bool:
        """Let the clerk do what it was given, for so long; drop what it did not begin.

        Returns:
            Whether it is done; else its thread waits for a lock or hangs in the disk.
        """
        last = self.clerk.submit(lambda: None)
        done = False
        with contextlib.suppress(TimeoutError):
            last.result(timeout_s)
            done = True
        self.clerk.shutdown(wait=done, cancel_futures=True)
        return done

    @property
    def binding_id(self) -> str:
        """The binding's id, empty while unbound: the form that messages carry."""
        return self.binding.binding_id if self.binding else ""
