"""Asking before something is thrown away."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from lmcache_persist.cli.output import plain, say
from lmcache_persist.errors import ConfigError

NOTHING_CHANGED = "nothing was changed"


def confirmation(verb: str, *, yes: bool) -> Callable[[Sequence[str]], None]:
    """What a verb calls with its losses: shows them on stderr, and asks unless ``yes``.

    The answer is a line typed at a terminal. Raises ``ConfigError`` unless it is the word yes,
    and where there is no terminal: a script says ``--yes``, or nothing happens.
    """

    def confirm(losses: Sequence[str]) -> None:
        for line in losses:
            say(plain(line))
        if yes:
            return
        if sys.stdin is None or not sys.stdin.isatty():
            raise ConfigError(
                f"{verb} asks, and there is no terminal to answer at; {NOTHING_CHANGED}",
                hint="give --yes if that is what you want",
            )
        try:
            sys.stderr.write(f"{verb}? type yes to go on: ")
            sys.stderr.flush()
            answer = sys.stdin.readline()
        except KeyboardInterrupt:
            say(f"\ninterrupted: {NOTHING_CHANGED}")
            raise
        if not answer.endswith("\n"):
            say("")
        if answer.strip().lower() != "yes":
            raise ConfigError(
                f"{verb} was not confirmed; {NOTHING_CHANGED}",
                hint="type the whole word yes, or give --yes",
            )

    return confirm
