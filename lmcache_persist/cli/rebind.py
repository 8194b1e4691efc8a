"""``rebind``: another chunk size for a data dir; what is stored is given up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_persist.cli.confirm import confirmation
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.live import absolute, without_server
from lmcache_persist.cli.options import DataDir, Json, MaxChunkSize, Yes
from lmcache_persist.cli.output import ending, plain, say, write, write_json
from lmcache_persist.cli.plan import positive
from lmcache_persist.config_sources import variable_of
from lmcache_persist.geometry import DEFAULT_MAX_CHUNK_SIZE
from lmcache_persist.printable import command

if TYPE_CHECKING:
    from lmcache_persist.server.rebind import Rebound


@ending
def rebind(
    data_dir: DataDir,
    chunk_size: Annotated[str, typer.Option(metavar="N", help="Tokens of a chunk from now on.")],
    max_chunk_size: MaxChunkSize = str(DEFAULT_MAX_CHUNK_SIZE),
    force: Annotated[
        bool, typer.Option("--force", help="A new binding also to the size that it has.")
    ] = False,
    yes: Yes = False,
    json_output: Json = False,
) -> int:
    """Bind a data dir to another chunk size, while no server runs. Asks first.

    What is stored is never found again, and removed bit by bit by the next server. If the
    data dir has that size already, nothing is done and nothing lost.

    Example: lmcache-persist rebind /var/lib/kv --chunk-size 640
    """
    from lmcache_persist.server.rebind import rebind as carry_out

    root = absolute(data_dir)
    with without_server("rebind"):
        done = carry_out(
            root,
            positive("chunk-size", chunk_size),
            confirmation("rebind", yes=yes),
            max_chunk_size=positive("max-chunk-size", max_chunk_size),
            force=force,
            say=lambda text: say(plain(text)),
        )
    if json_output:
        write_json({"binding": done.binding.summary(), "outcome": done.outcome.value})
    else:
        write(plain(_sentence(done)))
    size = done.binding.chunk_size
    say(
        "a start without --chunk-size keeps that; where it is set, by a flag, in"
        f" {variable_of('chunk_size')} or in a config file, set it to {size} or auto now"
    )
    if done.outcome.value == "unchanged":
        say(
            f"hint: to throw away what is stored: {plain(command('reset', root))}; prune removes"
            " a part of it; --force makes a new binding to the same size"
        )
    return ExitCode.OK


def _sentence(done: Rebound) -> str:
    size, name = done.binding.chunk_size, done.binding.binding_id
    return {
        "bound": f"bound to chunk size {size}, binding {name}",
        "completed": f"the interrupted rebind to chunk size {size} is complete, binding {name}",
        "unchanged": f"nothing to do: bound to chunk size {size} already, binding {name}",
    }[done.outcome.value]
