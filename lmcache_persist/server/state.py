"""What all parts of a running server share, and how slow work leaves the loop.

Nothing on the loop waits for a disk: manifest work runs on the *clerk* (one thread, so
that it stays in order), reads of the disk tier on the *readers*, writes on the writer
thread. Results come back through the mailbox.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
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


def utc_now() -> str:
    """The wall clock as the manifest keeps it: UTC, ISO 8601 with microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


@dataclass(slots=True)
class Counters:
    """Numbers that only grow while the server lives.

    Threads: written on the loop (plain adds), read anywhere.
    """

    binds: int = 0
    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    memory_hit_chunks: int = 0
    disk_hit_chunks: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    commits: int = 0
    reserve_refused: int = 0
    not_written: int = 0
    dropped_chunks: int = 0
    disk_evictions: int = 0
    corrupt_chunks: int = 0
    read_failures: int = 0
    rejections: int = 0
    bad_messages: int = 0
    undeliverable: int = 0
    dead_clients: int = 0


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
    """The parts of one server. The loop owns all of it; see each part for its threads."""

    settings: Settings
    boot_id: str
    manifest: Manifest
    disk: DiskTier
    pool: Pool
    memory: MemoryTier
    sequence: CommitSequence
    mailbox: Mailbox
    writer: Writer
    binding: Binding | None
    endpoint: str
    started_at: str
    upstream: Upstream | None = None
    longest_turn_s: float = 0.0
    counters: Counters = field(default_factory=Counters)
    timers: Timers = field(default_factory=Timers)
    clerk: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="clerk")
    )
    readers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(NUM_READERS, thread_name_prefix="reader")
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

    def end_clerk(self, timeout_s: float) -> None:
        """Let the clerk do what it was given, for so long; drop what it did not begin.

        What it is at ends by itself: SQLite waits for a lock for a bounded time only.
        """
        last = self.clerk.submit(lambda: None)
        with contextlib.suppress(TimeoutError):
            last.result(timeout_s)
        self.clerk.shutdown(wait=True, cancel_futures=True)

    @property
    def binding_id(self) -> str:
        """The binding's id, empty while unbound: the form that messages carry."""
        return self.binding.binding_id if self.binding else ""
