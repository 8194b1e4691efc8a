"""A line on stderr that says how far a verb is, for people at a terminal; nothing elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import Self

from lmcache_persist.cli.output import plain

_EVERY_S = 0.2


class Ticker:
    """Shows the last of the texts that it is given, now and then; gone at the end."""

    def __init__(self) -> None:
        self._shown = False
        self._due_s = 0.0
        self._tty = sys.stderr is not None and sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Replace the line, unless that was done a moment ago."""
        if not self._tty or time.monotonic() < self._due_s:
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
        if self._shown:
            self._write("\r\x1b[K")
