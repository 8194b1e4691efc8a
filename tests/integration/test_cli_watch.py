"""``top`` and ``bench`` against real servers: what they show, what they leave, how they end."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_persist.cli import bench_worker
from lmcache_persist.cli.app import main
from lmcache_persist.cli.bench import _check_room, percentiles
from lmcache_persist.errors import ConfigError, ServerUnreachable
from support.emulated import EmulatedEngine
from support.in_process import LocalServer, local_server
from support.server import ServerProcess, inspect, run_cli
from support.waiting import wait_until

PROGRAM = [sys.executable, "-m", "lmcache_persist.cli"]
MakeServer = Callable[..., ServerProcess]


@pytest.fixture
def local(root: Path) -> Iterator[LocalServer]:
    """A server in this process."""
    with local_server(root, 32 << 20) as made:
        yield made


def test_bench_compares_and_leaves_other_models_alone(server: ServerProcess) -> None:
    """Figures of every part, its own fingerprint; the objects of a real model are as they were."""
    with EmulatedEngine(server.url, [64, 0, 32], object_bytes=4096).join(base=64) as engine:
        hashes = engine.hashes(list(range(640)))
        engine.store(hashes)
        engine.client.flush()
        flags = ("--server", server.url, "--chunks", "37", "--object-size", "64KiB", "--json")
        done = run_cli("bench", *flags)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["ok"]
        assert found["mismatches"] == found["load"]["missing_chunks"] == 0
        assert found["store"]["bytes"] == found["load"]["bytes"] == 37 * found["chunk_bytes"]
        assert found["load"]["memory_chunks"] + found["load"]["disk_chunks"] == 37
        for part in ("store", "durable", "load"):
            assert found[part]["gib_per_s"] > 0
        assert set(found["lookup"]["ms"]) == {"p50", "p95", "p99", "max"}
        assert engine.lookup(hashes, 641).tokens == 640
    assert not undocumented("bench", found)
    models = {one["name"]: one for one in inspect(server.data_dir)["models"]}
    assert models["emulated/model"]["objects"] == 20
    assert models[bench_worker.MODEL]["fingerprint"] == found["fingerprint"]
    assert models[bench_worker.MODEL]["chunks"] == 37


def undocumented(verb: str, document: Any) -> set[str]:
    """Keys of a document that docs/cli.md does not name in the verb's section."""
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    section = text.split(f"\n## {verb}\n")[1].split("\n## ")[0]
    keys: set[str] = set()
    open_ = [document]
    while open_:
        value = open_.pop()
        if isinstance(value, dict):
            keys |= set(value)
            open_.extend(value.values())
        elif isinstance(value, list):
            open_.extend(value)
    return {key for key in keys if f"`{key}`" not in section}


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a verb in this process: exit code, stdout, stderr."""

    def run_here(*args: str) -> tuple[int, str, str]:
        code = main(list(args))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run_here


def test_bench_binds_nothing_unless_told(local: LocalServer, run: Run) -> None:
    """Unbound: refused without --groups and --bind; bound to another size: refused, no trace."""
    for flags in ((), ("--groups", "48")):
        code, _, talk = run("bench", "--server", local.url, *flags)
        assert (code, "--bind" in talk, "lmcache-persist negotiate" in talk) == (3, True, True)
        assert local.state.binding is None
    flags = ("--groups", "48,0,16", "--bind", "--chunks", "4", "--object-size", "5000", "--evict")
    code, out, talk = run("bench", "--server", local.url, *flags)
    assert code == 0, talk
    assert "bound to chunk size 288" in talk
    assert out.startswith("# bench of")
    assert "4 chunks compared: every byte as stored" in out
    tiny = ("--chunks", "1", "--object-size", "7", "--evict")
    code, out, talk = run("bench", "--server", local.url, "--groups", "48", *tiny)
    assert code == 0, talk
    rates = [line.split("\t")[2] for line in out.splitlines()[2:-1]]
    assert [rate for rate in rates if rate != "-" and float(rate.split()[0]) < 0.1] == []
    code, out, _ = run("bench", "--server", local.url, "--groups", "48", *tiny, "--json")
    assert 0 < json.loads(out)["durable"]["gib_per_s"] < 1e-3
    code, out, _ = run("bench", "--server", local.url, "--groups", "640", "--json")
    assert code == 3
    assert json.loads(out)["error"]["code"] == "incompatible_alignment"
    assert local.state.manifest.rejections() == []
    assert local.service.stats()["counters"]["rejections"] == 0


def test_bench_refuses_what_would_not_fit(local: LocalServer, run: Run) -> None:
    """Odd numbers, others' objects at stake, a chunk too large for the pool: with a way out."""
    bound = ("--groups", "64", "--bind")
    for flags, code, said in (
        (("--chunks", "0"), 2, "--chunks"),
        (("--object-size", "1 parsec"), 2, "parsec"),
        (("--chunks", "100000"), 2, "--evict"),
        (("--object-size", "20MiB", "--chunks", "1", "--evict"), 2, "--pool-size"),
        (("--object-size", "1", "--chunks", "2000000", "--evict"), 2, "--chunks 1000000"),
        (("--object-size", "7", "--chunks", "900000"), 2, "--evict"),
    ):
        found, _, talk = run("bench", "--server", local.url, *bound, *flags)
        assert (found, said in talk) == (code, True), talk


