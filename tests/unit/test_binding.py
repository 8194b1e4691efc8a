"""The binding as a value."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_persist import hashing
from lmcache_persist.binding import Binding

FIELDS: dict[str, Any] = {
    "chunk_size": 1088,
    "required_alignment": 544,
    "base_chunk_size": 1024,
    "mode": "auto",
    "bound_at": "2026-01-01T00:00:00.000000Z",
    "winner": "scheduler 1",
    "backend": "lmdb",
    "store_uuid": "0123456789abcdef" * 2,
    "store_format_version": 1,
}


def test_ids_are_those_of_hashing() -> None:
    """A new binding carries the digests of its own fields."""
    binding = Binding.make(**FIELDS)
    assert binding.boundary_id == hashing.boundary_id(1088)
    assert binding.binding_id == hashing.binding_id(
        binding.boundary_id, "lmdb", FIELDS["store_uuid"], 1, FIELDS["bound_at"]
    )
    assert (binding.hash_algorithm, binding.hash_version) == ("blake3-chain", 1)


@pytest.mark.parametrize(
    ("field", "other"),
    [("bound_at", "2026-01-01T00:00:00.000001Z"), ("store_uuid", "f" * 32), ("backend", "x")],
)
def test_same_size_on_another_disk(field: str, other: str) -> None:
    """Two disks with one chunk size agree on the boundary and are two bindings."""
    one, two = Binding.make(**FIELDS), Binding.make(**{**FIELDS, field: other})
    assert one.boundary_id == two.boundary_id
    assert one.binding_id != two.binding_id


def test_json_round_trip() -> None:
    """A stamp gives back the whole binding; one with other keys is no stamp."""
    binding = Binding.make(**FIELDS)
    assert Binding.from_json(binding.to_json()) == binding
    with pytest.raises(TypeError):
        Binding.from_json({**binding.to_json(), "more": 1})
    with pytest.raises(TypeError):
        Binding.from_json({})


def test_summary_has_the_public_keys() -> None:
    """The form that `inspect` shows has exactly the keys that are promised."""
    summary = Binding.make(**FIELDS).summary()
    assert list(summary) == [
        "chunk_size",
        "required_alignment",
        "base_chunk_size",
        "mode",
        "hash_algorithm",
        "boundary_id",
        "binding_id",
        "bound_at",
        "store",
        "winner",
    ]
    assert summary["hash_algorithm"] == "blake3-chain-v1"
    assert list(summary["store"]) == ["backend", "uuid", "format_version"]
