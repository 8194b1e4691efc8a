"""Commands in hints, notes and log lines: taken out as they stand, and run.

In every text that the program says a command goes from its name to the next semicolon, or
to the end of the line, so that it can be copied.
"""

from __future__ import annotations

import re
import shlex

from support.verbs import quiet

_COMMAND = re.compile(r"lmcache-persist ([^;\n]*)")


def commands(text: str) -> list[list[str]]:
    """The words behind the program's name of each command in a text, as a shell splits them."""
    return [shlex.split(found) for found in _COMMAND.findall(text)]


def hint_of(stderr: str) -> str:
    """The one hint of a verb."""
    [hint] = [line for line in stderr.splitlines() if line.startswith("hint: ")]
    return hint


def follow(text: str, *more: str, number: int = 0) -> tuple[int, str, str]:
    """Run a command of a text; exit code, stdout and stderr.

    Args:
        text: what the program said.
        more: flags that answer what it asks, such as ``--yes``.
        number: which command, if there are several.
    """
    return quiet(*commands(text)[number], *more)
