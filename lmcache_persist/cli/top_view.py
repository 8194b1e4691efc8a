"""How ``top`` looks: a screen on a terminal, a line per interval elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lmcache_persist.cli.output import plain
from lmcache_persist.units import approximate_size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

BAR_CHARS = 8
HEADER_EVERY = 20
"""Lines after which the names of the columns are said again."""

_COLUMNS = (
    ("time", 8),
    ("hit%", 6),
    ("asked/s", 9),
    ("loaded/s", 9),
    ("out B/s", 12),
    ("in B/s", 12),
    ("disk B/s", 12),
    ("mem%", 6),
    ("disk%", 6),
    ("leases", 6),
    ("queue", 6),
    ("evict/s", 8),
    ("drop/s", 7),
    ("clients", 7),
)


def percent(share: float | None) -> str:
    """A share as people read it; a dash for an unknown one."""
    return "-" if share is None else f"{100 * share:.1f}"


def per_second(value: float | None, *, size: bool = False) -> str:
    """A rate as people read it; a dash for an unknown one."""
    if value is None:
        return "-"
    if size:
        return approximate_size(round(value))
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 100 * factor:
            return f"{value / factor:.0f}{unit}"
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


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


def header_line() -> str:
    """The names of the columns."""
    return " ".join(name.rjust(width) for name, width in _COLUMNS)


def line(document: dict[str, Any]) -> str:
    """One interval, as a line."""
    at = document["at"][11:19]
    if not document["connected"]:
        return f"{at.rjust(8)} no answer: {plain(document['error']['message'])}"
    rates, (memory, disk) = document["per_second"], _full(document)
    cells: Iterable[str] = (
        at,
        percent(document["hit_rate"]),
        per_second(rates["lookup_tokens"]),
        per_second(rates["loaded_tokens"]),
        per_second(rates["loaded_bytes"], size=True),
        per_second(rates["committed_bytes"], size=True),
        per_second(rates["stored_bytes"], size=True),
        percent(memory),
        percent(disk),
        str(document["leases"]),
        str(sum(document["queues"][name] for name in ("lookups", "reads", "writes"))),
        per_second(_evictions(rates)),
        per_second(rates["dropped_stores"]),
        str(document["clients"]),
    )
    return " ".join(cell.rjust(width) for cell, (_, width) in zip(cells, _COLUMNS, strict=True))


# -- screen --------------------------------------------------------------------------------


def screen(document: dict[str, Any], last: dict[str, Any] | None) -> RenderableType:
    """One interval, as a screen.

    Args:
        document: of this interval.
        last: of the last one that was answered, shown below while there is no answer.
    """
    from rich.console import Group
    from rich.text import Text

    head = Text(f"lmcache-persist top  {plain(document['server'])}  {document['at'][:19]}Z")
    if not document["connected"]:
        trouble = Text(f"no answer: {plain(document['error']['message'])}", style="bold red")
        since = Text("the numbers below are the last that were heard", style="dim")
        return Group(head, trouble, *([since, *_body(last)] if last else []))
    return Group(head, *_body(document))


def _body(document: dict[str, Any]) -> list[RenderableType]:
    return [_state(document), _numbers(document), _engines(document)]


def _state(document: dict[str, Any]) -> Text:
    from rich.text import Text

    hours, rest = divmod(int(document["uptime_s"]), 3600)
    size = document["chunk_size"]
    text = Text(
        f"version {plain(document['version'])}, up {hours}:{rest // 60:02}:{rest % 60:02},"
        f" {'not bound' if size is None else f'chunk size {size}'}, clients {document['clients']}  "
    )
    if document["ready"]:
        text.append("ready", style="bold green")
    else:
        text.append(f"not ready: {plain('; '.join(document['problems']))}", style="bold yellow")
    return text


def _numbers(document: dict[str, Any]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    rates, means = document["per_second"], document["mean_ms"]
    memory, disk = document["memory"], document["disk"]
    memory_share, disk_share = _full(document)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    for style, width in (("bold", 8), ("", 16), ("bold", 9), ("", 15), ("bold", 8), ("", 12)):
        table.add_column(style=style, overflow="ellipsis", no_wrap=True, min_width=width)

    def size(name: str) -> str:
        return f"{per_second(rates[name], size=True)}/s"

    def mean(name: str) -> str:
        return "-" if means.get(name) is None else f"{means[name]:.2f} ms"

    def row(*cells: str | Text) -> None:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))

    row(
        *("hit rate", f"{percent(document['hit_rate'])} %"),
        *("overall", f"{percent(document['hit_rate_since_start'])} %"),
        *("lookups", f"{per_second(rates['lookups'])}/s"),
    )
    row(
        *("asked", f"{per_second(rates['lookup_tokens'])} tok/s"),
        *("found", f"{per_second(rates['hit_tokens'])} tok/s"),
        *("loaded", f"{per_second(rates['loaded_tokens'])} tok/s"),
    )
    row(
        *("out", size("loaded_bytes")),
        *("from disk", size("disk_read_bytes")),
        *("decided", mean("lookup")),
    )
    row(
        *("in", size("committed_bytes")),
        *("to disk", size("stored_bytes")),
        *("durable", mean("durable")),
    )
    row(
        *("memory", bar(memory_share)),
        *("size", approximate_size(memory["size_bytes"])),
        *("leased", approximate_size(memory["leased_bytes"])),
    )
    row(
        *("disk", bar(disk_share)),
        *("size", approximate_size(disk["capacity_bytes"])),
        *("chunks", "-" if disk["chunks"] is None else str(disk["chunks"])),
    )
    row(
        *("evicted", f"{per_second(rates['memory_evictions'])}/s memory"),
        *("", f"{per_second(rates['disk_evictions'])}/s disk"),
        *("dropped", f"{per_second(rates['dropped_stores'])}/s"),
    )
    queues = document["queues"]
    row(
        *("waiting", f"{queues['lookups']} lookups"),
        *("for disk", f"{queues['reads']} in, {queues['writes']} out"),
        *("leases", str(document["leases"])),
    )
    return table


def bar(share: float | None) -> Text:
    """A share as a bar."""
    from rich.text import Text

    if share is None:
        return Text("-")
    filled = round(max(0.0, min(1.0, share)) * BAR_CHARS)
    text = Text("#" * filled, style="cyan")
    text.append("." * (BAR_CHARS - filled), style="dim")
    return text.append(f" {percent(share)} %")


def _engines(document: dict[str, Any]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, title_justify="left", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("engine", "model", "ranks", "lookups/s", "hit %", "out/s", "in/s"):
        table.add_column(name, header_style="bold underline", no_wrap=True, overflow="ellipsis")
    for one in document["engines"]:
        rates = one["per_second"]
        table.add_row(
            *(
                Text(plain(cell))
                for cell in (
                    one["engine"],
                    one["model"],
                    one["world_size"] if one["ready"] else f"{one['world_size']}, not all there",
                    per_second(rates["lookups"]),
                    percent(one["hit_rate"]),
                    per_second(rates["loaded_bytes"], size=True),
                    per_second(rates["committed_bytes"], size=True),
                )
            )
        )
    return table if document["engines"] else Text("no engine is registered", style="dim")
