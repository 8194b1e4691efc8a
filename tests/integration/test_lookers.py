"""Who looks at a data dir, or wants to serve it too, is in nobody's way: stopped, killed, twice."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from support.emulated import EmulatedEngine
from support.files import manifest_held, snapshot
from support.server import ServerProcess, inspect, run_cli
from support.waiting import stays

MakeServer = Callable[..., ServerProcess]
OBJECT = 64 << 10
CHUNK = 256
KILLED = 200
"""Readers that are killed while they look."""
STOPPED = 3

# Forks, so that 200 of them cost little: each looks again and again until it is killed.
_KILL_READERS = """
import os, random, signal, sys, time
from pathlib import Path
from lmcache_persist.server.looking import look
root, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
draw = random.Random(seed)
look(root)
for _ in range(count):
    child = os.fork()
    if child == 0:
        try:
            while True:
                look(root)
        finally:
            os._exit(1)
    time.sleep(draw.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status
"""


def replace_objects(server: ServerProcess, prompts: Sequence[int], chunks: int) -> dict[str, int]:
    """Store prompts through a full store; what was dropped and evicted."""
    with EmulatedEngine(server.url, [CHUNK], object_bytes=OBJECT).join() as engine:
        for prompt in prompts:
            hashes = engine.hashes([prompt, *range(chunks * CHUNK)])
            assert engine.store(hashes) == chunks
            engine.client.flush(20)
        assert engine.lookup(hashes, chunks * CHUNK + 1).tokens == chunks * CHUNK
        counters: dict[str, int] = engine.client.stats(20)["counters"]
        return counters


def test_killed_readers_leave_nothing(make_server: MakeServer) -> None:
    """Case D4: 200 readers killed while they look; a server starts, and 1,000 chunks go through."""
    server = make_server(capacity="16MiB").start()
    replace_objects(server, range(2), 50)
    assert server.terminate() == 0
    before = snapshot(server.data_dir)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    command = [sys.executable, "-c", _KILL_READERS, str(server.data_dir), str(KILLED), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert snapshot(server.data_dir) == before
    server.start()
    counters = replace_objects(server, range(100, 110), 100)
    assert counters["dropped_chunks"] == 0
    assert counters["disk_evictions"] > 700
    assert server.terminate() == 0
    assert run_cli("verify", str(server.data_dir)).returncode == 0


def test_a_stopped_inspect_pins_nothing(make_server: MakeServer) -> None:
    """Case D4: an ``inspect`` stopped at any moment holds no page; 500 objects are replaced."""
    server = make_server(capacity="16MiB").start()
    replace_objects(server, range(2), 100)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    command = [sys.executable, "-m", "lmcache_persist.cli", "inspect", str(server.data_dir)]
    looking = [
        subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(STOPPED)
    ]
    try:
        for process in looking:
            time.sleep(draw.uniform(0, 0.3))
            process.send_signal(signal.SIGSTOP)
        counters = replace_objects(server, range(100, 105), 100)
        assert counters["dropped_chunks"] == 0
        assert counters["disk_evictions"] > 300
        for process in looking:
            process.send_signal(signal.SIGCONT)
        for process in looking:
            out, err = process.communicate(timeout=60)
            # An answer, or, for one whose time ran out in its sleep, that there was none.
            assert process.returncode in (0, 4)
            assert json.loads(out)["binding"]["chunk_size"] == CHUNK
            assert b"Traceback" not in err
    finally:
        for process in looking:
            process.kill()
            process.communicate(timeout=60)


def test_two_servers_that_are_both_process_1(
    make_server: MakeServer, namespaces: list[str]
) -> None:
    """Case D5: in containers of their own the second is refused all the same, naming the first."""
    first, second = make_server(), make_server()
    for server in (first, second):
        server.command = [*namespaces, *server.command]
    first.start()
    before = inspect(first.data_dir)["server"]["boot_id"]
    status, log = second.refused()
    assert status == 5
    assert "[data_dir_locked]" in log
    assert "pid 1 on " in log
    assert first.url in log
    assert inspect(first.data_dir)["server"]["boot_id"] == before
    # Killed, it leaves nothing that its process id could be mistaken in.
    first.kill()
    second.start()
    assert inspect(second.data_dir)["server"]["boot_id"] != before


def test_a_manifest_that_is_locked_for_a_while(make_server: MakeServer) -> None:
    """Case D7: a start waits for it; longer than ten seconds, it ends and says so, and no more."""
    server = make_server("--chunk-size", "512").start()
    assert server.terminate() == 0
    before = snapshot(server.data_dir)
    with manifest_held(server.data_dir / "manifest.sqlite"):
        status, log = server.refused()
    assert status > 0
    assert "[manifest_busy]" in log
    assert "Traceback" not in log
    after = snapshot(server.data_dir)
    # Whoever looks at a database in WAL mode makes its side files.
    assert {name: after[name][2] for name in before if "crash" not in name} == {
        name: before[name][2] for name in before if "crash" not in name
    }
    with manifest_held(server.data_dir / "manifest.sqlite"):
        server.launch()
        process = server.process
        assert process is not None
        stays(lambda: process.poll() is None, "the start waits", 2.0)
    server.wait_ready()
    assert inspect(server.data_dir)["binding"]["chunk_size"] == 512
