"""What wakes the I/O thread: work handed in by other threads, and time. No sockets."""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable

Work = Callable[[], None]


class Inbox:
    """A bounded queue of work with a file descriptor to poll on.

    Threads: :meth:`put` any; the rest the I/O thread.
    """

    def __init__(self, limit: int) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._limit = limit
        self._queue: deque[Work] = deque()
        self._guard = threading.Lock()
        self._closed = False

    def put(self, work: Work, *, always: bool = False) -> bool:
        """Queue ``work``; False if the thread has ended or, unless ``always``, it is full."""
        with self._guard:
            if self._closed or (len(self._queue) >= self._limit and not always):
                return False
            self._queue.append(work)
            os.eventfd_write(self.fd, 1)
        return True

    def run(self, *, woken: bool) -> None:
        """Do what is queued now; ``woken`` if the descriptor was readable."""
        if woken:
            os.eventfd_read(self.fd)
        for _ in range(len(self._queue)):
            self._queue.popleft()()

    def refuse(self) -> None:
        """Take nothing more."""
        with self._guard:
            self._closed = True

    def close(self) -> None:
        """After :meth:`refuse`: do what is left, and close the descriptor."""
        while self._queue:
            self._queue.popleft()()
        os.close(self.fd)


class Timers:
    """Work for later. Threads: the I/O thread."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Work]] = []
        self._numbers = itertools.count()

    def add(self, delay_s: float, work: Work) -> None:
        """Run ``work`` after ``delay_s``."""
        when = time.monotonic() + max(0.0, delay_s)
        heapq.heappush(self._heap, (when, next(self._numbers), work))

    def sleep_s(self, longest_s: float) -> float:
        """Seconds until the next is due, ``longest_s`` at most."""
        if not self._heap:
            return longest_s
        return min(longest_s, max(0.0, self._heap[0][0] - time.monotonic()))

    def run_due(self) -> None:
        """Run what is due now; what that adds waits for the next turn."""
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()
