"""Sizes, rates, durations, moments and numbers of things as people read and write them. Pure.

Whatever a verb shows to people is written here, so that all of them write it alike; documents
for programs have plain numbers with the unit in the key. What is to be typed again (a setting,
a flag in a hint) is a :func:`format_size`, without a blank; what was measured is approximate.

Sizes: a number of bytes, or a number with ``KiB``, ``MiB``, ``GiB``, ``TiB`` (powers of
1024) or ``kB``, ``MB``, ``GB``, ``TB`` (powers of 1000). ``8G`` is refused, because it
means either. Durations: a number of seconds, or a number with ``ms``, ``s``, ``min``,
``h`` or ``d``.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from fractions import Fraction
from typing import Final

from lmcache_persist.errors import ConfigError

PAGE_BYTES: Final = 4096
"""Of the files of a store and a pool."""

_SIZE_UNITS = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_UNITS_BY_LOWER_CASE = {name.lower(): factor for name, factor in _SIZE_UNITS.items()}
_DURATION_UNITS = {
    "": Fraction(1),
    "s": Fraction(1),
    "ms": Fraction(1, 1000),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
# Bounded, ASCII only: int() would also take other scripts' digits and underscores.
_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", re.ASCII)
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of a size such as ``8GiB``.

    Raises:
        ConfigError: no size, an ambiguous unit, or no whole number of bytes.
    """
    match = _NUMBER.fullmatch(text.strip())
    unit = match[2].lower() if match else ""
    if not match or (unit and unit not in _UNITS_BY_LOWER_CASE):
        number = match[1] if match else "8"
        letter = unit[:1].upper() if unit[:1] in ("k", "m", "g", "t") else "G"
        kilo = "k" if letter == "K" else letter
        raise ConfigError(
            f"{text!r} is no size, expected a number of bytes or a number with a unit",
            hint=f"for example {number}{letter}iB or {number}{kilo}B",
        )
    value = Fraction(match[1]) * (_UNITS_BY_LOWER_CASE[unit] if unit else 1)
    if value.denominator != 1:
        raise ConfigError(f"{text!r} is no whole number of bytes")
    return int(value)


def whole_pages(num_bytes: int) -> int:
    """A size rounded down to whole pages of :data:`PAGE_BYTES`: nobody counts ``10GB`` in them."""
    return num_bytes - num_bytes % PAGE_BYTES


def is_size_unit(word: str) -> bool:
    """Whether a word alone is the unit of a size, in whatever case."""
    return word.lower() in _UNITS_BY_LOWER_CASE


def format_size(num_bytes: int) -> str:
    """A size for people that :func:`parse_size` reads back, e.g. ``8GiB`` or ``1000000B``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes and num_bytes % _SIZE_UNITS[unit] == 0:
            return f"{num_bytes // _SIZE_UNITS[unit]}{unit}"
    return f"{num_bytes}B"


def exact_size(num_bytes: int) -> str:
    """For messages where every byte counts, e.g. ``256.00 MiB (268435456 bytes)``."""
    if num_bytes < _SIZE_UNITS["KiB"]:
        return f"{num_bytes} bytes"
    return f"{approximate_size(num_bytes)} ({num_bytes} bytes)"


def approximate_size(num_bytes: float) -> str:
    """A size for tables, rounded to two digits behind the point, e.g. ``1.25 GiB``."""
    if round(num_bytes) < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        shown = f"{num_bytes / _SIZE_UNITS[unit]:.2f}"
        if float(shown) < 1024:  # as shown: 1024.00 KiB would be a MiB
            return f"{shown} {unit}"
    return f"{num_bytes / _SIZE_UNITS['TiB']:.2f} TiB"


def size_rate(bytes_per_s: float | None) -> str:
    """Bytes per second, e.g. ``1.25 GiB/s``; a dash for an unknown rate.

    The slowest have a digit behind the point: only what stands still is ``0 B/s``.
    """
    if bytes_per_s is None:
        return "-"
    if 0 < bytes_per_s < 10:
        return f"{max(bytes_per_s, 0.1):.1f} B/s"
    return f"{approximate_size(bytes_per_s)}/s"


def approximate_count(number: float | None) -> str:
    """A number, or a rate of things, where there is little room, e.g. ``950`` or ``120k``.

    A dash for an unknown one; powers of 1000.
    """
    if number is None:
        return "-"
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if round(number / factor) >= 100:
            return f"{number / factor:.0f}{unit}"
    return f"{number:.0f}" if number >= 10 or number == 0 else f"{max(number, 0.1):.1f}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share of 1, e.g. ``97.5 %``; a dash for an unknown one.

    Only the whole is ``100 %`` and only nothing is ``0 %``: a rounded one stays below, or above.
    """
    if share is None:
        return "-"
    value = 100 * share
    if 0 < value < 100:
        step = 10.0**-digits
        value = min(max(value, step), 100 - step)
    return f"{value:.{digits}f} %"


