"""A log line of one kind at most every 30 s: a broken disk must not fill another one."""

from __future__ import annotations

import logging
import threading
import time

LOG_EVERY_S = 30.0


class Throttle:
    """Warnings of one kind.

    Args:
        log: where they go.
        every_s: seconds between two of them.

    Threads: any.
    """

    def __init__(self, log: logging.Logger, every_s: float = LOG_EVERY_S) -> None:
        self._log = log
        self._every_s = every_s
        self._lock = threading.Lock()
        self._last_s: float | None = None
        self._unsaid = 0

    def warning(self, text: str) -> None:
        """Say ``text``, with the number of those not said since the last one, or nothing."""
        with self._lock:
            now = time.monotonic()
            if self._last_s is not None and now - self._last_s < self._every_s:
                self._unsaid += 1
                return
            self._last_s, unsaid, self._unsaid = now, self._unsaid, 0
        self._log.warning("%s%s", text, f" (and {unsaid} more like it before)" if unsaid else "")
