"""The document that ``inspect`` shows: one rule for a live server and for files. Pure.

Keys are a contract: they stay, and only more are added.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lmcache_persist.identity import differing_fields
from lmcache_persist.manifest.catalog import BootRow, ModelRow
from lmcache_persist.manifest.snapshot import ManifestSnapshot
from lmcache_persist.server import naming
from lmcache_persist.server.refusals import WAYS_OUT
from lmcache_persist.store.base import Usage
from lmcache_persist.store.survey import ModelSurvey, Survey

UNAVAILABLE = "unavailable"
"""Stands for the store when it could not be asked or read; never for an empty one."""

MAX_DIFFERENCES = 20
"""Differing fields that are named per model."""
MAX_BOOTS_SHOWN = 100
MAX_IF_SHORT = 100
"""Models, or rejections, of a document that would not fit a message; the latest are kept."""


@dataclass(frozen=True, slots=True)
class Seen:
    """All that is known when somebody looks.

    Attributes:
        snapshot: the manifest; a live server takes it from its own.
        usage: the store's, or None if it could not be asked or read.
        survey: the store's, or None likewise.
        clean_shutdown: whether the last server that ended before now ended well, None if
            there was none or nobody can tell.
        corrupt_chunks: found by the live server since its start, None if there is none.
        running: boot id of the server that holds the data dir, empty if nobody does.
        kernel_boot_id: of the machine, now; empty if it cannot be told.
    """

    snapshot: ManifestSnapshot
    usage: Usage | None = None
    survey: Survey | None = None
    clean_shutdown: bool | None = None
    corrupt_chunks: int | None = None
    running: str = ""
    kernel_boot_id: str = ""


def inspect_document(seen: Seen, *, model: str = "", details: bool = False) -> dict[str, Any]:
    """What ``inspect --json`` prints.

    Args:
        seen: what is known.
        model: name, fingerprint or the beginning of one: only these models.
        details: also what each fingerprint was made of.

    Returns:
        Plain JSON values, with the keys in the order of docs/cli.md.

    Raises:
        ConfigError: there is no such model, or it is not clear which.
    """
    snapshot, usage = seen.snapshot, seen.usage
    wanted = set(matching(snapshot.models, usage, model))
    shown = [
        _model(row, snapshot.models[:at], seen, details=details)
        for at, row in enumerate(snapshot.models)
        if row.fingerprint in wanted
    ]
    known = {row.fingerprint for row in snapshot.models}
    return {
        "schema_version": snapshot.schema_version,
        "binding": snapshot.binding.summary() if snapshot.binding else None,
        "models": shown,
        "store": _store(seen),
        "rejections": [
            {**asdict(row), "hint": WAYS_OUT.get(row.reason)} for row in snapshot.rejections
        ],
        "unregistered": [
            {"fingerprint": name, **asdict(used)}
            for name, used in sorted(usage.by_fingerprint.items() if usage else ())
            if name in wanted - known
        ],
        "boots": [
            {**asdict(row), "end": end}
            for row, end in _ends(snapshot.boots, seen.running, seen.kernel_boot_id)
        ][-MAX_BOOTS_SHOWN:],
        "left_out": {},
    }


def matching(models: Sequence[ModelRow], usage: Usage | None, wanted: str) -> list[str]:
    """Fingerprints of the models that are meant, those without a row included.

    Args:
        models: the manifest's.
        usage: the store's, if known.
        wanted: as :func:`.naming.meant` takes it; empty for all.

    Raises:
        ConfigError: there is none, or it is not clear which.
    """
    names = {row.fingerprint: row.name for row in models}
    stored = list(usage.by_fingerprint) if usage else []
    return naming.meant(names, stored, wanted) if wanted else list(dict.fromkeys([*names, *stored]))


def fit(document: dict[str, Any], limit_bytes: int) -> bytes:
    """The document as JSON within a message's bounds; ``left_out`` says what did not fit."""
    body = json.dumps(document).encode()
    for shorten in (_without_identities, _with_last_rejections, _with_last_models):
        if len(body) <= limit_bytes:
            break
        document = shorten(document)
        body = json.dumps(document).encode()
    return body


