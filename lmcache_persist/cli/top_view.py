"""How ``top`` looks: a screen on a terminal, a line per interval elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_persist.cli.output import plain
from lmcache_persist.units import (
    approximate_count,
    approximate_duration,
    approximate_size,
    counted,
    moment,
    percent,
    size_rate,
)

if TYPE_CHECKING:
    from rich.text import Text

BAR_CHARS = 5
HEADER_EVERY = 20
"""Lines after which the names of the columns are said again."""
_STATE_LINES, _ENGINE_LINES = 3, 3
"""Lines for a long state; and for the engines, where there are few, before more numbers."""
_NUMBERS_PER_LINE = (3, 2, 1)

_COLUMNS = (
    # Name, width, and what goes first where there is no room; 0 always stays.
    ("time", 8, 0),
    ("hit", 7, 0),
    ("asked/s", 8, 9),
    ("loaded/s", 8, 8),
    ("out", 13, 0),
    ("in", 13, 1),
    ("to disk", 13, 10),
    ("memory", 7, 3),
    ("disk", 7, 2),
    ("leases", 6, 11),
    ("queue", 6, 4),
    ("evict/s", 7, 7),
    ("drop/s", 6, 5),
    ("clients", 7, 12),
)


def _full(document: dict[str, Any]) -> tuple[float | None, float | None]:
    """Shares of memory and disk tier that are taken."""
    memory, disk = document["memory"], document["disk"]
    used = disk["used_bytes"]
    return (
        1 - memory["free_bytes"] / memory["size_bytes"],
        None if used is None else used / disk["capacity_bytes"],
    )


def _evictions(rates: dict[str, Any]) -> float | None:
    known = [rates[name] for name in ("memory_evictions", "disk_evictions")]
    return None if None in known else sum(known)


# -- lines ---------------------------------------------------------------------------------


def _columns_that_fit(width: int | None) -> list[int]:
    shown = list(range(len(_COLUMNS)))
    while width is not None and sum(_COLUMNS[at][1] + 1 for at in shown) - 1 > width:
        least = max(shown, key=lambda at: _COLUMNS[at][2])
        if not _COLUMNS[least][2]:
            break
        shown.remove(least)
    return shown


def header_line(width: int | None = None) -> str:
    """The names of the columns; of a terminal's width, those that fit."""
    return " ".join(_COLUMNS[at][0].rjust(_COLUMNS[at][1]) for at in _columns_that_fit(width))


def line(document: dict[str, Any], width: int | None = None) -> str:
    """One interval, as a line."""
    at = document["at"][11:19]
    if not document["connected"]:
        return f"{at.rjust(8)} no answer: {plain(document['error']['message'])}"
    rates, (memory, disk) = document["per_second"], _full(document)
    cells: Sequence[str] = (
        at,
        percent(document["hit_rate"]),
        approximate_count(rates["lookup_tokens"]),
        approximate_count(rates["loaded_tokens"]),
        size_rate(rates["loaded_bytes"]),
        size_rate(rates["committed_bytes"]),
        size_rate(rates["stored_bytes"]),
        percent(memory),
        percent(disk),
        str(document["leases"]),
        str(sum(document["queues"][name] for name in ("lookups", "reads", "writes"))),
        approximate_count(_evictions(rates)),
        approximate_count(rates["dropped_stores"]),
        str(document["clients"]),
    )
    return " ".join(cells[at].rjust(_COLUMNS[at][1]) for at in _columns_that_fit(width))


def problem_lines(document: dict[str, Any], before: Sequence[str]) -> list[str]:
    """What is the matter, where that is not what it was ``before``."""
    at, problems = document["at"][11:19], document["problems"]
    if list(before) == problems:
        return []
    return [f"{at} problem: {plain(one)}" for one in problems] or [f"{at} no problem any more"]


# -- screen --------------------------------------------------------------------------------


