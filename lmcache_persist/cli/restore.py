"""``restore``: a data dir from a backup."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.live import absolute, without_server
from lmcache_persist.cli.options import Json
from lmcache_persist.cli.output import ending, plain, say, write, write_json
from lmcache_persist.cli.ticker import CopyTicker
from lmcache_persist.printable import command
from lmcache_persist.units import counted, format_size, moment, parse_size, whole_pages


@ending
def restore(
    source: Annotated[str, typer.Argument(metavar="BACKUP", help="What backup made.")],
    data_dir: Annotated[str, typer.Argument(metavar="DIR", help="Absent, or empty.")],
    capacity: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of the store, as 64GiB. [default: as it was]"),
    ] = None,
    new_id: Annotated[
        bool, typer.Option("--new-id", help="For a second server beside the first.")
    ] = False,
    json_output: Json = False,
) -> int:
    """Make a data dir from a backup. Every digest is checked on the way.

    With a smaller capacity it takes what was used last. The backup stays as it is.

    Example: lmcache-persist restore /backup/kv-monday /var/lib/kv
    """
    from lmcache_persist.server.restore import restore as carry_out

    target = absolute(data_dir)
    with _told_if_interrupted(), without_server("restore"), CopyTicker("restored") as ticker:
        done = carry_out(
            absolute(source),
            target,
            capacity_bytes=None if capacity is None else whole_pages(parse_size(capacity)),
            new_id=new_id,
            say=lambda text: say(plain(text)),
            on_chunk=ticker.on_chunk,
        )
    size = format_size(done.capacity_bytes)
    say(f"start it with: {plain(command('serve', '--data-dir', target, '--capacity', size))}")
    if json_output:
        write_json(
            {
                "data_dir": str(target),
                "binding": done.binding.summary(),
                "capacity_bytes": done.capacity_bytes,
                "objects": done.objects,
                "left_out_objects": done.no_room_objects + done.bad_objects,
                "no_room_objects": done.no_room_objects,
                "bad_objects": done.bad_objects,
                "manifest_rebuilt": done.manifest_rebuilt,
                "made_at": done.descriptor.made_at,
            }
        )
        return ExitCode.OK
    write(
        f"restored {plain(target)}: {counted(done.objects, 'object')}, chunk size"
        f" {done.binding.chunk_size}, as of {plain(moment(done.descriptor.made_at))}"
    )
    if done.no_room_objects:
        write(f"left out: {counted(done.no_room_objects, 'object')} for which there is no room")
    if done.bad_objects:
        write(f"left out: {counted(done.bad_objects, 'object')} that proved bad")
    return ExitCode.OK


@contextlib.contextmanager
def _told_if_interrupted() -> Iterator[None]:
    """Until the mark of a restore is gone nothing counts as restored."""
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted: nothing was restored")
        raise
