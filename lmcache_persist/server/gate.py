"""Verbs on a live server do one piece of work at a time, so that engines always find a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from lmcache_persist.errors import PersistError, StoreIOError
from lmcache_persist.server.wire import Answer

MAX_WAITING = 16

T = TypeVar("T")
Run = Callable[[Callable[[], T], Callable[["Future[T]"], None]], None]
"""Does some work elsewhere, then calls back on the loop with its future."""


class Gate:
    """Lets one piece of work through at a time; a bounded number waits.

    Args:
        what: the work, for the refusal.

    Threads: the loop; the work runs elsewhere.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._queue: deque[Callable[[], None]] = deque()
        self._busy = False

    def pass_through(
        self, run: Run[T], work: Callable[[], T], answer: Answer, then: Callable[[T], None]
    ) -> None:
        """Do ``work`` when its turn comes, then ``then`` with its result; errors are answered.

        Raises:
            StoreIOError: too much waits already.
        """
        if len(self._queue) >= MAX_WAITING:
            raise StoreIOError(
                f"{MAX_WAITING} requests to {self._what} wait already", hint="try again later"
            )

        def done(future: Future[T]) -> None:
            self._busy = False
            self._next()
            try:
                result = future.result()
            except PersistError as error:
                answer(error)
            except OSError as error:
                answer(StoreIOError(f"the server cannot {self._what}: {error}"))
            else:
                then(result)

        self._queue.append(lambda: run(work, done))
        self._next()

    def _next(self) -> None:
        if self._queue and not self._busy:
            self._busy = True
            self._queue.popleft()()
