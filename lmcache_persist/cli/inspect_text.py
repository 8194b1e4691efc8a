"""The document of ``inspect`` for people."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lmcache_persist.cli import inspect_state
from lmcache_persist.cli.inspect_models import flat, write_models, write_objects
from lmcache_persist.cli.inspect_store import write_store
from lmcache_persist.cli.layout import Column, Kind
from lmcache_persist.cli.output import Name, plain, write, write_fields, write_table
from lmcache_persist.units import (
    approximate_duration,
    approximate_size,
    counted,
    moment,
)

_BOOTS_SHOWN = 10
_ENDS = {
    "clean": "clean",
    "unclean": "not clean: what was committed last may be lost",
    "running": "runs",
    "killed": "killed or crashed",
    "machine_down": "the machine went down",
}


def write_document(document: dict[str, Any], problem: str | None = None) -> None:
    """Everything that the document has, the most important first.

    Args:
        document: of ``inspect``.
        problem: why a part of it is unavailable.
    """
    now_s = time.time()
    write_fields("state", inspect_state.rows(document, now_s, problem))
    if "server" in document:
        _write_server(document["server"])
    _write_rejections(document["rejections"])
    write_models(document)
    write_store(document["store"], now_s, first_start=len(document["boots"]) < 2)
    _write_binding(document)
    _write_starts(document["boots"])
    if "objects" in document:
        write_objects(document)
    for name, count in document.get("left_out", {}).items():
        write(f"left out: {count} {plain(name)}; narrow it with --model")


def _write_binding(document: dict[str, Any]) -> None:
    binding = document["binding"]
    rows: list[tuple[str, object]] = [("schema version", document["schema_version"])]
    if binding is None:
        rows.append(("binding", "none yet"))
    else:
        told = {**binding, "bound_at": moment(binding["bound_at"])}
        rows += [
            # The boundary id is compared with another server's: it stays whole.
            (name.replace("_", " "), Name(value) if name == "binding_id" else value)
            for name, value in flat(told)
        ]
    write_fields("binding", rows)


def _write_rejections(rejections: Sequence[dict[str, Any]]) -> None:
    write_table(
        "rejections, the last one last",
        (
            Column("last at"),
            Column("count"),
            Column("reason", Kind.NAME, least=24),
            Column("detail", Kind.WORDS),
        ),
        [(moment(row["at"]), row["count"], row["reason"], row["detail"]) for row in rejections],
    )
    # Once per reason. A server of an older version says none.
    hints = {row["reason"]: row.get("hint") for row in rejections}
    shown = [(reason, hint) for reason, hint in hints.items() if hint]
    if shown:
        write_table(
            "rejections: the ways out",
            (Column("reason", Kind.NAME, least=24), Column("hint", Kind.WORDS)),
            shown,
        )


def _write_starts(boots: Sequence[dict[str, Any]]) -> None:
    write_table(
        "starts, the last one last",
        (
            Column("started"),
            Column("ended", drop=1),
            Column("how", Kind.WORDS),
            Column("version", Kind.NAME, drop=2),
            Column("pid", Kind.NUMBER, drop=3),
        ),
        [
            (
                moment(row["started_at"]),
                moment(row["ended_at"]),
                _ENDS[row["end"]],
                row["version"],
                row["pid"],
            )
            for row in boots[-_BOOTS_SHOWN:]
        ],
    )


def _write_server(server: dict[str, Any]) -> None:
    """What a person asks a live server next. All of its numbers: ``--json``, ``/metrics``."""
    pool = server["pool"]
    rows: list[tuple[str, object]] = [
        ("endpoint", server["endpoint"]),
        ("version", server["version"]),
        ("started", moment(server["started_at"])),
        ("clients", server["clients"]),
        ("stored", counted(server["counters"]["stored_chunks"], "chunk")),
        ("pool free", approximate_size(pool["free_bytes"])),
        ("pool size", approximate_size(pool["size_bytes"])),
        ("wait for the disk", counted(server["writer"]["backlog"], "chunk")),
        ("longest silence", approximate_duration(server["longest_turn_s"])),
    ]
    if server["chunk_size_from"]:
        rows.extend(flat(server["chunk_size_from"], "chunk size from "))
    write_fields("server", rows)
    write_table(
        "engines",
        (
            Column("engine", Kind.NAME),
            Column("model", Kind.NAME),
            Column("fingerprint", Kind.NAME, drop=2, least=12),
            Column("ranks", Kind.NUMBER, drop=1),
            Column("missing ranks", Kind.WORDS),
        ),
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
