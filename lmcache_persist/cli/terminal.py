"""What a stream is for people: a terminal, how wide, and whether it takes styles."""

from __future__ import annotations

import os
from typing import TextIO

FALLBACK_COLUMNS, FALLBACK_LINES = 80, 24
BOLD, UNDERLINED = "1", "4"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether people read it as it is written."""
    return stream is not None and stream.isatty()


def is_dumb() -> bool:
    """Whether the terminal knows no control sequences."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def size(stream: TextIO) -> os.terminal_size:
    """Columns and lines of the terminal behind a stream.

    ``COLUMNS`` and ``LINES`` make it smaller than it is, or stand for one that does not tell;
    never larger: what is too wide would be wrapped.
    """
    try:
        real = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        real = os.terminal_size((0, 0))
    return os.terminal_size(
        (
            _bounded("COLUMNS", real.columns, FALLBACK_COLUMNS),
            _bounded("LINES", real.lines, FALLBACK_LINES),
        )
    )


def _bounded(name: str, real: int, fallback: int) -> int:
    text = os.environ.get(name, "")
    wanted = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
    return min(filter(None, (wanted, real)), default=fallback)


def styled(text: str, style: str, stream: TextIO) -> str:
    """A text in bold or underlined, where the terminal can and ``NO_COLOR`` is not set."""
    if is_dumb() or os.environ.get("NO_COLOR") or not is_terminal(stream):
        return text
    return f"\x1b[{style}m{text}\x1b[0m"


def encodable(text: str, stream: TextIO) -> str:
    """A text in the characters that the stream has, the others escaped: as wide as it will be."""
    encoding = stream.encoding or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def ellipsis(stream: TextIO) -> str:
    """What stands for what was left out."""
    return "..." if encodable("…", stream) != "…" else "…"
