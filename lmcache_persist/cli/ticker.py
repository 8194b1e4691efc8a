"""A line on stderr that says how far a verb is, for people at a terminal; nothing elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lmcache_persist.cli.output import plain
from lmcache_persist.units import approximate_size

if TYPE_CHECKING:
    from lmcache_persist.store.base import ChunkRecord

_EVERY_S = 0.2


class Ticker:
    """Shows the last of the texts that it is given, now and then; gone at the end."""

    def __init__(self) -> None:
        self._shown = False
        self._due_s = 0.0
        self._tty = sys.stderr is not None and sys.stderr.isatty()

    @property
    def due(self) -> bool:
        """Whether a text would be shown now."""
        return self._tty and time.monotonic() >= self._due_s

    def show(self, text: str) -> None:
        """Replace the line, unless that was done a moment ago."""
        if not self.due:
            return
        self._due_s = time.monotonic() + _EVERY_S
        width = max(20, shutil.get_terminal_size().columns) - 1
        self._write("\r\x1b[K" + plain(text)[:width])
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
        text = (
            f"{self._verb} {self._chunks} chunks, {approximate_size(self._bytes)},"
            f" {approximate_size(int(rate))}/s"
        )
        if self.total_bytes and rate:
            text += f", {max(0.0, (self.total_bytes - self._bytes) / rate):.0f} s left"
        self.show(text)
