"""Verbs against a live server, a hung one, one that listens elsewhere."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmcache_persist.connector import ClientOptions
from lmcache_persist.datadir import read_holder
from support.emulated import EmulatedEngine
from support.files import snapshot
from support.server import ServerProcess, inspect, run_cli
from support.waiting import wait_until

MakeServer = Callable[..., ServerProcess]
GROUPS = ("--groups", "64", "--timeout", "20")
PATIENT = ClientOptions(request_timeout_s=5.0)


def store_some(server: ServerProcess, chunks: int = 4) -> None:
    """A model with a few durable chunks."""
    with EmulatedEngine(server.url, [640], options=PATIENT).join() as engine:
        hashes = engine.hashes(list(range(640 * chunks)))
        assert engine.store(hashes) == chunks
    done = run_cli("flush", "--server", server.url, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["durable_seq"] >= 1


@contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    """The server hangs."""
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


def test_a_live_server_and_its_files_tell_the_same(server: ServerProcess) -> None:
    """One rule makes the document, whoever is asked."""
    store_some(server)
    live = inspect(server.data_dir, "--models")
    seen = live.pop("server")
    assert seen["counters"]["commits"] == 4
    [of_model] = seen["models"].values()
    assert of_model["committed_bytes"] == seen["counters"]["committed_bytes"] > 0
    assert live["store"]["objects"] == 4
    assert server.terminate() == 0
    offline = inspect(server.data_dir, "--models")
    assert offline["store"].pop("clean_shutdown") is True
    assert live["store"].pop("clean_shutdown") is None
    assert (live["store"].pop("corrupt_chunks"), offline["store"].pop("corrupt_chunks")) == (
        0,
        None,
    )
    assert [live.pop("boots")[0]["end"], offline.pop("boots")[0]["end"]] == ["running", "clean"]
    assert live == offline


def test_a_first_start_had_no_server_before_it(server: ServerProcess) -> None:
    """There is no earlier shutdown to be clean or not, and the text says so."""
    shown = run_cli("inspect", str(server.data_dir)).stdout
    assert "clean shutdown\tno earlier server\n" in shown


def test_a_live_server_verifies_itself(server: ServerProcess) -> None:
    """Verify asks the server, which reads its own objects; afterwards the files say the same."""
    store_some(server)
    done = run_cli("verify", str(server.data_dir), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"ok": True, "checked_objects": 4, "violations": []}
    server.kill()
    done = run_cli("verify", str(server.data_dir), "--json")
    assert json.loads(done.stdout)["checked_objects"] == 4
    assert done.returncode == 0, done.stdout


def test_a_hung_server_shows_the_manifest_only(server: ServerProcess) -> None:
    """Within the timeout: manifest, store unavailable, exit code 4, the holder named."""
    store_some(server)
    with stopped(server):
        done = run_cli("inspect", str(server.data_dir), "--json", "--timeout", "0.5")
        document = json.loads(done.stdout)
        assert done.returncode == 4
        assert document["store"] == "unavailable"
        assert document["binding"]["chunk_size"] == 640
        assert document["models"][0]["objects"] is None
        assert f"pid {server.process.pid}" in done.stderr if server.process else False
        assert run_cli("verify", str(server.data_dir), "--timeout", "0.5").returncode == 4
        flush = run_cli("flush", "--server", server.url, "--timeout", "0.5")
        assert flush.returncode == 4
    assert inspect(server.data_dir)["store"]["objects"] == 4


def test_a_server_elsewhere_is_found_through_its_lock_file(make_server: MakeServer) -> None:
    """Inspect takes the data dir and finds a TCP endpoint by itself."""
    server = make_server("--listen", "tcp://127.0.0.1:0").start()
    assert server.url.startswith("tcp://")
    assert not server.url.endswith(":0")
    holder = read_holder(server.data_dir)
    assert holder is not None
    assert holder.endpoint == server.url
    assert inspect(server.data_dir)["binding"] is None


def test_another_server_at_the_named_address_is_not_believed(make_server: MakeServer) -> None:
    """A boot id that is not the holder's is no answer: no other server's numbers are shown."""
    one = make_server("--listen", "tcp://127.0.0.1:0", name="one").start()
    other = make_server("--listen", "tcp://127.0.0.1:0", name="other").start()
    lock = one.data_dir / "server.lock"
    lock.write_text(lock.read_text().replace(one.url, other.url))
    done = run_cli("inspect", str(one.data_dir), "--json", "--timeout", "1")
    assert done.returncode == 4
    assert json.loads(done.stdout)["store"] == "unavailable"
    assert "boot id" in done.stderr


def test_a_second_server_is_refused_and_the_first_lives(server: ServerProcess, root: Path) -> None:
    """Plainly, and through a symlink: exit code 5, the holder named, nothing changed."""
    link = root / "link"
    link.symlink_to(server.data_dir)
    before = files_of(server)
    for name in (server.data_dir, link):
        second = run_cli("serve", "--data-dir", str(name), "--pool-dir", str(server.pool_dir))
        assert second.returncode == 5
        assert second.stdout == ""
        assert server.url in second.stderr
        assert f"pid {server.process.pid}" in second.stderr if server.process else False
    assert files_of(server) == before
    assert inspect(server.data_dir)["binding"] is None


def files_of(server: ServerProcess) -> dict[str, tuple[int, int, str]]:
    """The data dir, but for the table in which LMDB notes the server's own readers."""
    found = snapshot(server.data_dir)
    del found["store/lock.mdb"]
    return found


