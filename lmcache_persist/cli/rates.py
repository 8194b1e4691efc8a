"""From two looks at a server's numbers to what happens per second. Pure.

The documents are those of ``stats``; the result is what ``top --json`` prints, whose keys
stay (docs/cli.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache_persist.errors import MalformedMessage

Document = Mapping[str, Any]

_COUNTERS = (
    "lookups",
    "lookup_tokens",
    "hit_tokens",
    "loaded_tokens",
    "loaded_bytes",
    "disk_read_bytes",
    "committed_bytes",
    "stored_bytes",
    "corrupt_chunks",
    "rejections",
)
_TRAFFIC = ("lookups", "lookup_tokens", "hit_tokens", "loaded_bytes", "committed_bytes")


def compare(before: Document | None, now: Document) -> dict[str, Any]:
    """What a server does, from its numbers now and a while before.

    Args:
        before: of the same server's earlier life: then nothing is known per second.
        now: its numbers.

    Returns:
        Plain JSON values; rates and times of an unknown past are null.

    Raises:
        MalformedMessage: these are not the numbers of a server that this program knows.
    """
    try:
        if before is not None and before["boot_id"] != now["boot_id"]:
            before = None
        return _compare(before, now)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedMessage(
            f"the server's numbers cannot be read: {type(error).__name__} {error}",
            hint="use the program of the server's version",
        ) from error


def _compare(before: Document | None, now: Document) -> dict[str, Any]:
    seconds = now["uptime_s"] - before["uptime_s"] if before is not None else 0.0
    old, new = _totals(before) if before is not None else None, _totals(now)
    rates = {name: _rate(old, new, name, seconds) for name in new}
    pool, disk, phases = now["pool"], now["disk"], now["lookups_by_phase"]
    return {
        "boot_id": now["boot_id"],
        "version": now["version"],
        "uptime_s": now["uptime_s"],
        "interval_s": round(seconds, 3) if before is not None else None,
        "ready": not now["problems"],
        "problems": [str(one["detail"]) for one in now["problems"]],
        "chunk_size": now["chunk_size"],
        "hit_rate": _share(rates["hit_tokens"], rates["lookup_tokens"]),
        "hit_rate_since_start": _share(new["hit_tokens"], new["lookup_tokens"]),
        "per_second": rates,
        "mean_ms": {
            name.removesuffix("_seconds"): _mean_ms(before, now, name) for name in now["histograms"]
        },
        "memory": {
            "size_bytes": pool["size_bytes"],
            "free_bytes": pool["free_bytes"],
            "leased_bytes": now["leased_bytes"],
            "reserved_bytes": pool["reserved_bytes"],
            "chunks": pool["chunks"],
        },
        "disk": {
            key: disk[key] for key in ("capacity_bytes", "used_bytes", "chunks", "stale_objects")
        },
        "leases": phases["leased"],
        "queues": {
            "lookups": phases["finding"] + phases["waiting"] + phases["loading"],
            "reads": now["reads_pending"],
            "writes": now["writer"]["backlog"],
            "commits_not_durable": now["committed_seq"] - now["durable_seq"],
        },
        "clients": now["clients"],
        "engines": _engines(before, now, seconds),
    }


def _totals(stats: Document) -> dict[str, int]:
    counters = stats["counters"]
    return {
        **{name: int(counters[name]) for name in _COUNTERS},
        "dropped_stores": sum(stats["dropped_stores"].values()),
        "memory_evictions": int(stats["pool"]["evictions"]),
        "disk_evictions": int(counters["disk_evictions"]),
    }


def _rate(
    old: Mapping[str, int] | None, new: Mapping[str, int], name: str, seconds: float
) -> float | None:
    if old is None or seconds <= 0:
        return None
    return round(max(0, new[name] - old[name]) / seconds, 3)


def _share(part: float | None, whole: float | None) -> float | None:
    return round(part / whole, 4) if part is not None and whole else None


def _mean_ms(before: Document | None, now: Document, name: str) -> float | None:
    if before is None:
        return None
    old, new = before["histograms"][name], now["histograms"][name]
    count = new["count"] - old["count"]
    return round(1000 * (new["sum"] - old["sum"]) / count, 3) if count > 0 else None


def _engines(before: Document | None, now: Document, seconds: float) -> list[dict[str, Any]]:
    earlier = {one["engine"]: one["traffic"] for one in before["engines"]} if before else {}
    rows = []
    for one in now["engines"]:
        old, new = earlier.get(one["engine"]), one["traffic"]
        rates = {name: _rate(old, new, name, seconds) for name in _TRAFFIC}
        rows.append(
            {
                "engine": one["engine"],
                "model": one["model"],
                "ready": one["fingerprint"] is not None,
                "world_size": one["world_size"],
                "hit_rate": _share(rates["hit_tokens"], rates["lookup_tokens"]),
                "hit_rate_since_start": _share(new["hit_tokens"], new["lookup_tokens"]),
                "per_second": rates,
            }
        )
    return rows
