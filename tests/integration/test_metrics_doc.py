"""What /metrics shows, what docs/metrics.md describes, what dashboard and alerts ask for."""

from __future__ import annotations

import re
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.emulated import EmulatedEngine
from support.in_process import local_server
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
OURS = "lmcache_persist_"


@dataclass(frozen=True)
class Shown:
    """A metric as a server shows it.

    Attributes:
        kind: counter, gauge or histogram.
        labels: besides those that Prometheus and histograms add.
    """

    kind: str
    labels: frozenset[str]


@pytest.fixture(scope="module")
def shown() -> dict[str, Shown]:
    """Every metric of a server that has served, by the name to ask for (``_total`` included)."""
    with (
        tempfile.TemporaryDirectory(prefix="lp-") as folder,
        local_server(Path(folder)) as server,
        EmulatedEngine(server.url, [64], object_bytes=4096).join(base=64) as engine,
    ):
        engine.lookup(engine.hashes([1] * 65), 65)
        wait_until(lambda: server.service.stats()["disk"]["used_bytes"] is not None, "the disk")
        with urllib.request.urlopen(server.http + "/metrics", timeout=10) as answer:
            text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert family.samples, f"{name} has no sample"
        assert family.documentation.endswith(".") or not name.startswith(OURS)
        found[name] = Shown(family.type, frozenset(labels))
    return found


def documented() -> dict[str, Shown]:
    """The metrics of docs/metrics.md."""
    found, kind = {}, ""
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        heading = re.match(r"\| (counter|gauge|histogram) \| labels \|", line)
        kind = heading[1] if heading else kind
        row = re.match(rf"\| `({OURS}\w+)` \| ([^|]*)\| [^|]+ \|$", line)
        if row:
            found[row[1]] = Shown(kind, frozenset(re.findall(r"`(\w+)`", row[2])))
    return found


def test_every_metric_is_described_and_no_other(shown: dict[str, Shown]) -> None:
    """docs/metrics.md lists names, kinds and labels as a server shows them."""
    assert documented() == {name: one for name, one in shown.items() if name.startswith(OURS)}


def test_names_say_what_they_count(shown: dict[str, Shown]) -> None:
    """Counters end in _total, times in _seconds, sizes in _bytes; nothing else does."""
    for name, one in shown.items():
        assert (one.kind == "counter") == name.endswith("_total"), name
        if one.kind == "histogram":
            assert name.endswith("_seconds"), name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
