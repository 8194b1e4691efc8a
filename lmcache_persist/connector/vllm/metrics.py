"""What the connector reports through vLLM's own connector metrics.

Both sides count in :class:`~lmcache_persist.connector.vllm.counters.Counters`; what was
counted since the last step travels with vLLM's step output to its logger process, summed over
ranks, and ends in its log line and in Prometheus under ``vllm:persist_*``. The names are
documented in docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

PREFIX = "vllm:persist_"

COUNTERS: dict[str, str] = {
    "lookups": "Prompts looked up in the cache server, each once.",
    "lookups_repeated": "Prompts looked up again after a preemption.",
    "lookups_failed": "Lookups that came to nothing for want of a good answer.",
    "lookup_tokens": "Tokens of prompts that were looked up.",
    "hit_tokens": "Tokens that the server found restorable.",
    "loads": "Loads that every rank completed.",
    "loads_failed": "Loads that failed on a rank; the prompt was computed.",
    "loaded_tokens": "Tokens loaded instead of computed.",
    "loaded_bytes": "Bytes loaded, over all ranks.",
    "stored_chunks": "Chunks committed to the server, per rank.",
    "stored_bytes": "Bytes committed to the server, over all ranks.",
    "known_chunks": "Chunks offered that the server had already, per rank.",
    "reconnects": "Connections to the server after the first, over all processes.",
    "resets": "Resets after which the engine shares with nobody.",
    "resets_too_early": "Resets while requests held blocks; nothing is cached until the next.",
    "failures": "Defects of the connector that were turned into misses.",
}
"""Counters by name; the help text for Prometheus."""

LABELLED: dict[str, tuple[str, str]] = {
    "dropped_chunks": (
        "Chunks that were complete and not stored, per rank.",
        "no_server no_slot late refused gather stale other",
    ),
    "uncached_requests": (
        "Requests that nothing identifies, by what is in the way.",
        "prompt_embeds streaming_input lora multimodal token other",
    ),
}
"""Counters with a label ``reason``: help text and the reasons, all shown from the start."""

TIMES: dict[str, str] = {
    "load_seconds": "Copying one load into its blocks, per rank.",
    "store_seconds": "Copying one step's chunks into slots, per rank.",
}

LEVELS: dict[str, str] = {
    "breaker_open": "1 while no cache server answers a process of this engine."
}

_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)

_RENAMED = {"chunks_stored": "stored_chunks", "chunks_known": "known_chunks"}
_LABEL_PREFIXES = {
    "chunks_dropped_": "dropped_chunks",
    "requests_not_cached_": "uncached_requests",
}
_FAILURES = (
    "failed_",
    "loads_not_planned",
    "stores_not_planned",
    "binding_not_usable",
    "registration_failed",
    "start_without_cache",
)
_SCHEDULERS_OWN = frozenset({"loads", "loads_failed"})
"""Counted by every rank and, once for all, by the scheduler: only that is reported."""


def metric_of(name: str) -> tuple[str, str] | None:
    """Metric and reason (or empty) of an internal count; None for one that is not reported."""
    name = _RENAMED.get(name, name)
    if name in COUNTERS:
        return name, ""
    for prefix, family in _LABEL_PREFIXES.items():
        if name.startswith(prefix):
            reason = name.removeprefix(prefix)
            return family, reason if reason in LABELLED[family][1].split() else "other"
    return ("failures", "") if name.startswith(_FAILURES) else None


class PersistStats(KVConnectorStats):
    """What happened since the last report: plain numbers, so that it can be sent anywhere.

    ``data`` holds ``counts`` (by ``name`` or ``name reason``), ``times`` (lists of seconds)
    and ``levels`` (the highest of all processes).
    """

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        for part in ("counts", "times", "levels"):
            self.data.setdefault(part, {})

    def reset(self) -> None:
        """Forget all."""
        self.data = {"counts": {}, "times": {}, "levels": {}}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another rank, or a later step, has to say."""
        counts, times, levels = (self.data[part] for part in ("counts", "times", "levels"))
        for name, amount in other.data["counts"].items():
            counts[name] = counts.get(name, 0) + amount
        for name, seconds in other.data["times"].items():
            times[name] = [*times.get(name, ()), *seconds]
        for name, level in other.data["levels"].items():
            levels[name] = max(levels.get(name, 0), level)
        return self

    def reduce(self) -> dict[str, int | float]:
        """A few numbers for vLLM's log line."""
        counts = self.data["counts"]
        loads = self.data["times"].get("load_seconds", ())
        asked = counts.get("lookup_tokens", 0)
        return {
            "Persist lookups": counts.get("lookups", 0),
            "Persist hit rate (%)": _percent(counts.get("hit_tokens", 0), asked),
            "Persist loaded tokens": counts.get("loaded_tokens", 0),
            "Persist loaded MiB": round(counts.get("loaded_bytes", 0) / 2**20, 1),
            "Persist avg load time (ms)": round(1000 * sum(loads) / max(1, len(loads)), 2),
            "Persist stored MiB": round(counts.get("stored_bytes", 0) / 2**20, 1),
            "Persist dropped chunks": sum(
                amount for name, amount in counts.items() if name.startswith("dropped_chunks ")
            ),
            "Persist server away": self.data["levels"].get("breaker_open", 0),
        }


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 1) if whole else 0.0


