"""A command line read by the program's own parser, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from lmcache_persist.cli.app import app


def parse_verb(argv: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The verb and its parameters by name.

    Args:
        argv: without the program's name.

    Raises:
        UsageError: an unknown verb or flag, or one that is missing.
    """
    group = typer.main.get_command(app)
    with group.make_context("lmcache-persist", list(argv), resilient_parsing=False) as context:
        name, command, rest = group.resolve_command(context, list(argv))  # type: ignore[attr-defined]
        with command.make_context(name, rest, parent=context) as parsed:
            return str(name), dict(parsed.params)
