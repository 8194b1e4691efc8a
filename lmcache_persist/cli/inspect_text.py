"""The document of ``inspect`` for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from lmcache_persist.cli.output import plain, write, write_table
from lmcache_persist.units import approximate_size

_BAR_CHARS = 30
_MAX_VALUE_CHARS = 100
_BOOTS_SHOWN = 10
_ENDS = {
    "clean": "clean",
    "unclean": "not clean: what was committed last may be lost",
    "running": "runs",
    "killed": "killed or crashed",
    "machine_down": "the machine went down",
}


def write_document(document: dict[str, Any]) -> None:
    """Everything that the document has, in tables."""
    binding = document["binding"]
    write(f"schema version: {document['schema_version']}")
    if binding is None:
        write("binding: none yet")
    else:
        write_table("binding", ("field", "value"), list(_flat(binding)))
    _write_store(document["store"], first_start=len(document["boots"]) < 2)
    _write_models(document)
    write_table(
        "rejections",
        ("last at", "count", "reason", "detail"),
        [(row["at"], row["count"], row["reason"], row["detail"]) for row in document["rejections"]],
    )
    write_table(
        "starts",
        ("started", "ended", "how", "version", "pid"),
        [
            (
                row["started_at"],
                row["ended_at"] or "-",
                _ENDS[row["end"]],
                row["version"],
                row["pid"],
            )
            for row in document["boots"][-_BOOTS_SHOWN:]
        ],
    )
    if "server" in document:
        _write_server(document["server"])
    if "objects" in document:
        _write_objects(document)
    for name, count in document.get("left_out", {}).items():
        write(f"left out: {count} {plain(name)}; narrow it with --model")


def _flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Nested values by the path to them."""
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, dict) and item:
            yield from _flat(item, f"{name} ")
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            for number, one in enumerate(item):
                yield from _flat(one, f"{name} {number} ")
        else:
            yield name, "-" if item is None else _short(item)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


def _write_server(server: dict[str, Any]) -> None:
    """What a person asks a live server first. All of its numbers: ``--json``, ``/metrics``."""
    counters, pool = server["counters"], server["pool"]
    rows: list[tuple[str, object]] = [
        ("endpoint", server["endpoint"]),
        ("version", server["version"]),
        ("up", f"{server['uptime_s']:.0f} s"),
        ("problems", "; ".join(one["detail"] for one in server["problems"]) or "none"),
        ("clients", server["clients"]),
        ("hit tokens", f"{counters['hit_tokens']} of {counters['lookup_tokens']} looked up"),
        ("stored chunks", counters["stored_chunks"]),
        ("dropped stores", sum(server["dropped_stores"].values())),
        ("pool free", approximate_size(pool["free_bytes"])),
        ("pool size", approximate_size(pool["size_bytes"])),
        ("wait for the disk", f"{server['writer']['backlog']} chunks"),
        ("longest silence", f"{server['longest_turn_s']:.3f} s"),
    ]
    if server["chunk_size_from"]:
        rows.extend(_flat(server["chunk_size_from"], "chunk size from "))
    write_table("server", ("field", "value"), rows)
    write_table(
        "engines",
        ("engine", "model", "fingerprint", "ranks", "missing ranks"),
        [
            (
                one["engine"],
                one["model"],
                (one["fingerprint"] or "-")[:12],
                one["world_size"],
                " ".join(map(str, one["missing_ranks"])) or "-",
            )
            for one in server["engines"]
        ],
    )


def _write_store(store: Any, *, first_start: bool) -> None:
    if not isinstance(store, dict):
        write(f"store: {plain(store)}")
        return
    nobody = "no earlier server" if first_start else "not known"
    clean = {True: "yes", False: "no", None: nobody}[store["clean_shutdown"]]
    corrupt = store["corrupt_chunks"]
    rows: list[tuple[str, object]] = [
        ("objects", store["objects"]),
        ("chunks", store["chunks"]),
        ("size", approximate_size(store["bytes"])),
        ("capacity", approximate_size(store["capacity_bytes"])),
        ("in use", _share(store["used_bytes"], store["capacity_bytes"])),
        ("stale objects", store["stale_objects"]),
        ("stale size", approximate_size(store["stale_bytes"])),
        ("evicted chunks", store["evicted_chunks"]),
        ("dropped chunks", store["dropped_chunks"]),
        ("pruned chunks", store["pruned_chunks"]),
        ("corrupt chunks", "verify tells" if corrupt is None else f"{corrupt} since the start"),
        ("clean shutdown", clean),
    ]
    write_table("store", ("field", "value"), rows)
    seen = store["estimated_from"]
    if not seen or not seen["of_chunks"]:
        return
    title = _estimate(seen)
    write_table(
        f"ages: time since the first write{title}",
        ("age", "objects", "size", "used again", ""),
        list(_age_rows(store["ages"])),
    )
    write_table(
        f"order of eviction, what goes first on top{title}",
        ("chunks", "size", "first written", "used again", "hits"),
        [
            (
                part["chunks"],
                approximate_size(part["bytes"]),
                _span(part["oldest_at"], part["newest_at"]),
                _share(part["hit_chunks"], part["chunks"]),
                part["hits"],
            )
            for part in store["order"]
        ],
    )


