"""What happened in the connector: counters, and log lines that cannot flood."""

from __future__ import annotations

import threading
import time
from collections import Counter

from vllm.logger import init_logger

LOG_INTERVAL_S = 30.0
"""Seconds between two log lines about the same kind of incident."""

# Under vLLM's own name, so that its handlers and its format apply.
logger = init_logger("vllm.lmcache_persist")


MAX_TIMES = 1024
"""Times of one name that are kept until they are taken; later ones are passed over."""


class Counters:
    """Counts and times by name; incidents are also logged, once per interval and name at most.

    Threads: any.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._times: dict[str, list[float]] = {}
        self._logged_at: dict[str, float] = {}
        self._guard = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Count something that is in order."""
        with self._guard:
            self._counts[name] += amount

    def observe(self, name: str, seconds: float) -> None:
        """Note how long something took."""
        with self._guard:
            found = self._times.setdefault(name, [])
            if len(found) < MAX_TIMES:
                found.append(seconds)

    def take_times(self) -> dict[str, list[float]]:
        """The times since this was called last."""
        with self._guard:
            times, self._times = self._times, {}
        return times

    def incident(self, name: str, error: object) -> None:
        """Count something that cost a hit, and say so unless it was said a moment ago."""
        now = time.monotonic()
        with self._guard:
            self._counts[name] += 1
            count = self._counts[name]
            quiet = now - self._logged_at.get(name, -LOG_INTERVAL_S) < LOG_INTERVAL_S
            if not quiet:
                self._logged_at[name] = now
        if not quiet:
            logger.warning("cache: %s (%d so far): %s", name.replace("_", " "), count, error)

    def snapshot(self) -> dict[str, int]:
        """All counts so far."""
        with self._guard:
            return dict(self._counts)
