"""``resize``: another capacity for the store of a data dir."""

from __future__ import annotations

from typing import Annotated

import typer

from lmcache_persist.cli.confirm import confirmation
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.live import absolute, without_server
from lmcache_persist.cli.options import DataDir, Json, Yes
from lmcache_persist.cli.output import ending, plain, say, write, write_json
from lmcache_persist.cli.ticker import CopyTicker
from lmcache_persist.units import approximate_size, counted, format_size, parse_size


@ending
def resize(
    data_dir: DataDir,
    capacity: Annotated[
        str, typer.Option(metavar="SIZE", help="Of the store from now on, as 64GiB.")
    ],
    yes: Yes = False,
    json_output: Json = False,
) -> int:
    """Give the store another capacity, while no server runs. Asks if that throws objects away.

    A smaller store is made beside the old one, of what was used last, and takes its place.

    Example: lmcache-persist resize /var/lib/kv --capacity 64GiB
    """
    from lmcache_persist.server.losses import objects_amount
    from lmcache_persist.server.resize import resize as carry_out

    afterwards = ", and start it afterwards with the new --capacity"
    with without_server("resize", afterwards), CopyTicker("copied") as ticker:
        done = carry_out(
            absolute(data_dir),
            parse_size(capacity),
            confirmation("resize", yes=yes),
            say=lambda text: say(plain(text)),
            on_chunk=ticker.on_chunk,
        )
    say(
        "a start without --capacity keeps that; where it is set, set it to"
        f" {format_size(done.after)} now"
    )
    if json_output:
        write_json(
            {
                "capacity_before_bytes": done.before,
                "capacity_bytes": done.after,
                "objects": done.kept_objects,
                "dropped_objects": done.dropped_objects,
                "dropped_bytes": done.dropped_bytes,
            }
        )
        return ExitCode.OK
    before, after = approximate_size(done.before), approximate_size(done.after)
    write(f"capacity: {before} before, {after} now")
    write(f"kept: {counted(done.kept_objects, 'object')}")
    if done.dropped_objects:
        write(f"dropped: {objects_amount(done.dropped_objects, done.dropped_bytes)}")
    return ExitCode.OK
