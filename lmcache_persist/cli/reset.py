"""``reset``: throw away what a data dir holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from lmcache_persist.cli.confirm import confirmation
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.live import absolute, without_server
from lmcache_persist.cli.options import DataDir, Json, Yes
from lmcache_persist.cli.output import ending, plain, write, write_json
from lmcache_persist.shm import DEFAULT_POOL_DIR


@ending
def reset(
    data_dir: DataDir,
    pool_dir: Annotated[
        str, typer.Option(metavar="DIR", help="Where a killed server's pool may be left.")
    ] = DEFAULT_POOL_DIR,
    yes: Yes = False,
    json_output: Json = False,
) -> int:
    """Throw away manifest and store of a data dir, while no server runs. Asks first.

    What was set aside goes, too, what servers left in the folder, and the pool that a killed
    server of this store left. The next server starts unbound and empty.

    Example: lmcache-persist reset /var/lib/kv
    """
    from lmcache_persist.server.reset import reset as carry_out

    root = absolute(data_dir)
    with without_server("reset"):
        removed = carry_out(
            root,
            confirmation("reset", yes=yes),
            pool_dir=Path(os.path.abspath(pool_dir)),
        )
    if json_output:
        write_json({"removed": removed})
    else:
        for line in removed:
            write(f"removed {plain(line)}")
        if not removed:
            write(f"nothing to remove: {plain(root)} holds nothing of a server")
    return ExitCode.OK
