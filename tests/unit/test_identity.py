"""Identity: one spelling, every field counts, and the one that differs has a name."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from lmcache_persist import identity
from lmcache_persist.errors import IdentityUnknown

IDENTITY: dict[str, Any] = {
    "connector": "vllm",
    "connector_format": 1,
    "model": "tiny",
    "revision": None,
    "weights": "abc",
    "config": {"rope_theta": 10000.0, "hidden_size": 64},
    "kv_dtype": "bfloat16",
    "quantization": None,
    "max_model_len": None,
    "parallel": {"tp": 1, "pp": 1, "dcp": 1},
}
GROUPS = [{"kind": "full", "tokens_per_block": 544, "slots_per_block": 544, "window": 0}]
LAYOUTS = [{"layers": ["a", "b"], "isa": "amx"}]


def test_fingerprint_of_equal_things_is_equal() -> None:
    """Neither the order of keys nor list against tuple makes another fingerprint."""
    turned = dict(reversed(list(copy.deepcopy(IDENTITY).items())))
    assert identity.fingerprint(turned, tuple(GROUPS), tuple(LAYOUTS)) == identity.fingerprint(
        IDENTITY, GROUPS, LAYOUTS
    )
    assert len(identity.fingerprint(IDENTITY, GROUPS, LAYOUTS)) == 64


@pytest.mark.parametrize("field", identity.REQUIRED_FIELDS)
def test_every_field_counts(field: str) -> None:
    """Changing any one field makes another fingerprint, and the difference is named."""
    changed = {**IDENTITY, field: "something else"}
    assert identity.fingerprint(changed, GROUPS, LAYOUTS) != identity.fingerprint(
        IDENTITY, GROUPS, LAYOUTS
    )
    assert identity.differing_fields(IDENTITY, changed) == [field]


def test_unknown_fields_count_too() -> None:
    """A field that nobody asked for is part of the identity all the same."""
    base = identity.fingerprint(IDENTITY, GROUPS, LAYOUTS)
    assert identity.fingerprint({**IDENTITY, "new": None}, GROUPS, LAYOUTS) != base


def test_layouts_and_groups_count_with_their_order() -> None:
    """Another layout, another order of ranks or another geometry is another model."""
    other = [{"layers": ["a", "b"], "isa": "vec"}]
    prints = {
        identity.fingerprint(IDENTITY, GROUPS, LAYOUTS),
        identity.fingerprint(IDENTITY, GROUPS, other),
        identity.fingerprint(IDENTITY, GROUPS, LAYOUTS + other),
        identity.fingerprint(IDENTITY, GROUPS, other + LAYOUTS),
        identity.fingerprint(IDENTITY, GROUPS * 2, LAYOUTS),
        identity.fingerprint(IDENTITY, [], LAYOUTS),
    }
    assert len(prints) == 6


@pytest.mark.parametrize(
    ("left", "right"),
    [(None, "none"), (1, True), (1, "1"), (None, False), ([], {}), ("", None), (1, 1.5)],
)
def test_values_that_look_alike(left: object, right: object) -> None:
    """Values of another type are other values."""
    one = identity.fingerprint({**IDENTITY, "revision": left}, GROUPS, LAYOUTS)
    other = identity.fingerprint({**IDENTITY, "revision": right}, GROUPS, LAYOUTS)
    assert one != other
    assert identity.differing_fields({"revision": left}, {"revision": right}) == ["revision"]


@pytest.mark.parametrize("field", identity.REQUIRED_FIELDS)
def test_an_absent_field_is_refused(field: str) -> None:
    """An identity that leaves a field open has no fingerprint."""
    partial = {key: value for key, value in IDENTITY.items() if key != field}
    with pytest.raises(IdentityUnknown, match=field):
        identity.fingerprint(partial, GROUPS, LAYOUTS)


@pytest.mark.parametrize("field", ["connector", "model", "weights", "config"])
@pytest.mark.parametrize("empty", [None, "", {}])
def test_an_empty_field_is_refused(field: str, empty: object) -> None:
    """What a model is cannot be empty: it would match every other that is."""
    with pytest.raises(IdentityUnknown, match=field):
        identity.fingerprint({**IDENTITY, field: empty}, GROUPS, LAYOUTS)


def test_canonical_json() -> None:
    """Sorted, without spaces, in ASCII, with a spelling for what JSON has none for."""
    value = {"b": (1, 2.5), "a": "ü", "c": float("inf"), "d": [float("nan"), None, True]}
    assert identity.canonical_json(value) == (
        '{"a":"\\u00fc","b":[1,2.5],"c":{"float":"inf"},"d":[{"float":"nan"},null,true]}'
    )


@pytest.mark.parametrize("bad", [{1: 2}, {"a": b"bytes"}, {"a": {1, 2}}, {"a": object()}])
def test_no_canonical_form(bad: object) -> None:
    """What JSON cannot say is refused, not guessed."""
    with pytest.raises(IdentityUnknown, match="canonical form"):
        identity.canonical_json(bad)


def test_nesting_is_bounded() -> None:
    """32 levels are fine, 33 are refused, also as text from a peer."""
    for depth, fine in ((32, True), (33, False), (100_000, False)):
        data = b'{"a":' * depth + b"1" + b"}" * depth
        if fine:
            identity.parse_object(data, "layout")
        else:
            with pytest.raises(IdentityUnknown):
                identity.parse_object(data, "layout")


@pytest.mark.parametrize("bad", [b"", b"[]", b"1", b"null", b"{", b"\xff\xfe{}", b'{"a":1}x'])
def test_parse_refuses(bad: bytes) -> None:
    """Only a JSON object is an identity or a layout."""
    with pytest.raises(IdentityUnknown, match="identity"):
        identity.parse_object(bad, "identity")


def test_parse_bounds_the_size() -> None:
    """An identity above its bound is refused before it is parsed."""
    data = json.dumps({"a": "x" * identity.MAX_IDENTITY_BYTES}).encode()
    with pytest.raises(IdentityUnknown, match="at most"):
        identity.parse_object(data, "identity")


def test_cosmetic_keys() -> None:
    """Only the named keys are left out; an unknown key stays."""
    config = {"_name_or_path": "/x", "use_cache": True, "rope_theta": 1.0, "unknown": 2}
    assert identity.without_cosmetic_keys(config) == {"rope_theta": 1.0, "unknown": 2}


def test_differing_fields_gives_paths() -> None:
    """Differences are found at any depth, and lists of another length as a whole."""
    left = {"a": {"b": [1, {"c": 2}], "x": 1}, "l": [1], "same": 0}
    right = {"a": {"b": [1, {"c": 3}], "y": 1}, "l": [1, 2], "same": 0}
    assert identity.differing_fields(left, right) == ["a.b[1].c", "a.x", "a.y", "l"]
    assert identity.differing_fields(left, copy.deepcopy(left)) == []
