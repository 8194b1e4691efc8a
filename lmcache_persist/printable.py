"""Text from outside (model names, paths, other people's words) made safe to show. Pure."""

from __future__ import annotations

import shlex


def plain(text: object) -> str:
    """``text`` with everything that is no printable character written as an escape.

    What comes out is one line and cannot steer a terminal, a log or a label.
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown
    )


def command(*words: object, user: str | None = None) -> str:
    """A command of this program, quoted so that it can be given to a shell as it is shown.

    Args:
        words: behind the program's name.
        user: who runs it, as ``sudo -u`` takes it; whoever types it by default.
    """
    sudo = [] if user is None else ["sudo", "-u", user]
    return shlex.join([*sudo, "lmcache-persist", *(str(word) for word in words)])


def short(text: object, limit: int) -> str:
    """:func:`plain`, cut to at most ``limit`` characters of the original."""
    shown = str(text)
    return plain(shown if len(shown) <= limit else f"{shown[: limit - 3]}...")
