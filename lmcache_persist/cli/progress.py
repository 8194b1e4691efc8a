"""A line that says how far something is: on stderr, and only on a terminal."""

from __future__ import annotations

import shutil
import sys
import time

from lmcache_persist.units import approximate_size

EVERY_S = 0.1
_BAR_CHARS = 24
_CLEAR = "\r\x1b[2K"


class ProgressLine:
    """Redrawn in place, wiped before anything else is written.

    Args:
        what: is under way.
        shown: whether to draw at all; by default, if stderr is a terminal.
    """

    def __init__(self, what: str, *, shown: bool | None = None) -> None:
        self._what = what
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._began_s = time.monotonic()
        self._drawn_s = 0.0

    def update(self, done_bytes: int, total_bytes: int | None, note: str = "") -> None:
        """Say how far it is; costs nothing if it was said just now."""
        now = time.monotonic()
        if not self._shown or now - self._drawn_s < EVERY_S:
            return
        self._drawn_s = now
        text = line(self._what, done_bytes, total_bytes, now - self._began_s, note)
        width = shutil.get_terminal_size().columns
        self._write(_CLEAR + text[: max(0, width - 1)])

    def clear(self) -> None:
        """Wipe the line, to write something else there."""
        if self._shown and self._drawn_s:
            self._drawn_s = 0.0
            self._write(_CLEAR)

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:
            self._shown = False  # talk is not the result


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
