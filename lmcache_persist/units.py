"""Sizes, durations and numbers of things as people write them. Pure.

Sizes: a number of bytes, or a number with ``KiB``, ``MiB``, ``GiB``, ``TiB`` (powers of
1024) or ``kB``, ``MB``, ``GB``, ``TB`` (powers of 1000). ``8G`` is refused, because it
means either. Durations: a number of seconds, or a number with ``ms``, ``s``, ``min``,
``h`` or ``d``.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from lmcache_persist.errors import ConfigError

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


def format_size(num_bytes: int) -> str:
    """A size for people that :func:`parse_size` reads back, e.g. ``8GiB`` or ``1000000B``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes and num_bytes % _SIZE_UNITS[unit] == 0:
            return f"{num_bytes // _SIZE_UNITS[unit]}{unit}"
    return f"{num_bytes}B"


def exact_size(num_bytes: int) -> str:
    """For messages where every byte counts, e.g. ``256MiB (268435456 bytes)``."""
    if num_bytes < _SIZE_UNITS["KiB"]:
        return f"{num_bytes} bytes"
    readable = format_size(num_bytes)
    if len(readable) > len("16384MiB"):
        readable = approximate_size(num_bytes)
    return f"{readable} ({num_bytes} bytes)"


def approximate_size(num_bytes: int) -> str:
    """A size for tables, rounded to two digits behind the point, e.g. ``1.25 GiB``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes >= _SIZE_UNITS[unit]:
            return f"{num_bytes / _SIZE_UNITS[unit]:.2f} {unit}"
    return f"{num_bytes} B"


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
