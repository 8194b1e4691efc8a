"""``top``: what a server does, live."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmcache_persist.cli import terminal
from lmcache_persist.cli.connection import DEFAULT_TIMEOUT, connected, seconds
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.live import endpoint_of
from lmcache_persist.cli.options import FirstTimeout, JsonLines, ServedDir, Server
from lmcache_persist.cli.output import ending, error_document, write, write_line
from lmcache_persist.cli.plan import positive
from lmcache_persist.cli.rates import compare
from lmcache_persist.errors import ConfigError, Stale, TransportError

if TYPE_CHECKING:
    from rich.live import Live

    from lmcache_persist.connector import CacheClient

MIN_INTERVAL_S = 0.1
MIN_ANSWER_S = 1.0
"""Seconds that a server may take for an answer, however short the interval."""
_RESIZE_POLL_S = 0.2


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

    Out is what engines load from the server, in what they store there.

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
        looks = _looks(client, interval_s, show.wait)
        for document in itertools.islice(looks, rounds):
            answered = document["connected"]
            show.show(document)
    return ExitCode.OK if answered else ExitCode.NO_SERVER


def _looks(
    client: CacheClient, interval_s: float, wait: Callable[[float], None]
) -> Iterator[dict[str, Any]]:
    """One document per interval; never ends by itself."""
    before: dict[str, Any] | None = None
    answer_s = max(interval_s, MIN_ANSWER_S)
    with contextlib.suppress(TransportError, Stale):
        before = client.stats(answer_s)
    next_s = time.monotonic()
    while True:
        next_s += interval_s
        wait(next_s)
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


class _Output:
    """Takes documents, one per interval; this one prints each as a line of JSON."""

    def show(self, document: dict[str, Any]) -> None:
        """Show what an interval was."""
        write_line(document)

    def wait(self, until_s: float) -> None:
        """Let the rest of an interval pass, until ``until_s`` on the monotonic clock."""
        time.sleep(max(0.0, until_s - time.monotonic()))


class _Lines(_Output):
    """A line per interval, of a terminal's width, if it is one; below, problems that are new."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._problems: list[str] = []

    def show(self, document: dict[str, Any]) -> None:
        from lmcache_persist.cli.top_view import HEADER_EVERY, header_line, line, problem_lines

        tty = terminal.is_terminal(sys.stdout)
        width = terminal.size(sys.stdout).columns if tty else None
        if next(self._numbers) % HEADER_EVERY == 0:
            write(header_line(width))
        lines = [line(document, width)]
        if document["connected"]:
            lines += problem_lines(document, self._problems)
            self._problems = document["problems"]
        write("\n".join(lines), at_once=True)


class _Screen(_Output):
    """A screen that is drawn anew per interval, and when the terminal is resized."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._now: dict[str, Any] | None = None
        self._last: dict[str, Any] | None = None
        self._size = os.terminal_size((0, 0))

    def show(self, document: dict[str, Any]) -> None:
        if self._now is not None and self._now["connected"]:
            self._last = self._now
        self._now = document
        self.draw()

    def draw(self) -> None:
        """Draw for the terminal as it is now."""
        from rich.console import ConsoleDimensions, Group
        from rich.text import Text

        from lmcache_persist.cli.top_view import screen

        self._size = terminal.size(sys.stdout)
        self._live.console.size = ConsoleDimensions(*self._size)
        if self._now is None:
            lines = [Text("waiting for the first interval to pass ...")]
        else:
            lines = screen(self._now, self._last, *self._size)
        self._live.update(Group(*lines), refresh=True)

    def wait(self, until_s: float) -> None:
        while (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(_RESIZE_POLL_S, left_s))
            if terminal.size(sys.stdout) != self._size:
                self.draw()


@contextlib.contextmanager
def _output(json_output: bool) -> Iterator[_Output]:
    """What takes documents and shows them."""
    if json_output:
        yield _Output()
    elif not terminal.is_terminal(sys.stdout) or terminal.is_dumb():
        yield _Lines()
    else:
        with _live() as shown:
            yield shown


@contextlib.contextmanager
def _live() -> Iterator[_Output]:
    from rich.console import Console
    from rich.live import Live

    columns, lines = terminal.size(sys.stdout)
    console = Console(width=columns, height=lines)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        shown = _Screen(live)
        shown.draw()
        yield shown