def _without_identities(document: dict[str, Any]) -> dict[str, Any]:
    models = [
        {key: None if key in ("identity", "layouts") else value for key, value in one.items()}
        for one in document["models"]
    ]
    left_out = {**document["left_out"], "identities": len(models)}
    return {**document, "models": models, "left_out": left_out}


def _with_last_rejections(document: dict[str, Any]) -> dict[str, Any]:
    kept = document["rejections"][-MAX_IF_SHORT:]
    left_out = {**document["left_out"], "rejections": len(document["rejections"]) - len(kept)}
    return {**document, "rejections": kept, "left_out": left_out}


def _with_last_models(document: dict[str, Any]) -> dict[str, Any]:
    latest = sorted(document["models"], key=lambda one: str(one["last_seen"]))[-MAX_IF_SHORT:]
    kept = {one["fingerprint"] for one in latest}
    models = [one for one in document["models"] if one["fingerprint"] in kept]
    left_out = {**document["left_out"], "models": len(document["models"]) - len(models)}
    return {**document, "models": models, "left_out": left_out}


def _model(
    row: ModelRow, earlier: Sequence[ModelRow], seen: Seen, *, details: bool
) -> dict[str, Any]:
    objects: int | None = None
    nbytes: int | None = None
    chunks: int | None = None
    if seen.usage is not None:
        used = seen.usage.by_fingerprint.get(row.fingerprint)
        chunks, objects, nbytes = (used.chunks, used.objects, used.bytes) if used else (0, 0, 0)
    surveyed = seen.survey.models.get(row.fingerprint) if seen.survey else None
    if chunks == 0:
        surveyed = ModelSurvey(0, {})
    document = {
        "name": row.name,
        "fingerprint": row.fingerprint,
        "groups": row.groups,
        "required_alignment": row.required_alignment,
        "objects": objects,
        "bytes": nbytes,
        "first_seen": row.first_seen,
        "last_seen": row.last_seen,
        "chunks": chunks,
        "hits": surveyed.hits if surveyed else None,
        "by_group": list(_by_group(row.groups, surveyed)),
    }
    if details:
        document["identity"] = row.identity
        document["layouts"] = row.layouts
        document["differs_from"] = _difference(row, earlier)
    return document


def _by_group(
    groups: Sequence[dict[str, Any]], surveyed: ModelSurvey | None
) -> Iterator[dict[str, Any]]:
    for number, group in enumerate(groups):
        used = surveyed.groups.get(number) if surveyed else None
        yield {
            "group": number,
            "kind": group.get("kind"),
            "tokens_per_block": group.get("tokens_per_block"),
            "objects": (used.objects if used else 0) if surveyed else None,
            "bytes": (used.bytes if used else 0) if surveyed else None,
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


def _store(seen: Seen) -> dict[str, Any] | str:
    usage, survey = seen.usage, seen.survey
    if usage is None:
        return UNAVAILABLE
    return {
        "objects": usage.objects,
        "bytes": usage.bytes,
        "capacity_bytes": usage.capacity_bytes,
        "stale_objects": usage.stale_objects,
        "clean_shutdown": seen.clean_shutdown,
        "chunks": usage.chunks,
        "used_bytes": usage.used_bytes,
        "stale_bytes": usage.stale_bytes,
        "evicted_chunks": usage.evicted_chunks,
        "dropped_chunks": usage.dropped_chunks,
        "pruned_chunks": usage.pruned_chunks,
        "corrupt_chunks": seen.corrupt_chunks,
        "estimated_from": None
        if survey is None
        else {"seen_chunks": survey.seen_chunks, "of_chunks": survey.of_chunks},
        "ages": None if survey is None else [asdict(one) for one in survey.ages],
        "order": None if survey is None else [asdict(one) for one in survey.order],
    }


def _ends(
    boots: Sequence[BootRow], running: str, kernel_boot_id: str
) -> Iterator[tuple[BootRow, str]]:
    """How each start ended: ``clean``, ``unclean``, ``running``, ``killed``, ``machine_down``."""
    for at, row in enumerate(boots):
        following = boots[at + 1].kernel_boot_id if at + 1 < len(boots) else kernel_boot_id
        if row.ended_at is not None:
            yield row, "clean" if row.clean else "unclean"
        elif row.boot_id == running:
            yield row, "running"
        elif following and following != row.kernel_boot_id:
            yield row, "machine_down"
        else:
            yield row, "killed"