def approximate_duration(seconds: float | None, parts: int = 2) -> str:
    """A duration, e.g. ``0.35 ms``, ``42 s``, ``3 h 12 min``; a dash for an unknown one.

    Args:
        seconds: at least 0.
        parts: units of a minute and more: 1 is coarse, ``3 h``. Rounded down.
    """
    if seconds is None:
        return "-"
    if 0 < seconds < 0.9995:
        return _short_duration(1000 * seconds, "ms")
    if seconds < 60:
        return _short_duration(seconds, "s")
    whole = int(seconds)
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    first = next(at for at, (_, size) in enumerate(units) if whole >= size)
    shown = []
    for name, size in units[first : first + parts]:
        if whole >= size:
            shown.append(f"{whole // size} {name}")
        whole %= size
    return " ".join(shown)


def _short_duration(number: float, unit: str) -> str:
    if number == round(number) or number >= 99.95:
        return f"{number:.0f} {unit}"
    return f"{number:.{2 if unit == 'ms' and number < 9.995 else 1}f} {unit}"


def moment(at: float | str | None) -> str:
    """A moment, e.g. ``2026-01-31 10:00:01Z``; a dash for an unknown one.

    Args:
        at: seconds since 1970, or an ISO 8601 text; a text that is none is shown as it is.
    """
    if at is None:
        return "-"
    if isinstance(at, str):
        try:
            found = datetime.fromisoformat(at)
        except ValueError:
            return at
        found = found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    else:
        found = datetime.fromtimestamp(at, UTC)
    return f"{found:%Y-%m-%d %H:%M:%S}Z"


def ago(at: str, now_s: float) -> str:
    """How long ago a moment was, e.g. ``3 h ago``; the moment itself if that cannot be told."""
    try:
        passed_s = now_s - datetime.fromisoformat(at).timestamp()
    except ValueError:
        return at
    return f"{approximate_duration(int(passed_s), parts=1)} ago" if passed_s >= 1 else "just now"


def counted(number: int, noun: str) -> str:
    """A number of things: ``1 object``, ``2 objects``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def parse_duration_s(text: str) -> float:
    """Seconds of a duration such as ``30``, ``2.5s``, ``500ms``, ``2min`` or ``7d``.

    Raises:
        ConfigError: no duration.
    """
    match = _NUMBER.fullmatch(text.strip())
    if not match or match[2] not in _DURATION_UNITS:
        raise ConfigError(
            f"{text!r} is no duration, expected a number of seconds or one with a unit",
            hint="for example 30, 2.5s, 500ms, 2min, 12h or 7d",
        )
    seconds = float(Fraction(match[1]) * _DURATION_UNITS[match[2]])
    if not math.isfinite(seconds):
        raise ConfigError(f"{text!r} is no finite duration")
    return seconds


def parse_integer(text: str) -> int:
    """A decimal integer in ASCII digits; ``256.0``, ``1_000`` and ``0x10`` are none.

    Raises:
        ConfigError: no integer.
    """
    if not _INTEGER.fullmatch(text.strip()):
        raise ConfigError(f"{text!r} is no integer, expected digits only, for example 256")
    return int(text.strip())
