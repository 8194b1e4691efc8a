"""``resize``: another capacity for the store of a data dir, also while its server runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmcache_persist.cli.confirm import confirmation
from lmcache_persist.cli.connection import ask_json, seconds
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.live import absolute, by_server, holding_server
from lmcache_persist.cli.options import AnswerTimeout, DataDir, Json, Yes
from lmcache_persist.cli.output import ending, plain, say, write, write_json
from lmcache_persist.cli.progress import ProgressLine
from lmcache_persist.cli.ticker import CopyTicker
from lmcache_persist.errors import (
    ConfigError,
    DataDirLocked,
    MalformedMessage,
    RequestTimeout,
    UnsupportedVersion,
)
from lmcache_persist.units import (
    approximate_size,
    counted,
    exact_size,
    format_size,
    parse_size,
    whole_pages,
)

if TYPE_CHECKING:
    from lmcache_persist.connector import CacheClient
    from lmcache_persist.server.resize import Resized

_POLL_S = 0.2


@ending
def resize(
    data_dir: DataDir,
    capacity: Annotated[
        str, typer.Option(metavar="SIZE", help="Of the store from now on, as 64GiB.")
    ],
    yes: Yes = False,
    timeout: AnswerTimeout = "30",
    json_output: Json = False,
) -> int:
    """Give the store another capacity. Asks if that throws objects away.

    A live server grows its store while it serves; to make it smaller, stop it. A smaller
    store is made beside the old one, of what was used last, and takes its place.

    Example: lmcache-persist resize /var/lib/kv --capacity 64GiB
    """
    root, timeout_s = absolute(data_dir), seconds(timeout)
    capacity_bytes = whole_pages(parse_size(capacity))
    try:
        done = _offline(root, capacity_bytes, yes=yes)
        say(
            "a start without --capacity keeps that; where it is set, set it to"
            f" {format_size(done.after)} now"
        )
    except DataDirLocked as error:
        if not by_server(error):
            raise
        done = _live(root, capacity_bytes, timeout_s)
    _write(done, as_json=json_output)
    return ExitCode.OK


def _offline(root: Path, capacity_bytes: int, *, yes: bool) -> Resized:
    from lmcache_persist.server.resize import resize as carry_out

    with CopyTicker("copied") as ticker:
        return carry_out(
            root,
            capacity_bytes,
            confirmation("resize", yes=yes),
            say=lambda text: say(plain(text)),
            on_chunk=ticker.on_chunk,
        )


def _write(done: Resized, *, as_json: bool) -> None:
    from lmcache_persist.server.losses import objects_amount

    if as_json:
        write_json(
            {
                "capacity_before_bytes": done.before,
                "capacity_bytes": done.after,
                "objects": done.kept_objects,
                "dropped_objects": done.dropped_objects,
                "dropped_bytes": done.dropped_bytes,
            }
        )
        return
    before, after = approximate_size(done.before), approximate_size(done.after)
    write(f"capacity: {before} before, {after} now")
    write(f"kept: {counted(done.kept_objects, 'object')}")
    if done.dropped_objects:
        write(f"dropped: {objects_amount(done.dropped_objects, done.dropped_bytes)}")


def _live(root: Path, capacity_bytes: int, timeout_s: float) -> Resized:
    """Have the server that holds the data dir grow its store."""
    with holding_server(root, timeout_s, "resize") as client:
        try:
            told = _Growth(client, root, timeout_s).run(capacity_bytes)
        except ConfigError as error:
            if "minimum" in error.fields:
                error.hint = (
                    "to make it smaller, stop that server and run this again; to have it use"
                    f" less: lmcache-persist prune {root} --down-to {format_size(capacity_bytes)}"
                )
            raise
    _say_setting(told, capacity_bytes)
    return _decode(told)


class _Growth:
    """A growth that a server is at, as the verb follows it."""

    def __init__(self, client: CacheClient, root: Path, timeout_s: float) -> None:
        self._client = client
        self._root = root
        self._timeout_s = timeout_s
        self._line = ProgressLine("allocate")

    def run(self, capacity_bytes: int) -> dict[str, Any]:
        """Start it, or join one to the same capacity; what the server says at its end.

        Raises:
            UnsupportedVersion: the server is of a version that cannot grow while it serves.
            RequestTimeout: nothing moves.
            PersistError: the server's refusal.
        """
        told, changed_s, said = self._begin(capacity_bytes), time.monotonic(), False
        with self._line:
            while True:
                said = said or self._say_room(told)
                if told.get("phase") == "done":
                    return told
                self._line.update(told["allocated_bytes"], told["needed_bytes"])
                if time.monotonic() - changed_s > self._timeout_s:
                    raise RequestTimeout(
                        f"the growth stands still for {self._timeout_s:g} s"
                        f" ({told['phase']}, {told['allocated_bytes']} bytes allocated)",
                        hint="the server goes on by itself; the same again tells how far it is",
                    )
                time.sleep(_POLL_S)
                before, told = told, self._ask(capacity_bytes, told["growth"])
                if told != before:
                    changed_s = time.monotonic()

    def _begin(self, capacity_bytes: int) -> dict[str, Any]:
        try:
            return self._ask(capacity_bytes, 0)
        except MalformedMessage as error:
            raise UnsupportedVersion(
                f"the server that holds {self._root} does not know how to grow while it serves:"
                f" {error.message}",
                hint="stop it, run this again, and start it; or upgrade it first",
            ) from error

    def _ask(self, capacity_bytes: int, growth: int) -> dict[str, Any]:
        from lmcache_persist.protocol import AdminGrow

        return ask_json(
            self._client,
            AdminGrow,
            self._timeout_s,
            capacity_bytes=capacity_bytes,
            growth=growth,
        )

    def _say_room(self, told: dict[str, Any]) -> bool:
        needed, available = told.get("needed_bytes"), told.get("available_bytes")
        if not needed or available is None:
            return False
        say(
            f"this needs {exact_size(needed)} more on the server's disk, which had"
            f" {exact_size(available)} available"
        )
        return True


def _say_setting(told: dict[str, Any], capacity_bytes: int) -> None:
    """Whoever set a capacity has to follow: starts keep the store's, and warn each time."""
    source, set_to = told.get("capacity_set_by"), told.get("capacity_set_bytes")
    if not isinstance(set_to, int):
        say("the server was started without --capacity: its next start keeps that")
    elif set_to < capacity_bytes:
        say(
            f"note: the server was started with a capacity of {format_size(set_to)}"
            f" ({plain(source)}): set that to {format_size(capacity_bytes)}, or leave it out;"
            " until then each start keeps what the store has, with a warning"
        )


def _decode(told: dict[str, Any]) -> Resized:
    from lmcache_persist.server.resize import Resized

    try:
        before, after = int(told["capacity_before_bytes"]), int(told["capacity_bytes"])
        return Resized(before, after, int(told["objects"]), 0, 0)
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedMessage(f"the server's growth cannot be decoded: {error}") from error
