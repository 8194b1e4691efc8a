"""What /metrics shows, what docs/metrics.md describes, what dashboard and alerts ask for."""

from __future__ import annotations

import json
import re
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
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


# ---- dashboard and alerts -------------------------------------------------------------

DASHBOARD = ROOT / "deploy" / "grafana" / "lmcache-persist.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
SCRAPED = {"instance", "job"}
ENGINES = {"model_name", "engine"}


def engine_metrics() -> dict[str, Shown]:
    """The metrics of engines in docs/metrics.md, which another test holds to the code."""
    found = {}
    text = (ROOT / "docs" / "metrics.md").read_text()
    for name, kind, labels in re.findall(
        r"^\| `(vllm:\w+)` \| (\w+) \| ([^|]*)\|", text, re.MULTILINE
    ):
        found[name] = Shown(kind, ENGINES | set(re.findall(r"`(\w+)`", labels)))
    return found


def known(shown: dict[str, Shown]) -> dict[str, Shown]:
    """Every series that can be asked for, with all labels that it has."""
    found = {}
    for name, one in {**shown, **engine_metrics()}.items():
        if one.kind == "histogram":
            found[f"{name}_bucket"] = Shown(one.kind, one.labels | SCRAPED | {"le"})
            found[f"{name}_count"] = found[f"{name}_sum"] = Shown(one.kind, one.labels | SCRAPED)
        else:
            found[name] = Shown(one.kind, one.labels | SCRAPED)
    return found


def check_query(expression: str, legend: str, series: dict[str, Shown]) -> set[str]:
    """Fail if a query asks for what is not there; the metrics that it asks for."""
    names = set(re.findall(r"(?:lmcache_persist_|vllm:|process_)\w+", expression))
    assert names, expression
    assert names <= set(series), f"{names - set(series)} in {expression}"
    labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression))
    for listed in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", expression):
        labels |= {label.strip() for label in listed.split(",")}
    labels |= set(re.findall(r"\{\{\s*(\w+)\s*\}\}", legend))
    for name in names:
        missing = labels - series[name].labels
        assert not missing, f"{missing} of {name} in {expression} with legend {legend!r}"
        rated = re.search(rf"(?:rate|increase)\(\s*{name}\b", expression)
        if series[name].kind != "gauge":
            assert rated, f"counter {name} without a rate in {expression}"
        else:
            assert not rated, f"rate of gauge {name} in {expression}"
    assert expression.count("(") == expression.count(")")
    return names


def test_the_dashboard_asks_for_what_is_there(shown: dict[str, Shown]) -> None:
    """Every query names metrics and labels that servers and engines show, each panel once."""
    document = json.loads(DASHBOARD.read_text())
    series, asked, places = known(shown), set(), set()
    panels = document["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 30
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + dx, place["y"] + dy)
            for dx in range(place["w"])
            for dy in range(place["h"])
        }
        assert not cells & places, f"{panel['title']} lies on another panel"
        places |= cells
        for target in panel.get("targets", ()):
            asked |= check_query(target["expr"], target["legendFormat"], series)
    for variable in document["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.findall(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])[
                0
            ]
            assert label in series[metric].labels
    left_out = {f"{OURS}{name}" for name in ("binds_total", "commits_total", "stored_chunks_total")}
    left_out |= {f"{OURS}{name}" for name in ("chunk_size_tokens", "start_time_seconds")}
    ours = {
        name
        for name in series
        if name.startswith(OURS) and not name.endswith(("_seconds_count", "_seconds_sum"))
    }
    assert ours - asked == left_out, "a new metric is shown, or left out on purpose"


def test_the_alerts_ask_for_what_is_there(shown: dict[str, Shown]) -> None:
    """Every rule is whole, and its query and texts name what servers and engines show."""
    series = known(shown)
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in group["rules"]:
        assert set(rule) >= {"alert", "expr", "labels", "annotations"}
        texts = " ".join(rule["annotations"].values())
        legend = " ".join(f"{{{{{label}}}}}" for label in re.findall(r"\$labels\.(\w+)", texts))
        check_query(rule["expr"], legend, series)


def filled(text: str, labels: dict[str, str]) -> str:
    """An alert's text as Prometheus shows it."""
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda hit: labels[hit[1]], text)


def test_every_alert_has_a_case_with_and_one_without() -> None:
    """What promtool tries has each alert firing with the rule's own texts, and quiet."""
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    document = yaml.safe_load(ALERTS.with_name("alerts_test.yml").read_text())
    assert document["rule_files"] == [ALERTS.name]
    cases = [case for test in document["tests"] for case in test["alert_rule_test"]]
    for rule in group["rules"]:
        own = [case for case in cases if case["alertname"] == rule["alert"]]
        firing = [alert for case in own for alert in case.get("exp_alerts", ())]
        assert firing and len(own) > len([case for case in own if "exp_alerts" in case])
        for alert in firing:
            texts = {
                key: filled(text, alert["exp_labels"]) for key, text in rule["annotations"].items()
            }
            assert alert["exp_annotations"] == texts


@pytest.mark.parametrize(
    ("expression", "legend"),
    [
        ("rate(lmcache_persist_gone_total[5m])", ""),
        ("sum by (model) (rate(lmcache_persist_lookups_total[5m]))", ""),
        ("rate(lmcache_persist_lookups_total[5m])", "{{model}}"),
        ('rate(lmcache_persist_lookups_total{model="m"}[5m])', ""),
        ("lmcache_persist_lookups_total", ""),
        ("rate(lmcache_persist_pool_chunks[5m])", ""),
        ("rate(lmcache_persist_lookup_seconds[5m])", ""),
    ],
)
def test_the_check_itself_finds_mistakes(
    expression: str, legend: str, shown: dict[str, Shown]
) -> None:
    """Unknown metrics and labels, counters without a rate and rates of gauges are noticed."""
    with pytest.raises(AssertionError):
        check_query(expression, legend, known(shown))
