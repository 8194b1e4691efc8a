"""The store in the text of ``inspect``: usage, ages, order of eviction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lmcache_persist.cli.layout import Column, Kind
from lmcache_persist.cli.output import plain, write, write_fields, write_table
from lmcache_persist.units import approximate_duration, approximate_size, percent

_BAR_CHARS = 20


def write_store(store: Any, now_s: float, *, first_start: bool) -> None:
    """Its tables.

    Args:
        store: of the document.
        now_s: seconds since 1970.
        first_start: there was no server before the one that is there.
    """
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
        ("in use", _share(store["used_bytes"], store["capacity_bytes"], 1)),
        ("stale objects", store["stale_objects"]),
        ("stale size", approximate_size(store["stale_bytes"])),
        ("evicted chunks", store["evicted_chunks"]),
        ("dropped chunks", store["dropped_chunks"]),
        ("pruned chunks", store["pruned_chunks"]),
        ("corrupt chunks", "verify tells" if corrupt is None else f"{corrupt} met since the start"),
        ("clean shutdown", clean),
    ]
    write_fields("store", rows)
    seen = store["estimated_from"]
    if seen and seen["of_chunks"]:
        _write_survey(store, _estimate(seen), now_s)


def _write_survey(store: dict[str, Any], title: str, now_s: float) -> None:
    write_table(
        f"ages: time since the first write{title}",
        (
            Column("age", Kind.NUMBER),
            Column("objects", Kind.NUMBER),
            Column("size", Kind.NUMBER),
            Column("used again", Kind.NUMBER, drop=1),
            Column("", Kind.WORDS, drop=2),
        ),
        list(_age_rows(store["ages"])),
    )
    write_table(
        f"order of eviction, what goes first on top{title}",
        (
            Column("chunks", Kind.NUMBER, drop=2),
            Column("size", Kind.NUMBER),
            Column("age", Kind.NUMBER),
            Column("used again", Kind.NUMBER),
            Column("hits", Kind.NUMBER, drop=1),
        ),
        [
            (
                part["chunks"],
                approximate_size(part["bytes"]),
                _span(now_s - part["newest_at"], now_s - part["oldest_at"]),
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
        return f"over {approximate_duration(from_s)}"
    if not from_s:
        return f"under {approximate_duration(to_s)}"
    return f"{approximate_duration(from_s)} to {approximate_duration(to_s)}"


def _span(youngest_s: float, oldest_s: float) -> str:
    first, last = (
        approximate_duration(max(0, int(one)), parts=1) for one in (youngest_s, oldest_s)
    )
    return first if first == last else f"{first} to {last}"


def _share(part: int, whole: int, digits: int = 0) -> str:
    return percent(part / whole if whole else None, digits)