def screen(
    document: dict[str, Any], last: dict[str, Any] | None, width: int, height: int
) -> list[Text]:
    """One interval, as the lines of a screen: never wider or more than there is room.

    Args:
        document: of this interval.
        last: of the last one that was answered, shown below while there is no answer.
        width: columns of the terminal.
        height: its lines.
    """
    lines = [_head(document, width)]
    if document["connected"]:
        lines = (lines + _state(document, width))[: max(2, height // 2)]
        return lines + _body(document, width, height - len(lines))
    lines += _wrapped(f"no answer: {plain(document['error']['message'])}", width, "bold red")
    if last is not None:
        lines += _wrapped("the numbers below are the last that were heard", width, "dim")
        lines += _body(last, width, height - len(lines))
    return lines[:height]


def _body(document: dict[str, Any], width: int, height: int) -> list[Text]:
    numbers = list(_numbers(document, width))
    engines = _engines(document, width)
    # Few lines: the first numbers, and some of the engines.
    reserved = min(len(engines), max(_ENGINE_LINES, height // 3)) if height > 6 else 0
    numbers = numbers[: max(0, height - reserved)]
    room = max(0, height - len(numbers))
    if len(engines) > room:
        more = len(engines) - room + 1
        engines = engines[: max(0, room - 1)]
        if len(engines) > 1:
            engines += _wrapped(f"and {counted(more, 'more engine')}", width, "dim")[:1]
    return numbers + engines


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="crop")


def _wrapped(text: str, width: int, style: str = "") -> list[Text]:
    from lmcache_persist.cli.layout import shorten, wrap

    lines = wrap(text, width)
    if len(lines) > _STATE_LINES:
        rest = " ".join(lines[_STATE_LINES - 1 :])
        lines = [*lines[: _STATE_LINES - 1], shorten(rest, width)]
    return [_text(line, style) for line in lines]


def _head(document: dict[str, Any], width: int) -> Text:
    from lmcache_persist.cli.layout import shorten

    at, server = moment(document["at"]), plain(document["server"])
    for before, after in (("lmcache-persist top  ", at), ("", at), ("", at[11:])):
        room = width - len(before) - len(after) - 2
        if room >= min(len(server), 24) or (not before and after != at):
            return _text(f"{before}{shorten(server, room)}  {after}")
    return _text(shorten(server, width))


def _state(document: dict[str, Any], width: int) -> list[Text]:
    size, ready = document["chunk_size"], document["ready"]
    text = (
        f"{'ready' if ready else 'not ready'},"
        f" up {approximate_duration(int(document['uptime_s']))},"
        f" {'not bound' if size is None else f'chunk size {size}'},"
        f" {counted(document['clients'], 'client')}, version {plain(document['version'])}"
    )
    first, *others = _wrapped(text, width)
    first.stylize("bold green" if ready else "bold yellow", 0, text.index(","))
    problems = [_wrapped(plain(one), width, "yellow") for one in document["problems"]]
    return [first, *others, *itertools.chain(*problems)]


def _numbers(document: dict[str, Any], width: int) -> Iterator[Text]:
    """As many beside each other as fit; one that does not fit at all is not shown."""
    pairs = list(_pairs(document))
    for per_line in _NUMBERS_PER_LINE:
        rows = [pairs[at : at + per_line] for at in range(0, len(pairs), per_line)]
        columns = [[row[at] for row in rows if at < len(row)] for at in range(per_line)]
        names = [max(len(name) for name, _ in column) for column in columns]
        values = [max(len(value) for _, value in column) for column in columns]
        if sum(names) + sum(values) + 3 * per_line - 2 <= width:
            yield from (_number_line(row, names, values) for row in rows)
            return
    for name, value in pairs:
        if len(name) + 1 + len(value) <= width:
            yield _number_line([(name, value)], [len(name)], [len(value)])


def _number_line(
    row: Sequence[tuple[str, Text]], names: Sequence[int], values: Sequence[int]
) -> Text:
    line = _text("")
    for at, (name, value) in enumerate(row):
        line.append(f"{name:<{names[at]}} ", style="bold")
        line.append_text(value)
        if at + 1 < len(row):
            line.append(" " * (values[at] - len(value) + 2))
    return line


def _pairs(document: dict[str, Any]) -> Iterator[tuple[str, Text]]:
    """Every number and its name, the most important first."""
    rates, means, queues = document["per_second"], document["mean_ms"], document["queues"]
    memory, disk = document["memory"], document["disk"]
    memory_share, disk_share = _full(document)

    def mean(name: str) -> str:
        found = means.get(name)
        return approximate_duration(None if found is None else found / 1000)

    def per_s(name: str, unit: str = "") -> str:
        return f"{approximate_count(rates[name])}{unit}/s"

    chunks = disk["chunks"]
    told: Iterable[tuple[str, str | Text]] = (
        ("hit rate", percent(document["hit_rate"])),
        ("overall", percent(document["hit_rate_since_start"])),
        ("lookups", per_s("lookups")),
        ("memory", bar(memory_share)),
        ("disk", bar(disk_share)),
        ("dropped", per_s("dropped_stores")),
        ("out", size_rate(rates["loaded_bytes"])),
        ("in", size_rate(rates["committed_bytes"])),
        ("asked", per_s("lookup_tokens", " tok")),
        ("from disk", size_rate(rates["disk_read_bytes"])),
        ("to disk", size_rate(rates["stored_bytes"])),
        ("found", per_s("hit_tokens", " tok")),
        ("decided", mean("lookup")),
        ("durable", mean("durable")),
        ("loaded", per_s("loaded_tokens", " tok")),
        ("waiting", counted(queues["lookups"], "lookup")),
        ("for disk", f"{queues['reads']} in, {queues['writes']} out"),
        ("leases", str(document["leases"])),
        ("evicted", f"{per_s('memory_evictions')} mem"),
        ("evicted", f"{per_s('disk_evictions')} disk"),
        ("leased", approximate_size(memory["leased_bytes"])),
        ("mem size", approximate_size(memory["size_bytes"])),
        ("capacity", approximate_size(disk["capacity_bytes"])),
        ("chunks", "-" if chunks is None else str(chunks)),
    )
    for name, value in told:
        yield name, _text(value) if isinstance(value, str) else value


def bar(share: float | None) -> Text:
    """A share as a bar."""
    if share is None:
        return _text("-")
    filled = round(max(0.0, min(1.0, share)) * BAR_CHARS)
    text = _text("")
    text.append("#" * filled, style="cyan")
    text.append("." * (BAR_CHARS - filled), style="dim")
    return text.append(f" {percent(share)}")


def _engines(document: dict[str, Any], width: int) -> list[Text]:
    from lmcache_persist.cli.layout import Column, Kind, table

    if not document["engines"]:
        none = "no engine is registered"
        return [] if none in document["problems"] else _wrapped(none, width, "dim")
    columns = (
        Column("engine", Kind.NAME, least=7),  # with the hit rate on the narrowest terminal
        Column("model", Kind.NAME, drop=1, least=10),
        Column("ranks", Kind.NAME, drop=3, least=13),
        Column("lookups/s", Kind.NUMBER, drop=5),
        Column("hit", Kind.NUMBER),
        Column("out", Kind.NUMBER, drop=2),
        Column("in", Kind.NUMBER, drop=4),
    )
    rows = [
        [
            plain(one["engine"]),
            plain(one["model"]),
            str(one["world_size"]) if one["ready"] else f"{one['world_size']}, not all",
            approximate_count(one["per_second"]["lookups"]),
            percent(one["hit_rate"]),
            size_rate(one["per_second"]["loaded_bytes"]),
            size_rate(one["per_second"]["committed_bytes"]),
        ]
        for one in document["engines"]
    ]
    laid = table(columns, rows, width)
    return [_text(laid.header or "", "underline"), *map(_text, laid.lines)]
