"""``rebind``: another chunk size for a data dir; what is stored is given up."""

from __future__ import annotations

from typing import Annotated

import typer

from lmcache_persist.cli.confirm import confirmation
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.live import absolute, without_server
from lmcache_persist.cli.options import DataDir, Json, MaxChunkSize, Yes
from lmcache_persist.cli.output import ending, plain, say, write, write_json
from lmcache_persist.cli.plan import positive
from lmcache_persist.geometry import DEFAULT_MAX_CHUNK_SIZE


@ending
def rebind(
    data_dir: DataDir,
    chunk_size: Annotated[str, typer.Option(metavar="N", help="Tokens of a chunk from now on.")],
    max_chunk_size: MaxChunkSize = str(DEFAULT_MAX_CHUNK_SIZE),
    yes: Yes = False,
    json_output: Json = False,
) -> int:
    """Bind a data dir to another chunk size, while no server runs. Asks first.

    What is stored is never found again, and removed bit by bit by the next server.

    Example: lmcache-persist rebind /var/lib/kv --chunk-size 640
    """
    from lmcache_persist.server.rebind import rebind as carry_out

    with without_server("rebind"):
        binding = carry_out(
            absolute(data_dir),
            positive("chunk-size", chunk_size),
            confirmation("rebind", yes=yes),
            max_chunk_size=positive("max-chunk-size", max_chunk_size),
            say=lambda text: say(plain(text)),
        )
    if json_output:
        write_json({"binding": binding.summary()})
    else:
        write(f"bound to chunk size {binding.chunk_size}, binding {binding.binding_id}")
    return ExitCode.OK