class Reporter:
    """Makes the reports of one role from its counters.

    Args:
        scheduler: whether it is the scheduler's, which alone counts loads.

    Threads: one.
    """

    def __init__(self, *, scheduler: bool) -> None:
        self._scheduler = scheduler
        self._counts: dict[str, int] = {}
        self._levels: dict[str, int] | None = None

    def report(
        self, counts: Mapping[str, int], times: Mapping[str, list[float]], levels: dict[str, int]
    ) -> PersistStats | None:
        """What is new since the last report; None if nothing is.

        Args:
            counts: all so far.
            times: those since the last report.
            levels: as they are now.
        """
        if counts == self._counts and not times and levels == self._levels:
            return None  # most steps
        grown: dict[str, int] = {}
        for name, total in counts.items():
            amount = total - self._counts.get(name, 0)
            metric = metric_of(name)
            if amount and metric and (self._scheduler or name not in _SCHEDULERS_OWN):
                key = " ".join(part for part in metric if part)
                grown[key] = grown.get(key, 0) + amount
        self._counts = dict(counts)
        if not grown and not times and levels == self._levels:
            return None
        self._levels = dict(levels)
        return PersistStats({"counts": grown, "times": dict(times), "levels": dict(levels)})


class PersistPromMetrics(KVConnectorPromMetrics):
    """The reports in vLLM's Prometheus registry. Arguments are vLLM's."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Counter]] = {}
        self._times: dict[str, dict[int, Histogram]] = {}
        self._levels: dict[str, dict[int, Gauge]] = {}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(PREFIX + name, text, labelnames)
            self._counters[name] = create_metric_per_engine(counter, per_engine_labelvalues)
        for name, (text, reasons) in LABELLED.items():
            counter = self._counter_cls(PREFIX + name, text, [*labelnames, "reason"])
            for reason in reasons.split():
                self._counters[f"{name} {reason}"] = {
                    index: counter.labels(*values, reason)
                    for index, values in per_engine_labelvalues.items()
                }
        for name, text in TIMES.items():
            histogram = self._histogram_cls(PREFIX + name, text, labelnames, buckets=_BUCKETS_S)
            self._times[name] = create_metric_per_engine(histogram, per_engine_labelvalues)
        for name, text in LEVELS.items():
            gauge = self._gauge_cls(PREFIX + name, text, labelnames, multiprocess_mode="mostrecent")
            self._levels[name] = create_metric_per_engine(gauge, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take a report in. What has no metric (a later connector's) is passed over."""
        for name, amount in transfer_stats_data.get("counts", {}).items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(amount)
        for name, seconds in transfer_stats_data.get("times", {}).items():
            if name in self._times:
                for one in seconds:
                    self._times[name][engine_idx].observe(one)
        for name, level in transfer_stats_data.get("levels", {}).items():
            if name in self._levels:
                self._levels[name][engine_idx].set(level)