def test_everything_a_server_makes_is_private_whatever_the_umask(make_server: MakeServer) -> None:
    """Under umask 0: folders 0700, files and socket 0600, side files of SQLite included."""
    server = make_server()
    before = os.umask(0)
    try:
        server.start()
    finally:
        os.umask(before)
    store_some(server)
    found = {path: stat.S_IMODE(path.lstat().st_mode) for path in server.data_dir.rglob("*")}
    assert any(path.name.endswith("-wal") for path in found)
    for path, mode in {**found, server.data_dir: 0o700}.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path
    for path in server.pool_dir.rglob("*"):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize(
    ("flags", "env", "found"),
    [
        (("--base-chunk-size", "0"), {}, "base_chunk_size"),
        ((), {"LMCACHE_PERSIST_CAPACTY": "1GiB"}, "LMCACHE_PERSIST_CAPACITY"),
        ((), {"LMCACHE_PERSIST_FAILPOINTS": "bind.nowhere=kill"}, "bind.before_commit"),
        (("--listen", "tcp://0.0.0.0:0"), {}, "--allow-remote"),
    ],
)
def test_odd_settings_never_make_a_data_dir(
    make_server: MakeServer, flags: tuple[str, ...], env: dict[str, str], found: str
) -> None:
    """A refused setting ends the start with exit code 2 before anything is made."""
    server = make_server(*flags, env=env)
    code, talk = server.refused()
    assert code == 2, talk
    assert found in talk
    assert "Traceback" not in talk
    assert not server.data_dir.exists()


def test_settings_are_printed_once_with_their_sources(make_server: MakeServer) -> None:
    """The log of a start shows every effective setting and where it came from."""
    server = make_server(env={"LMCACHE_PERSIST_BASE_CHUNK_SIZE": "128"}).start()
    assert server.log().count("base_chunk_size = 128 (LMCACHE_PERSIST_BASE_CHUNK_SIZE)") == 1


def test_a_server_whose_stdout_is_closed_serves(make_server: MakeServer) -> None:
    """Nobody can be told that it is ready: one warning, no traceback, and a clean end."""
    server = make_server()
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *server.command]
    with open(server.log_path, "w") as log, subprocess.Popen(command, stderr=log) as process:
        wait_until(lambda: "ready at ipc://" in server.log(), "the server is ready")
        done = run_cli("negotiate", "--server", f"ipc://{server.data_dir}/server.sock", *GROUPS)
        assert done.returncode == 0, done.stderr
        process.terminate()
    assert process.returncode == 0
    warnings = [line for line in server.log().splitlines() if " WARNING " in line]
    assert len([line for line in warnings if "pool dir" not in line]) == 1
    assert "Traceback" not in server.log()


def test_inspect_survives_a_reader_that_goes_away(server: ServerProcess) -> None:
    """``inspect | head -1`` is quiet."""
    done = subprocess.run(
        f"{' '.join(server.command[:3])} inspect {server.data_dir} --json | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "{\n"
    assert done.stderr == ""
