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
        self._begin: tuple[float, int] | None = None  # when it was known how much there is

    def update(self, done_bytes: int, total_bytes: int | None, note: str = "") -> None:
        """Say how far it is, unless that was said just now."""
        now_s = time.monotonic()
        if self._begin is None and total_bytes:
            self._begin = now_s, done_bytes
        if self.due:
            since_s, since_bytes = self._begin or (now_s, done_bytes)
            rate = (done_bytes - since_bytes) / (now_s - since_s) if now_s > since_s else None
            self.show(*texts(self._what, done_bytes, total_bytes, rate, note))


def texts(
    what: str, done_bytes: int, total_bytes: int | None, rate: float | None, note: str = ""
) -> list[str]:
    """What may be shown: a bar, how much of how much, the rate, the time left. Pure.

    The longest comes first; the others leave out what matters least.

    Args:
        what: is under way.
        done_bytes: so far.
        total_bytes: of all, if that is known.
        rate: bytes per second, if that is known.
        note: what it is about to do.
    """
    done, speed = approximate_size(done_bytes), size_rate(rate)
    tail = f", {note}" if note else ""
    if not done_bytes and note:
        return [f"{what}: {note}"]
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
