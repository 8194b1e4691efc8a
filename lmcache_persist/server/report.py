"""The document that ``inspect`` shows: one rule for a live server and for files. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lmcache_persist.identity import differing_fields
from lmcache_persist.manifest.catalog import ModelRow
from lmcache_persist.manifest.snapshot import ManifestSnapshot
from lmcache_persist.store.base import Usage

UNAVAILABLE = "unavailable"
"""Stands for the store when it could not be asked or read; never for an empty one."""

MAX_DIFFERENCES = 20
"""Differing fields that are named per model."""


def inspect_document(
    snapshot: ManifestSnapshot, usage: Usage | None, *, clean_shutdown: bool | None
) -> dict[str, Any]:
    """What ``inspect --json`` prints, plus ``differs_from`` in each model.

    Args:
        snapshot: the manifest; a live server takes it from its own.
        usage: the store's, or None if it could not be asked or read.
        clean_shutdown: whether the last server that ended before now ended well, None if
            there was none or nobody can tell.

    Returns:
        Plain JSON values, with the keys in the order of docs/cli.md.
    """
    return {
        "schema_version": snapshot.schema_version,
        "binding": snapshot.binding.summary() if snapshot.binding else None,
        "models": [
            _model(row, snapshot.models[:at], usage) for at, row in enumerate(snapshot.models)
        ],
        "store": _store(usage, clean_shutdown),
        "rejections": [asdict(row) for row in snapshot.rejections],
    }


def without_differences(document: dict[str, Any]) -> dict[str, Any]:
    """The document as ``inspect --json`` prints it without ``--models``."""
    models = [
        {key: value for key, value in model.items() if key != "differs_from"}
        for model in document["models"]
    ]
    return {**document, "models": models}


def _model(row: ModelRow, earlier: Sequence[ModelRow], usage: Usage | None) -> dict[str, Any]:
    objects: int | None = None
    nbytes: int | None = None
    if usage is not None:
        used = usage.by_fingerprint.get(row.fingerprint)
        objects, nbytes = (used.objects, used.bytes) if used else (0, 0)
    return {
        "name": row.name,
        "fingerprint": row.fingerprint,
        "groups": row.groups,
        "required_alignment": row.required_alignment,
        "objects": objects,
        "bytes": nbytes,
        "first_seen": row.first_seen,
        "last_seen": row.last_seen,
        "differs_from": _difference(row, earlier),
    }


def _difference(row: ModelRow, earlier: Sequence[ModelRow]) -> dict[str, Any] | None:
    """Why a model does not share with one of the same name that was there before it.

    Of several the one that it differs from in the fewest fields, the last one of those:
    what was changed once and changed back is not named again.
    """
    before = [
        (differing_fields(_whole(other), _whole(row)), other)
        for other in reversed(earlier)
        if other.name == row.name
    ]
    if not before:
        return None
    fields, nearest = min(before, key=lambda pair: len(pair[0]))
    return {"fingerprint": nearest.fingerprint, "fields": fields[:MAX_DIFFERENCES]}


def _whole(row: ModelRow) -> dict[str, Any]:
    return {**row.identity, "groups": row.groups, "layouts": row.layouts}


def _store(usage: Usage | None, clean_shutdown: bool | None) -> dict[str, Any] | str:
    if usage is None:
        return UNAVAILABLE
    return {
        "objects": usage.objects,
        "bytes": usage.bytes,
        "capacity_bytes": usage.capacity_bytes,
        "stale_objects": usage.stale_objects,
        "clean_shutdown": clean_shutdown,
    }
