"""The document that ``inspect`` shows."""

from __future__ import annotations

from typing import Any

from lmcache_persist.manifest.catalog import ModelRow
from lmcache_persist.manifest.snapshot import ManifestSnapshot
from lmcache_persist.server.report import MAX_DIFFERENCES, Seen, inspect_document


def row(number: int, name: str = "m", **identity: Any) -> ModelRow:
    """A model as the manifest has it."""
    return ModelRow(f"{number:064}", name, identity, [], [], 64, "t0", "t1")


def differences(*rows: ModelRow) -> list[Any]:
    """What each of them differs from, and in what."""
    snapshot = ManifestSnapshot(1, None, list(rows), [], [])
    document = inspect_document(Seen(snapshot), details=True)
    return [model["differs_from"] for model in document["models"]]


def test_the_nearest_of_a_name_is_compared() -> None:
    """What was changed and changed back is not named again; ties go to the latest."""
    plain = {"a": 1, "b": 1, "c": 1}
    found = differences(
        row(0, **plain),
        row(1, **{**plain, "a": 2}),
        row(2, **{**plain, "b": 2}),
        row(3, **{**plain, "b": 2, "c": 2}),
        row(4, name="other", **plain),
    )
    assert found == [
        None,
        {"fingerprint": f"{0:064}", "fields": ["a"]},
        {"fingerprint": f"{0:064}", "fields": ["b"]},
        {"fingerprint": f"{2:064}", "fields": ["c"]},
        None,
    ]
    assert differences(row(0, a=1), row(1, a=2), row(2, a=3))[2] == {
        "fingerprint": f"{1:064}",
        "fields": ["a"],
    }


def test_named_fields_are_bounded() -> None:
    """Two models that have nothing in common do not fill the screen."""
    many = {f"f{at:03}": at for at in range(100)}
    (_, found) = differences(row(0, **many), row(1))
    assert found["fields"] == sorted(many)[:MAX_DIFFERENCES]
