"""Asking before something is thrown away."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from lmcache_persist.cli.output import plain, say
from lmcache_persist.errors import ConfigError


def confirmation(verb: str, *, yes: bool) -> Callable[[Sequence[str]], None]:
    """What a verb calls with its losses: shows them on stderr, and asks unless ``yes``.

    The answer is a line on stdin. Raises ``ConfigError`` unless it is a yes.
    """

    def confirm(losses: Sequence[str]) -> None:
        for line in losses:
            say(plain(line))
        if yes:
            return
        sys.stderr.write(f"{verb}? yes or no: ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
        if not answer.endswith("\n"):
            say("")
        if answer.strip().lower() not in ("y", "yes"):
            raise ConfigError(
                f"{verb} was not confirmed; nothing was changed", hint="answer yes, or give --yes"
            )

    return confirm
