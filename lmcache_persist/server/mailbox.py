"""How other threads hand work to the server's loop: a queue and an eventfd."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable


class Mailbox:
    """Callables to run on the loop, in order of arrival.

    Threads: ``post`` any; the rest the loop.
    """

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def post(self, action: Callable[[], None]) -> None:
        """Have ``action`` run on the loop soon. Safe in signal handlers."""
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
        """Free the descriptor."""
        os.close(self.fd)