def test_bench_waits_as_long_as_it_is_told(
    local: LocalServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that hangs in the middle: the time that was waited is that of --timeout."""
    go_on, load = threading.Event(), bench_worker.BenchWorker.load

    def hang(worker: bench_worker.BenchWorker) -> None:
        local.state.mailbox.post(lambda: go_on.wait(60) and None)
        load(worker)

    monkeypatch.setattr(bench_worker.BenchWorker, "load", hang)
    flags = ["--groups", "64", "--bind", "--chunks", "8", "--object-size", "4KiB", "--evict"]
    try:
        code, _, talk = run("bench", "--server", local.url, *flags, "--timeout", "2.5")
    finally:
        go_on.set()
    assert code == 4
    assert "within 2.5 s" in talk
    assert "within 1 s" not in talk


@pytest.mark.parametrize(
    ("used", "objects", "stale", "fits"),
    [(800, 0, 700, True), (800, 5, 700, True), (800, 5, 0, False), (None, None, None, False)],
)
def test_bench_counts_nothing_stale_as_others(
    used: int | None, objects: int | None, stale: int | None, fits: bool
) -> None:
    """What a rebind left is nobody's; what is not known is at stake."""
    disk = {"capacity_bytes": 1000, "used_bytes": used, "objects": objects, "stale_bytes": stale}
    with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match="evicted"):
        _check_room(disk, 500, evict=False)


