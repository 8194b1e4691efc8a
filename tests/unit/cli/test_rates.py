"""From two looks at a server to what happens per second, and how that is shown."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from lmcache_persist.cli import top_view
from lmcache_persist.cli.rates import compare
from lmcache_persist.errors import MalformedMessage


def stats(**changes: Any) -> dict[str, Any]:
    """A server's numbers, as far as they are needed."""
    found: dict[str, Any] = {
        "boot_id": "b",
        "version": "1",
        "uptime_s": 100.0,
        "problems": [],
        "chunk_size": 256,
        "counters": dict.fromkeys(
            (
                *("lookups", "lookup_tokens", "hit_tokens", "loaded_tokens", "loaded_bytes"),
                *("disk_read_bytes", "committed_bytes", "stored_bytes", "corrupt_chunks"),
                *("rejections", "disk_evictions"),
            ),
            0,
        ),
        "dropped_stores": {"no_slot": 0, "disk_error": 0},
        "histograms": {"lookup_seconds": {"buckets": [], "count": 0, "sum": 0.0}},
        "pool": {
            "size_bytes": 1000,
            "free_bytes": 250,
            "reserved_bytes": 0,
            "chunks": 3,
            "evictions": 0,
        },
        "disk": {"capacity_bytes": 2000, "used_bytes": 500, "chunks": 4, "stale_objects": 0},
        "leased_bytes": 0,
        "lookups_by_phase": {"finding": 1, "waiting": 2, "loading": 3, "leased": 4, "missed": 5},
        "reads_pending": 6,
        "writer": {"backlog": 7},
        "committed_seq": 9,
        "durable_seq": 8,
        "clients": 2,
        "engines": [],
    }
    return found | changes


def engine(lookup_tokens: int, hit_tokens: int) -> dict[str, Any]:
    """An engine's row."""
    return {
        "engine": "e\x1b[31m",
        "model": "m",
        "fingerprint": "f",
        "world_size": 2,
        "traffic": {
            "lookups": 0,
            "lookup_tokens": lookup_tokens,
            "hit_tokens": hit_tokens,
            "loaded_bytes": 0,
            "committed_bytes": 0,
        },
    }


def later(before: dict[str, Any], seconds: float, **counters: int) -> dict[str, Any]:
    """The same server's numbers after a while."""
    found = copy.deepcopy(before)
    found["uptime_s"] += seconds
    for name, amount in counters.items():
        found["counters"][name] += amount
    return found


def test_rates_are_of_the_interval_by_the_servers_own_clock() -> None:
    """Growth per second; the hit rate of the interval beside that of the server's life."""
    before = stats(engines=[engine(0, 0)])
    before["counters"] |= {"lookup_tokens": 1000, "hit_tokens": 0}
    now = later(before, 4.0, lookup_tokens=1000, hit_tokens=550, loaded_bytes=4096, lookups=2)
    now["dropped_stores"]["no_slot"] = 8
    now["pool"]["evictions"] = 2
    now["histograms"]["lookup_seconds"] |= {"count": 2, "sum": 0.02}
    now["engines"] = [engine(1000, 250)]
    found = compare(before, now)
    assert (found["hit_rate"], found["hit_rate_since_start"]) == (0.55, 0.275)
    rates = found["per_second"]
    assert (rates["lookup_tokens"], rates["loaded_bytes"], rates["lookups"]) == (250, 1024, 0.5)
    assert (rates["dropped_stores"], rates["memory_evictions"]) == (2, 0.5)
    assert found["mean_ms"] == {"lookup": 10.0}
    assert found["queues"] == {"lookups": 6, "reads": 6, "writes": 7, "commits_not_durable": 1}
    assert found["leases"] == 4
    assert found["engines"][0]["hit_rate"] == 0.25


def test_another_life_has_no_rates_yet() -> None:
    """After a restart, or at first, nothing is known per second; a clock at rest is no crash."""
    for before in (None, stats(boot_id="earlier")):
        found = compare(before, stats())
        assert set(found["per_second"].values()) == {None}
        assert found["interval_s"] is None
        assert found["hit_rate"] is None
    assert compare(stats(), stats())["per_second"]["lookups"] is None


@pytest.mark.parametrize("broken", [{"counters": {}}, {"pool": None}, {"engines": [1]}])
def test_numbers_of_another_version_are_refused(broken: dict[str, Any]) -> None:
    """What this program does not understand is an error of its own, never a traceback."""
    with pytest.raises(MalformedMessage):
        compare(None, stats(**broken))


def documents() -> list[dict[str, Any]]:
    """Of a first, a busy, an unbound and an absent server."""
    head = {"at": "2026-01-31T10:00:01.000Z", "server": "ipc:///s\x1b[2J", "connected": True}
    before = stats(engines=[engine(0, 0)], leased_bytes=900 << 30, clients=1000)
    before["pool"] |= {"size_bytes": 999 << 30, "free_bytes": 0}
    before["disk"] |= {"capacity_bytes": 999 << 40, "used_bytes": 999 << 40, "chunks": 10**9}
    before["lookups_by_phase"] |= {"leased": 9_999, "loading": 9_999}
    before |= {"reads_pending": 9_999, "writer": {"backlog": 9_999}}
    much = dict.fromkeys(before["counters"], 99_999_999_999)
    busy = compare(before, later(before, 1.0, **much))
    unknown = stats(chunk_size=None, problems=[{"reason": "unbound", "detail": "not bound"}])
    unknown["disk"] = dict.fromkeys(unknown["disk"]) | {"capacity_bytes": 2000}
    away = {"code": "c", "message": "nobody\nanswers", "hint": None}
    return [
        {**head, **compare(None, stats())},
        {**head, **busy},
        {**head, **compare(None, unknown)},
        {**head, "connected": False, "error": away},
    ]


def test_every_state_is_one_line_of_the_columns() -> None:
    """A line has the columns of its header and no control character, whatever is unknown."""
    for document in documents():
        line = top_view.line(document)
        assert line.isprintable()
        if document["connected"]:
            assert len(line) == len(top_view.header_line())
            assert len(line.split(" ")) >= len(top_view.header_line().split())


def test_every_state_fits_a_screen_of_80_columns() -> None:
    """Nothing is cut off in the numbers, and nothing steers the terminal."""
    for document in documents():
        lines = [line.plain for line in top_view.screen(document, documents()[1], 80, 24)]
        text = "\n".join(lines)
        assert all(line.isprintable() for line in lines)
        assert "…" not in text, text
        assert max(map(len, lines)) <= 80
    assert "nobody\\nanswers" in text
    assert "last that were heard" in text
