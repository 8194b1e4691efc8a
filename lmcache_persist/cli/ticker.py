"""A line on stderr that says how far a verb is, for people at a terminal; nothing elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lmcache_persist.cli import terminal
from lmcache_persist.cli.output import plain
from lmcache_persist.units import approximate_duration, approximate_size, counted, size_rate

if TYPE_CHECKING:
    from lmcache_persist.store.base import ChunkRecord

_EVERY_S = 0.2


class Ticker:
    """Shows the last of the texts that it is given, now and then; gone at the end."""

    def __init__(self) -> None:
        self._shown = False
        self._due_s = 0.0
        self._tty = terminal.is_terminal(sys.stderr) and not terminal.is_dumb()

    @property
    def due(self) -> bool:
        """Whether a text would be shown now."""
        return self._tty and time.monotonic() >= self._due_s

    def show(self, *texts: str) -> None:
        """Replace the line, unless that was done a moment ago.

        Args:
            texts: that say the same, the longest first: the first that fits is shown, and of
                the last one whole words.
        """
        if not self.due:
            return
        from rich.cells import cell_len

        from lmcache_persist.cli.layout import wrap

        self._due_s = time.monotonic() + _EVERY_S
        width = terminal.size(sys.stderr).columns - 1  # the last column would wrap
        fitting = [text for text in map(plain, texts) if cell_len(text) <= width]
        shown = fitting[0] if fitting else wrap(plain(texts[-1]), max(1, width))[0]
        self._write(f"\r\x1b[K{shown}")
        self._shown = True

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:
            self._tty = False  # talk is not the result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def clear(self) -> None:
        """Wipe the line, so that something else can be written there."""
        if self._shown:
            self._shown = False
            self._write("\r\x1b[K")


class CopyTicker(Ticker):
    """Says how much of a store was copied, and how fast.

    Args:
        verb: what becomes of a chunk.
        total_bytes: to be copied, if that is known.
    """

    def __init__(self, verb: str, total_bytes: int | None = None) -> None:
        super().__init__()
        self.total_bytes = total_bytes
        self._verb = verb
        self._bytes = 0
        self._chunks = 0
        self._since_s = time.monotonic()

    def on_chunk(self, record: ChunkRecord) -> None:
        """One more chunk."""
        self._chunks += 1
        self._bytes += record.objects.table.nbytes
        took_s = max(1e-3, time.monotonic() - self._since_s)
        rate = self._bytes / took_s
        left = ""
        if self.total_bytes and rate:
            left_s = round(max(0.0, (self.total_bytes - self._bytes) / rate))
            left = f", {approximate_duration(left_s)} left"
        size, speed = approximate_size(self._bytes), size_rate(rate)
        self.show(
            f"{self._verb} {counted(self._chunks, 'chunk')}, {size}, {speed}{left}",
            f"{self._verb} {size}, {speed}{left}",
            f"{size}, {speed}{left}",
            f"{size}{left}",
        )
