"""The connector's reports: what is counted, sent, summed and shown by vLLM's own classes."""

from __future__ import annotations

import pickle
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from lmcache_persist.connector.vllm import metrics
from lmcache_persist.connector.vllm.counters import MAX_TIMES, Counters
from lmcache_persist.connector.vllm.metrics import PersistStats, Reporter
from lmcache_persist.demo.engine import CONNECTOR

ROOT = Path(__file__).parents[3]
TRANSFER = KVTransferConfig(**CONNECTOR)


def report(*roles: tuple[bool, dict[str, int]], **levels: int) -> PersistStats:
    """What processes with these counts say, summed as vLLM sums it."""
    made = [
        Reporter(scheduler=scheduler).report(counts, {"load_seconds": [0.5]}, levels or {"x": 0})
        for scheduler, counts in roles
    ]
    total = PersistStats()
    for one in made:
        assert one is not None
        assert total.aggregate(pickle.loads(pickle.dumps(one))) is total
    return total


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """A registry in the place of the process's."""
    made = CollectorRegistry()
    for name, kind in (("counter", Counter), ("gauge", Gauge), ("histogram", Histogram)):
        monkeypatch.setattr(KVConnectorProm, f"_{name}_cls", partial(kind, registry=made))
    return made


def prometheus() -> KVConnectorProm:
    """VLLM's own recorder of connector metrics, of two engines."""
    config: Any = SimpleNamespace(kv_transfer_config=TRANSFER)
    return KVConnectorProm(config, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


def test_reports_hold_what_is_new_since_the_last_one() -> None:
    """Counts become growth; without any there is no report; a change of the breaker is one."""
    reporter = Reporter(scheduler=True)
    first = reporter.report({"lookups": 3, "requests": 9}, {}, {"breaker_open": 0})
    assert first is not None
    assert first.data["counts"] == {"lookups": 3}
    assert reporter.report({"lookups": 3, "requests": 10}, {}, {"breaker_open": 0}) is None
    later = reporter.report({"lookups": 5}, {}, {"breaker_open": 0})
    assert later is not None
    assert later.data["counts"] == {"lookups": 2}
    changed = reporter.report({"lookups": 5}, {}, {"breaker_open": 1})
    assert changed is not None
    assert changed.data["levels"] == {"breaker_open": 1}


def test_ranks_and_scheduler_are_summed_and_loads_counted_once() -> None:
    """Bytes of all ranks add up; a load is the scheduler's to count; levels are the highest."""
    total = report(
        (False, {"loads": 4, "loaded_bytes": 100, "chunks_dropped_no_slot": 1}),
        (False, {"loads": 4, "loaded_bytes": 100, "chunks_dropped_late": 2}),
        (True, {"loads": 4, "loaded_tokens": 512, "lookup_tokens": 1024, "hit_tokens": 512}),
        breaker_open=1,
    )
    assert total.data["counts"] == {
        "loads": 4,
        "loaded_bytes": 200,
        "loaded_tokens": 512,
        "lookup_tokens": 1024,
        "hit_tokens": 512,
        "dropped_chunks no_slot": 1,
        "dropped_chunks late": 2,
    }
    assert total.data["times"] == {"load_seconds": [0.5, 0.5, 0.5]}
    assert total.data["levels"] == {"breaker_open": 1}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()


def test_a_report_survives_the_way_to_the_logger() -> None:
    """As vLLM sends it between processes, it arrives as it was."""
    data = report((True, {"lookups": 3, "failed_x": 1}), breaker_open=0).to_dict()
    sent = MsgpackEncoder().encode(SchedulerStats(kv_connector_stats=data))
    found = MsgpackDecoder(SchedulerStats).decode(sent)
    assert found.kv_connector_stats == data


def test_vllms_log_line_has_the_figures_of_the_interval() -> None:
    """VLLM's own logging class sums the reports of an interval and reduces them to figures."""
    lines: list[str] = []
    logging = KVConnectorLogging(TRANSFER)
    for _ in range(2):
        counts = {"lookups": 1, "lookup_tokens": 1000, "hit_tokens": 550}
        logging.observe(report((True, {**counts, "loaded_bytes": 1 << 20})).to_dict())
    logging.log(lambda text, figures: lines.append(text % figures))
    assert "Persist lookups=2" in lines[0]
    assert "Persist hit rate (%)=55.0" in lines[0]
    assert "Persist loaded MiB=2.0" in lines[0]
    assert "Persist avg load time (ms)=500.0" in lines[0]


def test_vllms_prometheus_shows_them_by_engine(registry: CollectorRegistry) -> None:
    """Counters add up per engine, reasons are labels, unknown ones of a later version pass."""
    shown = prometheus()
    data = report(
        (True, {"lookups": 3, "requests_not_cached_lora": 1, "requests_not_cached_new": 1}),
        breaker_open=1,
    ).to_dict()
    shown.observe(data, 1)
    shown.observe({**data, "counts": {**data["counts"], "later": 1}, "more": {}}, 1)

    def value(name: str, engine: str, **labels: str) -> float | None:
        labels |= {"model_name": "m", "engine": engine}
        return registry.get_sample_value("vllm:persist_" + name, labels)

    assert (value("lookups_total", "0"), value("lookups_total", "1")) == (0, 6)
    assert value("uncached_requests_total", "1", reason="lora") == 2
    assert value("uncached_requests_total", "1", reason="other") == 2
    assert value("dropped_chunks_total", "1", reason="late") == 0
    assert value("load_seconds_count", "1") == 2
    assert value("breaker_open", "1") == 1


def test_every_metric_is_described_and_no_other(registry: CollectorRegistry) -> None:
    """docs/metrics.md lists what an engine shows."""
    prometheus()
    shown = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in registry.collect()
    }
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert set(re.findall(r"^\| `(vllm:persist_\w+)` \|", text, re.MULTILINE)) == shown


def test_what_is_counted_is_reported() -> None:
    """Every count in the connector has a metric, or is one of the few that need none."""
    unreported = {"requests", "chunks_offered", "load_tokens"}
    unreported |= {"load_memory_chunks", "load_disk_chunks"}
    names = set()
    counting = re.compile(r"counters\.(?:add|incident)\(\s*f?\"([a-z_]+)")
    for source in (ROOT / "lmcache_persist" / "connector" / "vllm").glob("*.py"):
        names |= set(counting.findall(source.read_text()))
    assert len(names) > 15
    assert {name for name in names if metrics.metric_of(name) is None} == unreported


def test_times_are_bounded_and_taken_once() -> None:
    """An engine that nobody asks for stats does not collect times without end."""
    counters = Counters()
    for _ in range(MAX_TIMES + 5):
        counters.observe("load_seconds", 0.1)
    assert len(counters.take_times()["load_seconds"]) == MAX_TIMES
    assert counters.take_times() == {}
