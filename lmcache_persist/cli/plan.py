"""``plan``: alignment and chunk size for a geometry, without a server."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.options import Json, MaxChunkSize
from lmcache_persist.cli.output import ending, plain, say, write, write_json
from lmcache_persist.errors import ConfigError, NoCacheableGroup
from lmcache_persist.geometry import (
    DEFAULT_BASE_CHUNK_SIZE,
    DEFAULT_MAX_CHUNK_SIZE,
    groups_from_sizes,
)
from lmcache_persist.geometry import plan as plan_groups

# Bounded: Python refuses to read numbers of thousands of digits, with an error of its own.
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}", re.ASCII)


def integer_or_text(text: str) -> int | str:
    """An integer if ``text`` is one, else ``text``, for ``geometry`` to refuse."""
    return int(text) if _INTEGER.fullmatch(text) else text


def split_sizes(items: list[str]) -> list[int | str]:
    """The numbers of ``640 0 640``, ``640,0,640`` or a mix."""
    return [integer_or_text(part.strip()) for item in items for part in item.split(",")]


@ending
def plan(
    sizes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TOKENS_PER_BLOCK",
            help="One number per KV cache group; 0 for a group that takes no part.",
        ),
    ] = None,
    base: Annotated[str, typer.Option(metavar="TOKENS", help="The chunk size wished for.")] = str(
        DEFAULT_BASE_CHUNK_SIZE
    ),
    max_chunk_size: MaxChunkSize = str(DEFAULT_MAX_CHUNK_SIZE),
    json_output: Json = False,
) -> int:
    """Print the chunk size that a geometry would be bound to. Needs no server.

    Example: lmcache-persist plan 544 64 --base 1024
    """
    if not sizes:
        raise NoCacheableGroup(
            "no group is given, expected at least one tokens_per_block",
            hint="for example lmcache-persist plan 544 64",
        )
    groups = groups_from_sizes(split_sizes(sizes))
    result = plan_groups(groups, positive("base", base), positive("max-chunk-size", max_chunk_size))
    if json_output:
        write_json(
            {
                "required_alignment": result.required_alignment,
                "chunk_size": result.chunk_size,
                "warnings": list(result.warnings),
            }
        )
        return ExitCode.OK
    for warning in result.warnings:
        say(f"warning: {plain(warning)}")
    write(f"required alignment: {result.required_alignment} tokens")
    write(f"chunk size: {result.chunk_size} tokens (base {result.base_chunk_size})")
    return ExitCode.OK


def positive(name: str, text: str) -> int:
    """The value of an option that is a positive integer. Raises ``ConfigError``."""
    value = integer_or_text(text)
    if isinstance(value, str) or value < 1:
        raise ConfigError(f"--{name} is {text!r}, expected a positive integer")
    return value
