"""What a server shows over HTTP: numbers that are right, health that is true and quick."""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lmcache_persist.errors import PersistError
from lmcache_persist.geometry import groups_from_sizes
from lmcache_persist.server import health, http
from lmcache_persist.server.metrics import MAX_MODELS
from support.emulated import EmulatedEngine
from support.files import snapshot
from support.in_process import LocalServer, local_server
from support.waiting import wait_until
from support.web import fetch

PATIENT_S = 20.0


@pytest.fixture
def server(root: Path) -> Iterator[LocalServer]:
    """A server in this process."""
    with local_server(root) as made:
        yield made


def get(server: LocalServer, page: str) -> tuple[int, str]:
    """Status and body of a page. What stalls in these tests does so for longer than this waits."""
    try:
        with urllib.request.urlopen(server.http + page, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def health_of(server: LocalServer, page: str) -> tuple[int, bool, list[str]]:
    """Status, verdict and reasons of a health page."""
    status, body = get(server, page)
    document = json.loads(body)
    assert all(one["detail"] for one in document["reasons"])
    return (
        status,
        document["alive" if page == "/healthz" else "ready"],
        [one["reason"] for one in document["reasons"]],
    )


def metrics(server: LocalServer) -> dict[str, float]:
    """Every sample by its name and label values."""
    return {
        " ".join([sample.name.removeprefix("lmcache_persist_"), *sample.labels.values()]): (
            sample.value
        )
        for family in text_string_to_metric_families(get(server, "/metrics")[1])
        for sample in family.samples
    }


def test_every_prompt_counts_once_hit_or_miss(server: LocalServer) -> None:
    """Ten prompts, 4 stored in full, 3 by half, 3 not at all: asked 10,240, and what was found.

    One token of a prompt is always computed, so one of 1,024 tokens can hit three chunks of
    256. With one token more each, the hits are 4 x 1,024 + 3 x 512 = 5,632.
    """
    with EmulatedEngine(server.url, [256], object_bytes=4096).join() as engine:
        prompts = [[number] * 1025 for number in range(10)]
        for number, tokens in enumerate(prompts):
            hashes = engine.hashes(tokens)
            engine.store(hashes[: 4 if number < 4 else 2 if number < 7 else 0])
        for extra, found in ((0, 4 * 768 + 3 * 512), (1, 5632)):
            before = metrics(server)
            for tokens in prompts:
                length = 1024 + extra
                result = engine.lookup(engine.hashes(tokens[:length]), length)
                assert 0 <= result.tokens < length
            after = metrics(server)
            grown = {name: after[name] - before.get(name, 0.0) for name in after}
            assert grown["lookups_total"] == 10
            assert grown["lookup_tokens_total"] == 10_240 + 10 * extra
            assert grown["hit_tokens_total"] == found
            assert grown["lookup_results_total full"] == 4
            assert grown["lookup_results_total partial"] == 3
            assert grown["lookup_results_total miss"] == 3
            assert grown["model_hit_tokens_total emulated/model"] == found
            assert grown["lookup_seconds_count"] == 10
        assert after["loaded_tokens_total"] == 0, "nothing was loaded, only promised"


def test_polls_preemptions_and_failed_loads_are_not_counted_twice(server: LocalServer) -> None:
    """Polls of one lookup, and the same prompt after a preemption, add nothing; loads do."""
    with EmulatedEngine(server.url, [64], object_bytes=4096).join(base=64) as engine:
        tokens = list(range(257))
        hashes = engine.hashes(tokens)
        engine.store(hashes)
        engine.client.flush()
        server.empty_pool()
        server.disk.reads.clear()
        handle = engine.client.lookup(engine=engine.name, hashes=hashes, num_tokens=257)
        assert server.disk.reading.wait(PATIENT_S)
        wait_until(lambda: metrics(server)["requests_total lookup"] >= 2, "it is polled")
        server.disk.reads.set()
        result = handle.wait(PATIENT_S)
        assert result is not None
        assert result.tokens == 256
        handle.release()  # preempted before it was loaded
        handle = engine.client.lookup(engine=engine.name, hashes=hashes, num_tokens=257, again=True)
        again = handle.wait(PATIENT_S)
        assert again is not None
        handle.release(loaded_tokens=again.tokens)
        wait_until(lambda: metrics(server)["loads_total"] == 1, "the load is counted")
        found = metrics(server)
        assert (found["lookups_total"], found["lookups_repeated_total"]) == (1, 1)
        assert (found["lookup_tokens_total"], found["hit_tokens_total"]) == (257, 256)
        assert (found["loaded_tokens_total"], found["loaded_bytes_total"]) == (256, 4 * 4096)
        assert found["disk_read_bytes_total"] == 4 * 4096
        assert found["disk_read_seconds_count"] == 4
        assert found["evicted_chunks_total memory"] > 0


def test_stores_are_counted_from_the_pool_to_the_disk(server: LocalServer) -> None:
    """Committed, durable and dropped are told apart, each with its time or its reason."""
    with EmulatedEngine(server.url, [64, 0], object_bytes=4096).join(base=64) as engine:
        engine.store(engine.hashes(list(range(640))))
        engine.client.flush()
        found = metrics(server)
        assert (found["committed_bytes_total"], found["stored_bytes_total"]) == (40960, 40960)
        assert (found["commits_total"], found["stored_chunks_total"]) == (10, 10)
        assert found["durable_seconds_count"] == 10
        assert 1 <= found["group_commit_seconds_count"] <= 10
        wait_until(lambda: metrics(server).get("disk_objects") == 10, "the disk is looked at")
        server.disk.fails = True
        engine.store(engine.hashes([5] * 128))
        engine.client.flush()
        found = metrics(server)
        assert found["dropped_stores_total disk_error"] == 2
        assert found["stored_bytes_total"] == 40960
        assert found["disk_failures_total"] >= 1
        assert found["undurable_commits"] == 0
        assert found["pool_size_bytes"] > found["pool_free_bytes"] > 0


def test_refusals_are_counted_by_reason_and_names_are_bounded(server: LocalServer) -> None:
    """A reason is one of ours; models from outside get so many labels and no control character."""
    with EmulatedEngine(server.url, [64], object_bytes=4096).join(base=64) as engine:
        with pytest.raises(PersistError):
            engine.client.bind(groups_from_sizes([48]), timeout_s=PATIENT_S)
        for number in range(MAX_MODELS + 3):
            with EmulatedEngine(
                server.url,
                [64],
                object_bytes=4096,
                name=f"e{number}",
                changes={"model": f"evil\n\x1b[2J{number}" + "x" * 5000},
            ).join() as other:
                other.lookup(other.hashes([1] * 65), 65)
    found = metrics(server)
    assert found["rejections_total incompatible_alignment"] == 1
    models = [name for name in found if name.startswith("model_lookup_tokens_total")]
    assert len(models) == MAX_MODELS + 1
    assert max(map(len, models)) < 300
    # One is the first engine's, so four of the others share.
    assert found["model_lookup_tokens_total other"] == 4 * 65
    assert "\x1b" not in get(server, "/metrics")[1]


def test_counters_never_fall(server: LocalServer) -> None:
    """Whatever comes and goes, no counter is ever lower than it was."""
    seen: dict[str, float] = {}

    def check() -> None:
        now = metrics(server)
        counters = {
            name: value
            for name, value in now.items()
            if name.split(" ")[0].endswith(("_total", "_count", "_sum", "_bucket"))
        }
        assert all(counters[name] >= value for name, value in seen.items())
        seen.update(counters)

    check()
    for name in ("one", "two"):
        with EmulatedEngine(server.url, [64], object_bytes=4096, name=name).join(64) as engine:
            hashes = engine.hashes(list(range(640)))
            engine.store(hashes)
            check()
            engine.client.flush()
            engine.lookup(hashes, 640)
            check()
        check()


def test_ready_is_what_works(server: LocalServer) -> None:
    """Unbound, without engine, ready, without again: alive all the time, each with its reason."""
    assert health_of(server, "/readyz") == (503, False, ["unbound"])
    with EmulatedEngine(server.url, [64], object_bytes=4096, world_size=2) as engine:
        engine.client.wait_connected(PATIENT_S)
        engine.client.bind(engine.groups, base=64, timeout_s=PATIENT_S)
        assert health_of(server, "/readyz") == (503, False, ["no_engine"])
        engine.register(0)
        assert health_of(server, "/readyz")[2] == ["no_engine"]
        assert "waits for rank 1" in get(server, "/readyz")[1]
        engine.register(1)
        assert health_of(server, "/readyz") == (200, True, [])
        assert metrics(server)["ready"] == 1
    wait_until(lambda: health_of(server, "/readyz")[2] == ["no_engine"], "the engine is gone")
    assert health_of(server, "/healthz") == (200, True, [])


def test_health_answers_while_everything_is_stalled(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both readers, the writer and the loop stuck, both pages answer at once, and why."""
    with EmulatedEngine(server.url, [64], object_bytes=4096).join(base=64) as engine:
        hashes = engine.hashes(list(range(257)))
        engine.store(hashes)
        engine.client.flush()
        server.empty_pool()
        server.disk.reads.clear()
        server.disk.writes.clear()
        server.disk.writing.clear()
        engine.client.lookup(engine=engine.name, hashes=hashes, num_tokens=257)
        engine.store(engine.hashes([9] * 64))
        assert server.disk.reading.wait(PATIENT_S)
        assert server.disk.writing.wait(PATIENT_S)
        assert health_of(server, "/readyz") == (200, True, []), "slow for a moment is not stalled"
        monkeypatch.setattr(health, "STALLED_S", 0.01)
        wait_until(
            lambda: health_of(server, "/readyz")[2].count("disk_stalled") == 2, "both are seen"
        )
        assert health_of(server, "/healthz") == (200, True, [])
        server.state.turned_s -= 2 * 86400
        monkeypatch.setattr(server.state.timers, "run_due", lambda: time.sleep(1))
        wait_until(lambda: "loop_stalled" in health_of(server, "/readyz")[2], "the loop is seen")
        assert "the loop has not turned for 2 d" in get(server, "/readyz")[1]
        assert get(server, "/metrics")[0] == 200


def test_a_broken_disk_is_not_ready(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes that fail, a read-only mount, a stopped writer: alive, not ready, nothing written."""
    before = sorted(snapshot(server.state.settings.data_dir))
    with EmulatedEngine(server.url, [64], object_bytes=4096).join(base=64) as engine:
        server.disk.fails = True
        engine.store(engine.hashes([1] * 64))
        engine.client.flush()
        assert health_of(server, "/readyz") == (503, False, ["disk_failing"])
        server.disk.fails = False
        engine.store(engine.hashes([2] * 64))
        engine.client.flush()
        assert health_of(server, "/readyz") == (200, True, [])
        real = os.statvfs
        monkeypatch.setattr(
            health.os, "statvfs", lambda path: SimpleNamespace(f_flag=real(path).f_flag | 1)
        )
        wait_until(lambda: health_of(server, "/readyz")[2] == ["read_only"], "it is seen")
        monkeypatch.undo()
        wait_until(lambda: health_of(server, "/readyz")[1], "it is ready again")
        assert server.state.writer.close(PATIENT_S)
        assert health_of(server, "/readyz") == (503, False, ["writer_stopped"])
        assert health_of(server, "/healthz") == (200, True, [])
    assert sorted(snapshot(server.state.settings.data_dir)) == before


def test_other_pages_methods_and_crowds(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown page is 404, HEAD has no body, and idle connections do not take all threads."""
    assert get(server, "/")[0] == 404
    assert get(server, "/readyz?verbose=1")[0] == 503
    head = urllib.request.Request(server.http + "/healthz", method="HEAD")
    with urllib.request.urlopen(head, timeout=10) as answer:
        assert (answer.status, answer.read()) == (200, b"")
    for method, status in (("POST", 405), ("DELETE", 405), ("BREW", 501)):
        assert fetch(int(server.http.rpartition(":")[2]), "/metrics", method)[0] == status
        page = fetch(int(server.http.rpartition(":")[2]), "/metrics", method)[1]
        assert method in page
        assert "<" not in page
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 2)
    small = http.HttpServer("127.0.0.1:0")
    small.start(server.service)
    idle = [socket.create_connection(("127.0.0.1", small.port)) for _ in range(4)]
    for one in idle[:2]:
        one.settimeout(10)
        assert one.recv(1) == b"", "turned away for the later ones"
    assert _answers(small.port), "idle ones keep nobody out"
    for one in idle:
        one.close()
    assert _answers(small.port)
    small.close()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
