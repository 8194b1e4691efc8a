"""Models, groups and objects in the text of ``inspect``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from lmcache_persist.cli.layout import Column, Kind
from lmcache_persist.cli.output import plain, write, write_fields, write_table
from lmcache_persist.units import approximate_size, moment

_MAX_VALUE_CHARS = 100


def flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Nested values by the path to them."""
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, dict) and item:
            yield from flat(item, f"{name} ")
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            for number, one in enumerate(item):
                yield from flat(one, f"{name} {number} ")
        else:
            yield name, "-" if item is None else _short(item)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


def write_models(document: dict[str, Any]) -> None:
    """Models, their groups, and with ``--models`` what their fingerprints are made of."""
    write_table(
        "models",
        (
            Column("name", Kind.NAME),
            Column("fingerprint", Kind.NAME, least=12),
            Column("tokens per block", Kind.NAME, drop=4),
            Column("alignment", Kind.NUMBER, drop=5),
            Column("objects", Kind.NUMBER, drop=2),
            Column("size", Kind.NUMBER),
            Column("hits", Kind.NUMBER, drop=1),
            Column("last seen", drop=3),
        ),
        [_model_row(model) for model in document["models"]],
    )
    if document["unregistered"]:
        write_table(
            "objects of models that the manifest does not know",
            (Column("fingerprint", Kind.NAME, least=12), "objects", "size"),
            [
                (row["fingerprint"][:12], row["objects"], approximate_size(row["bytes"]))
                for row in document["unregistered"]
            ],
        )
    _write_groups(document["models"])
    for model in document["models"]:
        if "identity" in model:
            _write_details(model)


def _write_groups(models: Sequence[dict[str, Any]]) -> None:
    write_table(
        "groups",
        (
            Column("model", Kind.NAME, least=12),
            Column("group", Kind.NUMBER),
            Column("kind", Kind.NAME, drop=2),
            Column("tokens per block", Kind.NUMBER, drop=3),
            Column("objects", Kind.NUMBER, drop=1),
            Column("size", Kind.NUMBER),
        ),
        [
            (
                model["fingerprint"][:12],
                group["group"],
                group["kind"],
                group["tokens_per_block"],
                _known(group["objects"]),
                "?" if group["bytes"] is None else approximate_size(group["bytes"]),
            )
            for model in models
            for group in model["by_group"]
        ],
    )


def _model_row(model: dict[str, Any]) -> tuple[object, ...]:
    return (
        model["name"],
        model["fingerprint"][:12],
        " ".join(str(group["tokens_per_block"]) for group in model["groups"]),
        model["required_alignment"],
        _known(model["objects"]),
        "?" if model["bytes"] is None else approximate_size(model["bytes"]),
        _known(model["hits"]),
        moment(model["last_seen"]),
    )


def _known(value: int | None) -> object:
    return "?" if value is None else value


def _write_details(model: dict[str, Any]) -> None:
    name = f"{plain(model['name'])} {model['fingerprint'][:12]}"
    if model["identity"] is not None:
        made_of = {**model["identity"], "layouts": model["layouts"]}
        write_fields(f"fingerprint of {name}", flat(made_of))
    differs = model["differs_from"]
    if differs is not None:
        fields = ", ".join(plain(field) for field in differs["fields"]) or "nothing"
        write(f"{name} differs from {differs['fingerprint'][:12]} in: {fields}")


def write_objects(document: dict[str, Any]) -> None:
    """The page of objects."""
    if document["objects"] is None:
        write("objects: unavailable")
        return
    write_table(
        "objects",
        (
            Column("key", Kind.NAME),
            Column("model", Kind.NAME, drop=2),
            Column("rank", Kind.NUMBER, drop=4),
            Column("group", Kind.NUMBER, drop=3),
            Column("size", Kind.NUMBER),
            Column("stored", drop=1),
            Column("hits", Kind.NUMBER, drop=5),
            Column("order", Kind.NUMBER, drop=7),
            Column("stale", Kind.NAME, drop=6),
        ),
        [
            (
                row["key"],
                row["model"] or "?",
                row["rank"],
                row["group"],
                approximate_size(row["bytes"]),
                moment(row["stored_at"]),
                row["hits"],
                row["order"],
                "yes" if row["stale"] else "no",
            )
            for row in document["objects"]
        ],
    )
    if document["next"] is not None:
        write(f"more with: --after {document['next']}")
