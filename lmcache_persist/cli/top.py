"""``top``: what a server does, live."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmcache_persist.cli.connection import DEFAULT_TIMEOUT, connected, seconds
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.live import endpoint_of
from lmcache_persist.cli.options import FirstTimeout, JsonLines, ServedDir, Server
from lmcache_persist.cli.output import ending, error_document, write, write_line
from lmcache_persist.cli.plan import positive
from lmcache_persist.cli.rates import compare
from lmcache_persist.errors import ConfigError, Stale, TransportError

if TYPE_CHECKING:
    from lmcache_persist.connector import CacheClient

MIN_INTERVAL_S = 0.1
MIN_ANSWER_S = 1.0
"""Seconds that a server may take for an answer, however short the interval."""


@ending
def top(
    data_dir: ServedDir = None,
    server: Server = None,
    interval: Annotated[str, typer.Option(metavar="SECONDS", help="Between two looks.")] = "2",
    count: Annotated[
        str | None, typer.Option(metavar="N", help="End after so many intervals. [default: never]")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="One interval, then end; as --count 1.")
    ] = False,
    timeout: FirstTimeout = DEFAULT_TIMEOUT,
    json_output: JsonLines = False,
) -> int:
    """Show live what a server does: hit rate, bytes in and out, leases, queues, engines.

    On a terminal a screen, until Ctrl-C; elsewhere a line per interval. A server that goes
    away is shown as such, and when it is back. Exit code 4 if there is none at first, or
    none at the end.

    Example: lmcache-persist top /var/lib/kv

    Example: lmcache-persist top --server ipc:///var/lib/kv/server.sock --once
    """
    interval_s = seconds(interval, "--interval")
    if interval_s < MIN_INTERVAL_S:
        raise ConfigError(f"--interval is {interval_s:g} s, expected at least {MIN_INTERVAL_S:g}")
    rounds = 1 if once else positive("count", count) if count is not None else None
    timeout_s, answered = seconds(timeout), True
    url, root = endpoint_of(data_dir, server)
    with connected(url, timeout_s, "top", root=root) as client, _output(json_output) as show:
        looks = _looks(client, interval_s)
        for document in itertools.islice(looks, rounds):
            answered = document["connected"]
            show(document)
    return ExitCode.OK if answered else ExitCode.NO_SERVER


def _looks(client: CacheClient, interval_s: float) -> Iterator[dict[str, Any]]:
    """One document per interval; never ends by itself."""
    before: dict[str, Any] | None = None
    answer_s = max(interval_s, MIN_ANSWER_S)
    with contextlib.suppress(TransportError, Stale):
        before = client.stats(answer_s)
    next_s = time.monotonic()
    while True:
        next_s += interval_s
        time.sleep(max(0.0, next_s - time.monotonic()))
        document: dict[str, Any] = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "server": str(client.endpoint),
        }
        try:
            now = client.stats(answer_s)
        except (TransportError, Stale) as error:
            yield {**document, "connected": False, "error": error_document(error)}
        else:
            yield {**document, "connected": True, **compare(before, now)}
            before = now


@contextlib.contextmanager
def _output(json_output: bool) -> Iterator[Any]:
    """What takes a document and shows it."""
    if json_output:
        yield write_line
    elif sys.stdout.isatty():
        with _live() as show:
            yield show
    else:
        yield _lines()


def _lines() -> Any:
    from lmcache_persist.cli.top_view import HEADER_EVERY, header_line, line

    numbers = itertools.count()

    def show(document: dict[str, Any]) -> None:
        if next(numbers) % HEADER_EVERY == 0:
            write(header_line())
        write(line(document), at_once=True)

    return show


@contextlib.contextmanager
def _live() -> Iterator[Any]:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from lmcache_persist.cli.top_view import screen

    last: dict[str, Any] | None = None
    waiting = Text("waiting for the first interval to pass ...")
    with Live(waiting, console=Console(), screen=True, auto_refresh=False) as live:

        def show(document: dict[str, Any]) -> None:
            nonlocal last
            live.update(screen(document, last), refresh=True)
            if document["connected"]:
                last = document

        yield show
