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
        (256 << 20, "256.00 MiB (268435456 bytes)"),
        ((16 << 20) - 4096, "16.00 MiB (16773120 bytes)"),
        (19124 << 10, "18.68 MiB (19582976 bytes)"),
        ((1 << 30) + 1, "1.00 GiB (1073741825 bytes)"),
        ((1 << 44) - (32 << 20), "16.00 TiB (17592152489984 bytes)"),
    ],
)
def test_an_exact_size_is_readable_and_has_every_byte(num_bytes: int, shown: str) -> None:
    """One form for all, so that two of them can be compared: rounded, and every byte."""
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


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        ((1 << 20) - 1, "1.00 MiB"),
        (5 << 29, "2.50 GiB"),
        (3 << 50, "3072.00 TiB"),
    ],
)
def test_a_size_is_shown_in_the_unit_that_suits_it(num_bytes: int, shown: str) -> None:
    """Never 1024 of a unit that has a larger one."""
    assert units.approximate_size(num_bytes) == shown


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(None, "-"), (0, "0 B/s"), (0.01, "0.1 B/s"), (9.5, "9.5 B/s"), (2e9, "1.86 GiB/s")],
)
def test_a_rate_of_something_is_never_shown_as_none(rate: float | None, shown: str) -> None:
    """However slow: zero is what stands still, a dash what is not known."""
    assert units.size_rate(rate) == shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [(None, "-"), (0, "0"), (0.004, "0.1"), (9.5, "9.5"), (99_000, "99000"), (120_000, "120k")],
)
def test_counts_have_a_suffix_where_they_are_long(number: float | None, shown: str) -> None:
    """Powers of 1000, and something is never zero."""
    assert units.approximate_count(number) == shown


@pytest.mark.parametrize(
    ("seconds", "shown", "coarse"),
    [
        (None, "-", "-"),
        (0, "0 s", "0 s"),
        (0.000_35, "0.35 ms", "0.35 ms"),
        (0.0168, "16.8 ms", "16.8 ms"),
        (0.9999, "1.0 s", "1.0 s"),
        (42, "42 s", "42 s"),
        (60, "1 min", "1 min"),
        (11_520, "3 h 12 min", "3 h"),
        (86_400 * 28 + 59, "28 d", "28 d"),
    ],
)
def test_durations_have_one_unit_or_two(seconds: float | None, shown: str, coarse: str) -> None:
    """From a fraction of a millisecond to weeks, rounded down."""
    assert units.approximate_duration(seconds) == shown
    assert units.approximate_duration(seconds, parts=1) == coarse


def test_a_share_is_whole_only_if_it_is() -> None:
    """99.99 % are not 100 %, and one in a million is not nothing."""
    shares = (None, 0, 1e-6, 0.5, 0.999_99, 1)
    assert [units.percent(one) for one in shares] == [
        *("-", "0.0 %", "0.1 %", "50.0 %", "99.9 %", "100.0 %")
    ]
    assert units.percent(0.9999, 0) == "99 %"


def test_moments_are_utc_and_read_alike() -> None:
    """Seconds, ISO texts with and without zone; a text that is none stays; and how long ago."""
    for at in (0, "1970-01-01T00:00:00", "1970-01-01T01:00:00.5+01:00", "1970-01-01T00:00:00Z"):
        assert units.moment(at) == "1970-01-01 00:00:00Z"
    assert (units.moment(None), units.moment("odd")) == ("-", "odd")
    assert units.ago("1970-01-01T00:00:00+00:00", 7300.0) == "2 h ago"
    assert units.ago("1970-01-01T00:00:00+00:00", 0.5) == "just now"
    assert units.ago("odd", 1.0) == "odd"
