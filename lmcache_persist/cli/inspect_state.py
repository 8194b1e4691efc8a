"""The first block of ``inspect``: does it run, is it well, is it full, does it hit. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lmcache_persist.units import (
    ago,
    approximate_duration,
    approximate_size,
    counted,
    percent,
)

_ENDED = {
    "clean": "ended cleanly",
    "unclean": "ended and had to give something up",
    "running": "was running",
    "killed": "was killed or crashed",
    "machine_down": "went down with its machine",
}


def rows(document: dict[str, Any], now_s: float, problem: str | None) -> Iterator[tuple[str, str]]:
    """What an operator wants to know first, the most important first.

    Args:
        document: of ``inspect``.
        now_s: seconds since 1970.
        problem: why a part of it is unavailable, if one is.
    """
    server, store = document.get("server"), document["store"]
    made = isinstance(store, dict) and store["clean_shutdown"] is not None
    yield "server", _server(document["boots"], server, now_s, problem, made=made)
    if problem is not None:
        yield "problem", problem
    for one in server["problems"] if server else []:
        yield "problem", str(one["detail"])
    if server:
        yield "hit rate", _hit_rate(server["counters"])
        yield "not stored", _dropped(server["dropped_stores"])
    yield "disk tier", _disk(store) if isinstance(store, dict) else str(store)
    if isinstance(store, dict):
        yield "bad chunks", _bad(store["corrupt_chunks"], live=server is not None)
    yield "refusals", _refusals(document["rejections"], now_s)
    yield "chunk size", _binding(document["binding"])


def _server(
    boots: list[dict[str, Any]],
    server: dict[str, Any] | None,
    now_s: float,
    problem: str | None,
    *,
    made: bool,
) -> str:
    if server is not None:
        state = "not ready" if server["problems"] else "ready"
        up = approximate_duration(int(server["uptime_s"]))
        engines = counted(len(server["engines"]), "engine")
        return f"runs, {state}, up {up}, {engines}"
    last = boots[-1] if boots else None
    if last is not None and last["end"] == "running":
        return "holds the data dir and does not answer" if problem else "runs"
    if last is None:
        # A store that was closed once had a server: its manifest was made anew.
        return f"does not run; {'no start is on record' if made else 'never started'}"
    when = f" {ago(last['ended_at'], now_s)}" if last["ended_at"] else ""
    return f"does not run; the last one {_ENDED[last['end']]}{when}"


def _hit_rate(counters: dict[str, Any]) -> str:
    hit, asked = counters["hit_tokens"], counters["lookup_tokens"]
    if not asked:
        return "nothing was looked up since the start"
    return f"{percent(hit / asked)} of {counted(asked, 'token')} looked up since the start"


def _dropped(drops: dict[str, int]) -> str:
    found = ", ".join(f"{count} {reason}" for reason, count in drops.items() if count)
    return f"{found} chunks since the start" if found else "nothing since the start"


def _disk(store: dict[str, Any]) -> str:
    used, capacity = store["used_bytes"], store["capacity_bytes"]
    share = percent(used / capacity if capacity else None)
    stale = f", and {store['stale_objects']} stale" if store["stale_objects"] else ""
    return (
        f"{share} full, {approximate_size(used)} of {approximate_size(capacity)};"
        f" {counted(store['objects'], 'object')}{stale}"
    )


def _bad(corrupt: int | None, *, live: bool) -> str:
    if corrupt is None or not live:
        return "not checked: verify tells"
    met = f"{corrupt} met and dropped" if corrupt else "none met"
    return f"{met} since the start; verify looks at all"


def _refusals(rejections: list[dict[str, Any]], now_s: float) -> str:
    if not rejections:
        return "none"
    total = sum(row["count"] for row in rejections)
    last = max(rejections, key=lambda row: str(row["at"]))
    return f"{total}, the last {ago(last['at'], now_s)}: {last['reason']}"


def _binding(binding: dict[str, Any] | None) -> str:
    if binding is None:
        return "not bound yet"
    return f"{binding['chunk_size']} tokens"
