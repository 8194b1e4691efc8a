"""So many log lines of one kind per 30 s: a broken disk must not fill another one."""

from __future__ import annotations

import logging
import threading
import time

LOG_EVERY_S = 30.0


class Throttle:
    """Log lines of one kind.

    Args:
        log: where they go.
        every_s: seconds that the count of ``burst`` is over.
        burst: lines in that time; more are counted and told of with a later one.

    Threads: any.
    """

    def __init__(
        self, log: logging.Logger, every_s: float = LOG_EVERY_S, *, burst: int = 1
    ) -> None:
        self._log = log
        self._every_s, self._burst = every_s, burst
        self._lock = threading.Lock()
        self._last_s: float | None = None
        self._said = 0
        self._unsaid = 0

    def info(self, text: str) -> None:
        """Say ``text``, with the number of those not said since the last one, or nothing."""
        self._say(logging.INFO, text)

    def warning(self, text: str) -> None:
        """As :meth:`info`."""
        self._say(logging.WARNING, text)

    def error(self, text: str, *, trace: bool = False) -> None:
        """As :meth:`info`; ``trace`` adds that of the exception being handled."""
        self._say(logging.ERROR, text, trace)

    def _say(self, level: int, text: str, trace: bool = False) -> None:
        with self._lock:
            now = time.monotonic()
            if self._last_s is None or now - self._last_s >= self._every_s:
                self._last_s, self._said = now, 0
            if self._said >= self._burst:
                self._unsaid += 1
                return
            self._said += 1
            unsaid, self._unsaid = self._unsaid, 0
        more = f" (and {unsaid} more like it before)" if unsaid else ""
        self._log.log(level, "%s%s", text, more, exc_info=trace)
