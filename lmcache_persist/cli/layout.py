"""Tables and texts for a terminal of a given width. Pure.

A number is never cut: half of it would read as another one. Names are shortened in the
middle, sentences wrapped at blanks; then the least important columns go, and where even that
is not enough every row becomes a list of its fields.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells, set_cell_size

GAP = "  "
LEAST_COLUMNS = 16
"""Narrower lines are laid out as if they had so many."""
_LEAST_NAME, _LEAST_WORDS = 14, 20
_BLANK = re.compile(r"(?<![0-9]) | (?![A-Za-z%])", re.ASCII)
_NUMBER = re.compile(r"[-?]?|[-+]?[0-9][0-9.,]*( ?[%A-Za-z/]+)*", re.ASCII)


class Kind(enum.Enum):
    """What the cells of a column hold."""

    NUMBER = "number"
    NAME = "name"
    WORDS = "words"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: its heading.
        kind: of its cells; None: numbers if all of them look so, else words.
        drop: 0 if it always stays; else the highest goes first where there is no room.
        least: columns that names or sentences get at least.
    """

    name: str
    kind: Kind | None = None
    drop: int = 0
    least: int | None = None


@dataclass(frozen=True, slots=True)
class Laid:
    """Lines of a table.

    Attributes:
        header: None where every row is a list of its fields.
        lines: none wider than asked for.
        dropped: names of the columns that are not shown.
    """

    header: str | None
    lines: list[str]
    dropped: list[str]


def shorten(text: str, width: int, ellipsis: str = "…") -> str:
    """A name in at most ``width`` columns, its middle left out."""
    if cell_len(text) <= width:
        return text
    room = width - cell_len(ellipsis)
    if room < 2:
        return set_cell_size(text, max(0, width)).rstrip()
    head = set_cell_size(text, room - room // 2).rstrip()
    tail = text
    while cell_len(tail) > room // 2:
        tail = tail[1:]
    return f"{head}{ellipsis}{tail}"


def wrap(text: str, width: int) -> list[str]:
    """A sentence in lines of at most ``width`` columns; words that are longer go on below.

    A number stays with its unit.
    """
    lines = [""]
    for words in _BLANK.split(text):
        for word in [words] if cell_len(words) <= width else words.split(" "):
            joined = f"{lines[-1]} {word}" if lines[-1] else word
            if cell_len(joined) <= width:
                lines[-1] = joined
            else:
                lines = ([] if lines == [""] else lines) + chop_cells(word, width)
    return lines


def pad(text: str, width: int, *, right: bool = False) -> str:
    """A text with blanks up to ``width`` columns."""
    blanks = " " * max(0, width - cell_len(text))
    return blanks + text if right else text + blanks


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, ellipsis: str = "…"
) -> Laid:
    """Lay a table out.

    Args:
        columns: of the table.
        rows: printable text, a cell per column.
        width: of the terminal.
        ellipsis: for what is left out of a name.
    """
    width = max(LEAST_COLUMNS, width)
    kinds = [_kind(column, [row[at] for row in rows]) for at, column in enumerate(columns)]
    shown = list(range(len(columns)))
    while (widths := _widths(columns, kinds, rows, shown, width)) is None:
        droppable = [at for at in shown if columns[at].drop]
        if not droppable:
            names = [column.name for column in columns]
            return Laid(None, _records(names, kinds, rows, width, ellipsis), [])
        shown.remove(max(droppable, key=lambda at: columns[at].drop))
    header = _line([columns[at].name for at in shown], [kinds[at] for at in shown], widths)
    lines = []
    for row in rows:
        lines += _row([row[at] for at in shown], [kinds[at] for at in shown], widths, ellipsis)
    dropped = [column.name for at, column in enumerate(columns) if at not in shown]
    return Laid(header, lines, dropped)


def fields(rows: Sequence[tuple[str, str, Kind]], width: int, ellipsis: str = "…") -> list[str]:
    """Names and values below each other; where names leave no room, a value is below its name."""
    width = max(LEAST_COLUMNS, width)
    names = max((cell_len(name) for name, _, _ in rows), default=0)
    lines = []
    for name, value, kind in rows:
        if names + len(GAP) + _LEAST_WORDS <= width:
            room = width - names - len(GAP)
            first, *others = _cell(value, kind, room, ellipsis)
            lines.append(f"{pad(name, names)}{GAP}{first}".rstrip())
            lines += [" " * (names + len(GAP)) + other for other in others]
        else:
            lines += wrap(name, width)
            lines += [GAP + line for line in _cell(value, kind, width - len(GAP), ellipsis)]
    return lines


def _kind(column: Column, cells: Sequence[str]) -> Kind:
    if column.kind is not None:
        return column.kind
    return Kind.NUMBER if all(map(_NUMBER.fullmatch, cells)) else Kind.WORDS


def _widths(
    columns: Sequence[Column],
    kinds: Sequence[Kind],
    rows: Sequence[Sequence[str]],
    shown: Sequence[int],
    width: int,
) -> list[int] | None:
    """Columns for each of ``shown``; None if they do not fit, however names are shortened."""
    wanted, least = [], []
    for at in shown:
        name, kind = cell_len(columns[at].name), kinds[at]
        widest = max((cell_len(row[at]) for row in rows), default=0)
        wanted.append(max(name, widest))
        bound = columns[at].least or (_LEAST_NAME if kind is Kind.NAME else _LEAST_WORDS)
        if kind is Kind.NUMBER:
            bound = widest
        least.append(max(name, min(widest, bound)))
    room = width - len(GAP) * (len(shown) - 1)
    if sum(least) > room:
        return None
    while sum(wanted) > room:  # the widest that can give way does
        over = [(wanted[at], -at) for at in range(len(shown)) if wanted[at] > least[at]]
        wanted[-max(over)[1]] -= 1
    return wanted


def _cell(text: str, kind: Kind, width: int, ellipsis: str) -> list[str]:
    return [shorten(text, width, ellipsis)] if kind is Kind.NAME else wrap(text, width)


def _line(cells: Sequence[str], kinds: Sequence[Kind], widths: Sequence[int]) -> str:
    return GAP.join(
        pad(cell, width, right=kind is Kind.NUMBER)
        for cell, kind, width in zip(cells, kinds, widths, strict=True)
    ).rstrip()


def _row(
    cells: Sequence[str], kinds: Sequence[Kind], widths: Sequence[int], ellipsis: str
) -> list[str]:
    parts = [
        _cell(cell, kind, width, ellipsis)
        for cell, kind, width in zip(cells, kinds, widths, strict=True)
    ]
    return [
        _line([part[at] if at < len(part) else "" for part in parts], kinds, widths)
        for at in range(max(map(len, parts)))
    ]


def _records(
    names: Sequence[str],
    kinds: Sequence[Kind],
    rows: Sequence[Sequence[str]],
    width: int,
    ellipsis: str,
) -> list[str]:
    lines: list[str] = []
    for row in rows:
        lines += [""] if lines else []
        lines += fields(list(zip(names, row, kinds, strict=True)), width, ellipsis)
    return lines