def test_a_bench_that_is_ended_says_how_far_it_came(
    local: LocalServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server goes away in the middle: what was stored, and a hint."""

    def gone(_: bench_worker.BenchWorker) -> None:
        raise ServerUnreachable("connection was given up")

    monkeypatch.setattr(bench_worker.BenchWorker, "load", gone)
    flags = ["--groups", "64", "--bind", "--chunks", "8", "--object-size", "4KiB"]
    code, _, talk = run("bench", "--server", local.url, *flags, "--evict")
    assert code == 4
    assert "stored 32.00 KiB of 32.00 KiB, loaded and compared 0 B before this:" in talk
    assert "hint: it ended or was killed" in talk


def test_wrong_bytes_fail_the_bench(
    local: LocalServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte of one page that arrives otherwise than it was stored: exit code 1, and counted."""
    scatter = bench_worker.Pages.scatter

    def altered(self: bench_worker.Pages, chunk: int, slot: memoryview) -> None:
        if chunk == 2:
            slot[len(slot) - 1] ^= 1
        scatter(self, chunk, slot)

    monkeypatch.setattr(bench_worker.Pages, "scatter", altered)
    flags = ["--groups", "64", "--bind", "--chunks", "8", "--object-size", "4KiB", "--json"]
    code, out, _ = run("bench", "--server", local.url, *flags, "--evict")
    assert code == 1
    found = json.loads(out)
    assert (found["ok"], found["mismatches"]) == (False, 1)


def test_bench_shows_how_the_disk_lags(local: LocalServer, run: Run) -> None:
    """More than the pool holds: stores wait for the disk, loads come from it, all bytes right."""
    flags = ["--groups", "64", "--bind", "--chunks", "96", "--object-size", "512KiB", "--evict"]
    code, out, _ = run("bench", "--server", local.url, *flags, "--json")
    assert code == 0
    assert json.loads(out)["load"]["missing_chunks"] == 0
    stats = local.service.stats()
    assert stats["counters"]["disk_hit_chunks"] > 0
    assert stats["counters"]["loaded_bytes"] == 96 * (512 << 10)
    assert stats["leased_bytes"] == 0


def test_percentiles_are_of_what_was_seen() -> None:
    """Nearest rank: every figure is a measured one."""
    assert percentiles([]) is None
    assert percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0, "max": 3.0}
    found = percentiles([float(number) for number in range(1, 101)])
    assert found == {"p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 100.0}


# ---- top ------------------------------------------------------------------------------


def test_top_shows_traffic_as_lines_and_json(server: ServerProcess) -> None:
    """A busy interval has rates and the engine's row, by data dir and by endpoint alike."""
    with EmulatedEngine(server.url, [64], object_bytes=4096, name="e\x1bvil").join(64) as engine:
        hashes = engine.hashes(list(range(641)))
        engine.store(hashes)
        process = subprocess.Popen(
            [*PROGRAM, "top", str(server.data_dir), "--interval", "0.3", "--json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            engine.lookup(hashes, 641)
            if found["per_second"]["hit_tokens"]:
                break
        process.send_signal(signal.SIGINT)
        process.stdout.close()
        assert process.wait(20) == 130
        assert (found["connected"], found["ready"], found["chunk_size"]) == (True, True, 64)
        assert found["hit_rate"] == pytest.approx(640 / 641, abs=1e-4)
        (row,) = found["engines"]
        assert row["engine"] == "e\\x1bvil"
        assert not undocumented("top", found)
        assert row["per_second"]["lookups"] == found["per_second"]["lookups"] > 0
        done = run_cli("top", "--server", server.url, "--count", "2", "--interval", "0.1")
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.splitlines()
    assert header.split()[:2] == ["time", "hit"]
    assert len(lines) == 2


def test_top_lives_on_while_the_server_is_away(make_server: MakeServer) -> None:
    """Killed, the server is shown as away; started again, it is back, with no rates at first."""
    server = make_server().start()
    process = subprocess.Popen(
        [*PROGRAM, "top", "--server", server.url, "--interval", "0.1", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = (json.loads(line) for line in process.stdout)
    first = next(lines)
    server.kill()
    away = next(one for one in lines if not one["connected"])
    assert away["error"]["code"] == "server_unreachable"
    server.start()
    back = next(one for one in lines if one["connected"] and one["boot_id"] != first["boot_id"])
    assert back["interval_s"] is None
    process.send_signal(signal.SIGINT)
    _, talk = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in talk


def test_top_draws_on_a_terminal_and_leaves_it_as_it_was(server: ServerProcess) -> None:
    """The screen shows the numbers; Ctrl-C puts the terminal back, and no traceback on it."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm", COLUMNS="80", LINES="24")
        os.execv(sys.executable, [*PROGRAM, "top", "--server", server.url, "--interval", "0.2"])
    shown = b""
    deadline = time.monotonic() + 30
    interrupted = False
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:
                break  # its end was closed
        if b"hit rate" in shown and not interrupted:
            interrupted = True
            os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130
    assert b"not bound" in shown
    assert b"\x1b[?1049l" in shown, "the alternate screen is left"
    assert b"Traceback" not in shown


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ((), 2, "expected one"),
        (("DIR", "--server", "ipc:///x"), 2, "expected one"),
        (("--server", "ipc:///nowhere/s", "--timeout", "0.2"), 4, "no server answers"),
        (("/nowhere/at/all",), 5, "/nowhere/at/all"),
        (("--server", "ipc:///x", "--interval", "0"), 2, "--interval"),
        (("--server", "ipc:///x", "--count", "-1"), 2, "--count"),
    ],
)
def test_top_refuses_with_a_code_and_a_sentence(
    args: tuple[str, ...], code: int, said: str, run: Run
) -> None:
    """No server, no folder, odd values: the documented exit code, no traceback."""
    found, _, talk = run("top", *args)
    assert (found, said in talk) == (code, True), talk


def test_watching_survives_a_reader_that_goes_away(server: ServerProcess) -> None:
    """``top | head -1`` ends, quietly."""
    command = f"{' '.join(PROGRAM)} top --server {server.url} --interval 0.1 | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[0] == "time"
    assert done.stderr == ""


def test_json_logs_are_one_object_per_event(make_server: MakeServer) -> None:
    """Every line of the log parses, settings come once, and what outsiders say stays a string."""
    server = make_server("--log-format", "json").start()
    evil = 'e"\n{"level": "error"}\x1b[2J'
    with EmulatedEngine(server.url, [64], name=evil, object_bytes=4096).join(64):
        wait_until(lambda: "registered" in server.log(), "the engine is logged")
    assert server.terminate() == 0
    lines = [json.loads(line) for line in server.log().splitlines()]
    assert all(set(line) == {"at", "level", "logger", "message"} for line in lines)
    settings = [line for line in lines if line["message"].startswith("setting log_format = json")]
    assert len(settings) == 1
    assert all(line["message"].isprintable() for line in lines)
    assert lines[-1]["message"] == "stopped"
