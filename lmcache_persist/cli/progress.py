"""How far a check is: a bar, the rate and the time left, in a :class:`.ticker.Ticker`."""

from __future__ import annotations

import time

from lmcache_persist.cli.ticker import Ticker
from lmcache_persist.units import approximate_size

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
            self.show(line(self._what, done_bytes, total_bytes, seconds, note))


def line(
    what: str, done_bytes: int, total_bytes: int | None, seconds: float, note: str = ""
) -> str:
    """What is shown: a bar, how much of how much, the rate, the time left. Pure."""
    rate = done_bytes / seconds if seconds > 0 else 0.0
    speed = f"{approximate_size(int(rate))}/s"
    tail = f", {note}" if note else ""
    if not total_bytes:
        return f"{what}: {approximate_size(done_bytes)}, {speed}{tail}"
    share = min(1.0, done_bytes / total_bytes)
    bar = "#" * int(_BAR_CHARS * share)
    left = f"{(total_bytes - done_bytes) / rate:.0f} s left" if rate and share < 1 else "..."
    return (
        f"{what}: [{bar:<{_BAR_CHARS}}] {100 * share:3.0f} %"
        f" {approximate_size(done_bytes)} of {approximate_size(total_bytes)}, {speed}, {left}{tail}"
    )
