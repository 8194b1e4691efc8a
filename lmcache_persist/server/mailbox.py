"""How other threads hand work to the server's loop: a queue and an eventfd."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable


class Mailbox:
    """Callables to run on the loop, in order of arrival.

    Threads: ``post`` any; the rest the loop.
    """

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        # Reentrant: a signal handler may post while this thread posts.
        self._open = threading.RLock()
        self._closed = False
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def post(self, action: Callable[[], None]) -> None:
        """Have ``action`` run on the loop soon. Safe in signal handlers.

        After :meth:`close` it is dropped: the descriptor's number may be another file's by
        then, and a thread that hung in the disk may come back at any time.
        """
        with self._open:
            if not self._closed:
                self._queue.append(action)
                os.eventfd_write(self.fd, 1)

    def drain(self, run: Callable[[Callable[[], None]], None]) -> None:
        """Have ``run`` do each of what has arrived; it must not raise, or the rest waits."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        # Only what is there now: an action that posts again must not starve the sockets.
        for _ in range(len(self._queue)):
            run(self._queue.popleft())

    def close(self) -> None:
        """Free the descriptor; what is posted from now on is dropped."""
        with self._open:
            self._closed = True
            os.close(self.fd)
