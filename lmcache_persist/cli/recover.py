"""``recover``: a lost manifest made anew from the store's stamp."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_persist.cli.confirm import confirmation
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.live import absolute, without_server
from lmcache_persist.cli.options import DataDir, Json, Yes
from lmcache_persist.cli.output import ending, plain, say, write, write_json
from lmcache_persist.cli.ticker import CopyTicker
from lmcache_persist.printable import command
from lmcache_persist.units import approximate_size, counted

if TYPE_CHECKING:
    from lmcache_persist.server.salvage import Outcome
    from lmcache_persist.store.copying import Tally


@ending
def recover(
    data_dir: DataDir,
    set_aside: Annotated[
        bool,
        typer.Option("--set-aside", help="Take back what is good in the store set aside."),
    ] = False,
    yes: Yes = False,
    json_output: Json = False,
) -> int:
    """Make a manifest anew that is absent, unreadable or unbound, while no server runs.

    The store's stamp holds the whole binding. A manifest that cannot be read is moved
    aside, which it asks about; one that is good and says something else is refused.
    Nothing stored is lost. With --set-aside the manifest is left alone: good chunks of
    store.damaged are copied into the store, every digest checked, and the rest is removed.

    Example: lmcache-persist recover /var/lib/kv

    Example: lmcache-persist recover /var/lib/kv --set-aside
    """
    if set_aside:
        return _salvage(absolute(data_dir), json_output=json_output)
    from lmcache_persist.server.recover import recover as carry_out

    with without_server("recover"):
        done = carry_out(
            absolute(data_dir),
            confirmation("recover", yes=yes),
            say=lambda text: say(plain(text)),
        )
    if json_output:
        write_json({"done": done})
    else:
        for line in done:
            write(plain(line))
    return ExitCode.OK


def _salvage(root: Path, *, json_output: bool) -> int:
    from lmcache_persist.server.salvage import salvage

    with without_server("recover"), CopyTicker("taken") as ticker:
        outcome = salvage(root, on_chunk=ticker.on_chunk)
    done = ["nothing to do: no store is set aside"] if outcome is None else _told(outcome)
    if json_output:
        document: dict[str, object] = {"done": done}
        for name, tally in () if outcome is None else _numbers(outcome):
            document[f"{name}_objects"] = tally.total.objects
        if outcome is not None:
            document["dropped_chunks"] = outcome.salvaged.dropped
        write_json(document)
    else:
        for line in done:
            write(plain(line))
    if outcome is not None and not outcome.removed:
        grow = command("resize", root, "--capacity", "SIZE")
        say(f"hint: {plain(outcome.aside)} is kept; do it again after: {plain(grow)}")
    return ExitCode.OK


def _numbers(outcome: Outcome) -> list[tuple[str, Tally]]:
    found = outcome.salvaged
    return [
        ("taken", found.taken),
        ("held", found.held),
        ("bad", found.bad),
        ("stale", found.stale),
        ("no_room", found.no_room),
    ]


_WORDS = {
    "taken": "taken back",
    "held": "there already",
    "bad": "left out, bad",
    "stale": "left out, of another binding",
    "no_room": "left there, no room",
}


def _told(outcome: Outcome) -> list[str]:
    lines = []
    for name, tally in _numbers(outcome):
        total = tally.total
        if total.chunks or name == "taken":
            text = f"{counted(total.objects, 'object')} ({approximate_size(total.nbytes)})"
            lines.append(f"{_WORDS[name]}: {text}")
    if dropped := outcome.salvaged.dropped:
        lines.append(f"lost, no good record or not all extents: {counted(dropped, 'chunk')}")
    if outcome.removed:
        lines.append(f"removed {outcome.aside}")
    return lines