def _estimate(seen: dict[str, int]) -> str:
    if seen["seen_chunks"] == seen["of_chunks"]:
        return ""
    return f" (estimated from {seen['seen_chunks']} of {seen['of_chunks']} chunks)"


def _age_rows(ages: Sequence[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    most = max(bucket["bytes"] for bucket in ages)
    for bucket in ages:
        yield (
            _age(bucket["from_s"], bucket["to_s"]),
            bucket["objects"],
            approximate_size(bucket["bytes"]),
            _share(bucket["hit_chunks"], bucket["chunks"]),
            "#" * -(-_BAR_CHARS * bucket["bytes"] // most) if most else "",
        )


def _age(from_s: int, to_s: int | None) -> str:
    if to_s is None:
        return f"over {_duration(from_s)}"
    return f"{_duration(from_s)} to {_duration(to_s)}" if from_s else f"under {_duration(to_s)}"


def _duration(seconds: int) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _span(oldest: int, newest: int) -> str:
    first, last = _when(oldest), _when(newest)
    return first if first == last else f"{first} to {last}"


def _when(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _write_models(document: dict[str, Any]) -> None:
    write_table(
        "models",
        (
            "name",
            "fingerprint",
            "tokens per block",
            "alignment",
            "objects",
            "size",
            "hits",
            "last seen",
        ),
        [_model_row(model) for model in document["models"]],
    )
    if document["unregistered"]:
        write_table(
            "objects of models that the manifest does not know",
            ("fingerprint", "objects", "size"),
            [
                (row["fingerprint"][:12], row["objects"], approximate_size(row["bytes"]))
                for row in document["unregistered"]
            ],
        )
    write_table(
        "groups",
        ("model", "group", "kind", "tokens per block", "objects", "size"),
        [
            (
                model["fingerprint"][:12],
                group["group"],
                group["kind"],
                group["tokens_per_block"],
                _known(group["objects"]),
                "?" if group["bytes"] is None else approximate_size(group["bytes"]),
            )
            for model in document["models"]
            for group in model["by_group"]
        ],
    )
    for model in document["models"]:
        if "identity" in model:
            _write_details(model)


def _model_row(model: dict[str, Any]) -> tuple[object, ...]:
    return (
        model["name"],
        model["fingerprint"][:12],
        " ".join(str(group["tokens_per_block"]) for group in model["groups"]),
        model["required_alignment"],
        _known(model["objects"]),
        "?" if model["bytes"] is None else approximate_size(model["bytes"]),
        _known(model["hits"]),
        model["last_seen"],
    )


def _known(value: int | None) -> object:
    return "?" if value is None else value


def _write_details(model: dict[str, Any]) -> None:
    name = f"{plain(model['name'])} {model['fingerprint'][:12]}"
    if model["identity"] is not None:
        made_of = {**model["identity"], "layouts": model["layouts"]}
        write_table(f"fingerprint of {name}", ("field", "value"), list(_flat(made_of)))
    differs = model["differs_from"]
    if differs is not None:
        fields = ", ".join(plain(field) for field in differs["fields"]) or "nothing"
        write(f"{name} differs from {differs['fingerprint'][:12]} in: {fields}")


def _write_objects(document: dict[str, Any]) -> None:
    if document["objects"] is None:
        write("objects: unavailable")
        return
    write_table(
        "objects",
        ("key", "model", "rank", "group", "size", "stored", "hits", "order", "stale"),
        [
            (
                row["key"],
                row["model"] or "?",
                row["rank"],
                row["group"],
                approximate_size(row["bytes"]),
                row["stored_at"],
                row["hits"],
                row["order"],
                "yes" if row["stale"] else "no",
            )
            for row in document["objects"]
        ],
    )
    if document["next"] is not None:
        write(f"more with: --after {document['next']}")
