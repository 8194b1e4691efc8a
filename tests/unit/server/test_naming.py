"""Which models a word means."""

from __future__ import annotations

import pytest

from lmcache_persist.errors import ConfigError
from lmcache_persist.server.naming import MAX_CANDIDATES, checked_prefix, meant

ONE, TWO, THREE = "ab" * 32, "abababac" + "0" * 56, "cd" * 32
UNREGISTERED = "ef" * 32
NAMES = {ONE: "org/one", TWO: "org/one", THREE: "org/three"}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("org/one", [ONE, TWO]),
        ("org/three", [THREE]),
        (THREE[:6], [THREE]),
        (f" {THREE[:9].upper()} ", [THREE]),
        (ONE, [ONE]),
        (UNREGISTERED[:6], [UNREGISTERED]),
    ],
)
def test_a_name_means_all_and_a_beginning_one(wanted: str, found: list[str]) -> None:
    """A name has all of its fingerprints; 6 digits or more are those of one model."""
    assert meant(NAMES, [ONE, UNREGISTERED], wanted) == found


def test_a_name_counts_before_a_fingerprint() -> None:
    """Somebody whose model is called by digits gets that model."""
    assert meant({ONE: "cdcdcd", THREE: "x"}, [], "cdcdcd") == [ONE]


@pytest.mark.parametrize("wanted", ["org/two", "ab", "cdcdc", "zzzzzzzz", "", "ff" * 32, "Org/One"])
def test_what_is_unknown_is_refused_with_the_nearest_name(wanted: str) -> None:
    """One wording, with what was expected, the nearest name and the others."""
    with pytest.raises(ConfigError, match="is unknown to this data dir, expected a name") as caught:
        meant(NAMES, [], wanted)
    assert repr(wanted) in caught.value.message
    assert "the first 6 or more digits" in caught.value.message
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("the nearest name is 'org/")
    assert caught.value.hint.endswith("known: org/one, org/three")


def test_nothing_is_near_in_an_empty_data_dir() -> None:
    """Without any model the hint says so."""
    with pytest.raises(ConfigError) as caught:
        meant({}, [], "org/one")
    assert caught.value.hint == "no model was served from this data dir"


def test_an_unclear_beginning_lists_what_it_may_be() -> None:
    """The candidates differ in the digits that are shown; a long list ends with its number."""
    with pytest.raises(ConfigError, match="beginning of 2 models, expected of one") as caught:
        meant(NAMES, [], "ababab")
    assert caught.value.hint == f"give more digits: {ONE[:12]} (org/one), {TWO[:12]} (org/one)"
    close = [f"{'0' * 40}{number:024x}" for number in range(MAX_CANDIDATES + 3)]
    with pytest.raises(ConfigError) as caught:
        meant({}, close, "000000")
    assert f"{close[0]} (unknown model), " in str(caught.value.hint)
    assert str(caught.value.hint).endswith("and 3 more")


@pytest.mark.parametrize("text", ["", "ab", "zz" * 3, "0" * 65, "abcdé0"])
def test_what_begins_no_fingerprint_is_refused(text: str) -> None:
    """Too short, too long, or not hex."""
    with pytest.raises(ConfigError, match="no beginning of a fingerprint"):
        checked_prefix(text)
    assert checked_prefix(" ABCDEF ") == "abcdef"
