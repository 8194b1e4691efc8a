"""The numbers of :mod:`lmcache_persist.server.stats` as Prometheus metrics.

Names, units and meaning are documented in docs/metrics.md, and a test holds the two together.
Labels are bounded: reasons and types are ours; model names are at most
:data:`~lmcache_persist.server.metrics.MAX_MODELS`, short and printable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

PREFIX = "lmcache_persist_"
Stats = Mapping[str, Any]

COUNTERS: dict[str, str] = {
    "binds": "Binds asked for.",
    "lookups": "Prompts looked up, each once.",
    "lookups_repeated": "Prompts looked up again after a preemption.",
    "lookup_tokens": "Tokens of prompts that were looked up.",
    "hit_tokens": "Tokens that lookups found restorable.",
    "memory_hit_chunks": "Chunks of hits that were in the pool.",
    "disk_hit_chunks": "Chunks of hits that were read from disk.",
    "loads": "Hits that engines report as loaded.",
    "loaded_tokens": "Tokens that engines report as loaded.",
    "loaded_bytes": "Bytes of hits that engines report as loaded.",
    "disk_read_bytes": "Bytes read from disk and verified.",
    "commits": "Reservations committed.",
    "committed_bytes": "Bytes committed into the pool.",
    "stored_chunks": "Chunks made durable.",
    "stored_bytes": "Bytes made durable.",
    "swept_objects": "Stale objects removed from disk.",
    "pruned_chunks": "Chunks that an operator pruned from disk.",
    "corrupt_chunks": "Chunks proven bad when read, and dropped.",
    "read_failures": "Reads that failed without a verdict on the object.",
    "stale_messages": "Messages of another boot, session or binding.",
    "bad_messages": "Messages that could not be understood.",
    "defects": "Defects of the server that cost a message.",
    "undeliverable": "Answers whose client was gone or did not read.",
    "dead_clients": "Sessions ended because their process died.",
}
"""Plain counters by the field of :class:`~lmcache_persist.server.metrics.Counters`."""

LABELLED_COUNTERS: dict[str, tuple[str, str, Callable[[Stats], Mapping[str, int]]]] = {
    "requests": ("type", "Messages understood.", lambda s: s["requests"]),
    "lookup_results": ("result", "Lookups decided.", lambda s: s["lookup_results"]),
    "rejections": ("reason", "Binds and registrations refused.", lambda s: s["rejections"]),
    "dropped_stores": (
        "reason",
        "Stores that did not become durable.",
        lambda s: s["dropped_stores"],
    ),
    "evicted_chunks": (
        "tier",
        "Chunks evicted to make room.",
        lambda s: {"memory": s["pool"]["evictions"], "disk": s["counters"]["disk_evictions"]},
    ),
    "model_lookup_tokens": (
        "model",
        "Tokens looked up, by model.",
        lambda s: {name: one["lookup_tokens"] for name, one in s["models"].items()},
    ),
    "model_hit_tokens": (
        "model",
        "Tokens found restorable, by model.",
        lambda s: {name: one["hit_tokens"] for name, one in s["models"].items()},
    ),
}

OTHER_COUNTERS: dict[str, tuple[str, Callable[[Stats], int]]] = {
    "corrupt_records": (
        "Records and objects proven bad on disk.",
        lambda s: s["disk"]["corrupt_found"],
    ),
    "disk_failures": ("Actions of the disk tier that failed.", lambda s: s["writer"]["failures"]),
}

_KINDS = dict.fromkeys(("scheduler", "worker", "client", "cli"), 0)


def _engines(stats: Stats) -> int:
    return sum(engine["fingerprint"] is not None for engine in stats["engines"])


HISTOGRAMS: dict[str, str] = {
    "lookup_seconds": "From a lookup's arrival until it is decided, disk reads included.",
    "disk_read_seconds": "Reading one chunk's objects from disk and verifying them.",
    "group_commit_seconds": "Writing one batch to disk, its sync included.",
    "durable_seconds": "From a chunk's commit until it is durable.",
}

GAUGES: dict[str, tuple[str, Callable[[Stats], float | None]]] = {
    "ready": ("1 if the data path works, as /readyz says.", lambda s: not s["problems"]),
    "start_time_seconds": (
        "Start of the server, seconds since 1970.",
        lambda s: datetime.fromisoformat(s["started_at"]).timestamp(),
    ),
    "chunk_size_tokens": ("Bound chunk size, 0 if unbound.", lambda s: s["chunk_size"] or 0),
    "pool_size_bytes": ("Size of the pool.", lambda s: s["pool"]["size_bytes"]),
    "pool_free_bytes": ("Bytes of the pool in no slot.", lambda s: s["pool"]["free_bytes"]),
    "pool_largest_free_bytes": (
        "Bytes of the longest run in no slot.",
        lambda s: s["pool"]["largest_free_bytes"],
    ),
    "pool_leased_bytes": ("Bytes of the pool that lookups hold.", lambda s: s["leased_bytes"]),
    "pool_reserved_bytes": (
        "Bytes of the pool reserved for stores.",
        lambda s: s["pool"]["reserved_bytes"],
    ),
    "pool_chunks": ("Chunks in the pool.", lambda s: s["pool"]["chunks"]),
    "pool_reservations": ("Reservations open.", lambda s: s["pool"]["reservations"]),
    "disk_capacity_bytes": ("Size of the disk tier.", lambda s: s["disk"]["capacity_bytes"]),
    "disk_used_bytes": ("Taken of the disk tier, all costs.", lambda s: s["disk"]["used_bytes"]),
    "disk_chunks": ("Chunks on disk.", lambda s: s["disk"]["chunks"]),
    "disk_objects": ("Objects on disk.", lambda s: s["disk"]["objects"]),
    "disk_object_bytes": ("Bytes of the objects on disk.", lambda s: s["disk"]["object_bytes"]),
    "disk_stale_objects": (
        "Objects on disk of an earlier binding.",
        lambda s: s["disk"]["stale_objects"],
    ),
    "disk_stale_bytes": ("Bytes of stale objects.", lambda s: s["disk"]["stale_bytes"]),
    "clients": ("Processes that hold a client lock.", lambda s: s["clients"]),
    "engines": ("Engines all of whose ranks are registered.", _engines),
    "engine_ranks_missing": (
        "Ranks that engines wait for.",
        lambda s: sum(len(engine["missing_ranks"]) for engine in s["engines"]),
    ),
    "longest_turn_seconds": (
        "Longest time in which the server answered nobody, since its start.",
        lambda s: s["longest_turn_s"],
    ),
    "reads_pending": ("Disk reads queued or under way.", lambda s: s["reads_pending"]),
    "writer_backlog_chunks": ("Chunks that wait for the disk.", lambda s: s["writer"]["backlog"]),
    "undurable_commits": (
        "Commits not yet durable.",
        lambda s: s["committed_seq"] - s["durable_seq"],
    ),
    "flushes_waiting": ("Flushes that wait for the disk.", lambda s: s["flushes_waiting"]),
}

LABELLED_GAUGES: dict[str, tuple[str, str, Callable[[Stats], Mapping[str, int]]]] = {
    "sessions": ("kind", "Sessions open.", lambda s: {**_KINDS, **s["sessions_by_kind"]}),
    "lookups_open": ("phase", "Lookups not yet released.", lambda s: s["lookups_by_phase"]),
}


class ServerCollector(Collector):
    """Shows one server's numbers.

    Args:
        stats: gives the document of :class:`~lmcache_persist.server.stats.StatsReport`.
    """

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """All metrics of this moment."""
        stats = self._stats()
        info = GaugeMetricFamily(PREFIX + "build_info", "The version.", labels=["version"])
        info.add_metric([stats["version"]], 1)
        yield info
        yield from _counters(stats)
        yield from _gauges(stats)
        yield from _histograms(stats)


def _counters(stats: Stats) -> Iterator[Metric]:
    for name, text in COUNTERS.items():
        yield CounterMetricFamily(PREFIX + name, text, value=stats["counters"][name])
    for name, (text, value_of) in OTHER_COUNTERS.items():
        yield CounterMetricFamily(PREFIX + name, text, value=value_of(stats))
    for name, (label, text, values_of) in LABELLED_COUNTERS.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=[label])
        for key, value in values_of(stats).items():
            counter.add_metric([key], value)
        yield counter


def _gauges(stats: Stats) -> Iterator[Metric]:
    for name, (text, value_of) in GAUGES.items():
        value = value_of(stats)
        # Not known before the first look at the disk: absent is not 0.
        yield GaugeMetricFamily(PREFIX + name, text, value=None if value is None else float(value))
    for name, (label, text, values_of) in LABELLED_GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=[label])
        for key, number in values_of(stats).items():
            gauge.add_metric([key], number)
        yield gauge


def _histograms(stats: Stats) -> Iterator[Metric]:
    for name, text in HISTOGRAMS.items():
        found = stats["histograms"][name]
        buckets = [(str(float(bound)), count) for bound, count in found["buckets"]]
        yield HistogramMetricFamily(
            PREFIX + name,
            text,
            buckets=[*buckets, ("+Inf", found["count"])],
            sum_value=found["sum"],
        )
