"""How far a check is: a bar, the rate and the time left, in a :class:`.ticker.Ticker`."""

from __future__ import annotations

import time

from lmcache_persist.cli.ticker import Ticker
from lmcache_persist.units import approximate_duration, approximate_size, size_rate

_BAR_CHARS = 24


class ProgressLine(Ticker):
    """Redrawn in place on a terminal; nothing elsewhere.

    Args:
        what: is under way.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what
        self._began_s = time.monotonic()

    def update(self, done_bytes: int, total_bytes: int | None, note: str = "") -> None:
        """Say how far it is, unless that was said just now."""
        if self.due:
            seconds = time.monotonic() - self._began_s
            self.show(*texts(self._what, done_bytes, total_bytes, seconds, note))


def texts(
    what: str, done_bytes: int, total_bytes: int | None, seconds: float, note: str = ""
) -> list[str]:
    """What may be shown: a bar, how much of how much, the rate, the time left. Pure.

    The longest comes first; the others leave out what matters least.
    """
    rate = done_bytes / seconds if seconds > 0 else 0.0
    done, speed = approximate_size(done_bytes), size_rate(rate)
    tail = f", {note}" if note else ""
    if not total_bytes:
        return [f"{what}: {done}, {speed}{tail}", f"{what}: {done}{tail}", f"{what}: {done}"]
    share = min(1.0, done_bytes / total_bytes)
    bar = "#" * int(_BAR_CHARS * share)
    percent = f"{int(100 * share)} %"
    left = "..."
    if rate and share < 1:
        left = f"{approximate_duration(round((total_bytes - done_bytes) / rate))} left"
    amounts = f"{done} of {approximate_size(total_bytes)}"
    return [
        f"{what}: [{bar:<{_BAR_CHARS}}] {percent:>5} {amounts}, {speed}, {left}{tail}",
        f"{what}: {percent:>5} {amounts}, {speed}, {left}{tail}",
        f"{what}: {percent:>5}, {speed}, {left}{tail}",
        f"{what}: {percent:>5}, {speed}, {left}",
        f"{what}: {percent:>5}, {left}",
        f"{percent:>5}, {left}",
    ]
