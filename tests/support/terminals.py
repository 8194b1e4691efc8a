"""Somebody at a terminal who answers what a verb asks."""

from __future__ import annotations

import io


class Terminal(io.StringIO):
    """Stdin of somebody who types."""

    def isatty(self) -> bool:
        """As a terminal says."""
        return True


class Interrupted(Terminal):
    """Stdin of somebody who presses Ctrl-C instead of answering."""

    def readline(self, *_: object) -> str:  # type: ignore[override]
        """As Python tells of the signal."""
        raise KeyboardInterrupt
