"""Sizes and durations."""

from __future__ import annotations

import pytest

from lmcache_persist import units
from lmcache_persist.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("1.5KiB", 1536),
        ("2kB", 2000),
        ("3MB", 3_000_000),
        ("1TiB", 1 << 40),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    """A size with a clear unit, or none, is its number of bytes."""
    assert units.parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        "8G",
        "8g",
        "10M",
        "",
        "GiB",
        "-1",
        "1e9",
        "0x10",
        "1_000",
        "8 G iB",
        "0.3B",
        "٣",
        "nan",
        "inf",
    ],
)
def test_what_is_no_clear_size_is_refused(text: str) -> None:
    """An ambiguous unit, a sign or a spelling of other languages is never guessed at."""
    with pytest.raises(ConfigError):
        units.parse_size(text)


def test_an_ambiguous_unit_is_answered_with_both_meanings() -> None:
    """Who writes 8G is told what to write."""
    with pytest.raises(ConfigError) as caught:
        units.parse_size("8G")
    assert caught.value.hint is not None
    assert "8GiB" in caught.value.hint
    assert "8GB" in caught.value.hint


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 bytes"),
        (1000, "1000 bytes"),
        (256 << 20, "256MiB (268435456 bytes)"),
        ((16 << 20) - 4096, "16380KiB (16773120 bytes)"),
        ((1 << 30) + 1, "1.00 GiB (1073741825 bytes)"),
        ((1 << 44) - (32 << 20), "16.00 TiB (17592152489984 bytes)"),
    ],
)
def test_an_exact_size_is_readable_and_has_every_byte(num_bytes: int, shown: str) -> None:
    """A whole number of a unit is as it is typed; what has too many digits is rounded."""
    assert units.exact_size(num_bytes) == shown


@pytest.mark.parametrize("num_bytes", [0, 1, 1023, 1024, 8 << 30, (8 << 30) + 1, 3 << 20])
def test_formatted_sizes_read_back_exactly(num_bytes: int) -> None:
    """What the effective settings show can be typed in again."""
    assert units.parse_size(units.format_size(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30.0), ("2.5s", 2.5), ("500ms", 0.5), ("2min", 120.0), ("0", 0.0), ("7d", 604800.0)],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    """A duration is a number of seconds, or has a unit."""
    assert units.parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "1w", "1m", "ten", "1e3"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    """No sign, no infinity, no unit that could be mistaken."""
    with pytest.raises(ConfigError):
        units.parse_duration_s(text)


@pytest.mark.parametrize("text", ["256.0", "1_000", "0x10", "٣", "", "1e3", "9" * 30])
def test_what_is_no_plain_integer_is_refused(text: str) -> None:
    """Only ASCII digits, and not too many, are an integer."""
    with pytest.raises(ConfigError):
        units.parse_integer(text)
