"""A disk that hangs: loads give up, everything else goes on, and the server still ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache_persist.connector import ClientOptions
from lmcache_persist.errors import ObjectCorrupt, RequestTimeout
from lmcache_persist.server import finding
from lmcache_persist.store.base import ChunkKey, ChunkRecord, ChunkWrite, Place, chunk_hash_of
from support.client_child import ClientProcess
from support.emulated import EmulatedEngine
from support.in_process import local_server
from support.server import ServerProcess, inspect, json_here, run_cli
from support.waiting import stays, wait_until
from support.web import fetch, free_port

OBJECT = 1 << 20
POOL = "16MiB"
STORE_OBJECTS = 12
"""Of 1 MiB each: three quarters of the pool."""
CHUNKS = 4
MakeServer = Callable[..., ServerProcess]


def hanging(make_server: MakeServer, point: str, until: Path, *flags: str) -> ServerProcess:
    """A server, with prompt 1 on its disk only, that hangs at a failpoint until a file is there."""
    server = make_server(pool_size=POOL).start()
    with ClientProcess(server.url) as client:
        client.call("join", "before", OBJECT)
        assert client.call("store", 1, CHUNKS) == CHUNKS
        client.call("flush")
        client.call("leave")
    assert server.terminate() == 0
    env = {"LMCACHE_PERSIST_FAILPOINTS": f"{point}=pause:{until}"}
    return make_server(*flags, pool_size=POOL, env=env).start()


@contextmanager
def engine(server: ServerProcess, name: str, lookup_timeout_s: float) -> Iterator[EmulatedEngine]:
    """An engine that gives a lookup so long."""
    options = ClientOptions(request_timeout_s=10.0, lookup_timeout_s=lookup_timeout_s)
    with EmulatedEngine(
        server.url, [256], object_bytes=OBJECT, name=name, options=options
    ).join() as made:
        yield made


def prompt(made: EmulatedEngine, number: int, chunks: int = CHUNKS) -> list[bytes]:
    """The hashes that a client process has for this prompt."""
    return list(made.hashes([number, *range(chunks * made.chunk_size)]))


def hits(made: EmulatedEngine, number: int, chunks: int = CHUNKS) -> int:
    """Look up, check bytes; chunks found."""
    hashes = prompt(made, number, chunks)
    return made.lookup(hashes, chunks * made.chunk_size + 1).tokens // made.chunk_size


def begun(made: EmulatedEngine, number: int) -> Any:
    """A lookup that is not waited for."""
    hashes = prompt(made, number)
    tokens = CHUNKS * made.chunk_size + 1
    return made.client.lookup(engine=made.name, hashes=hashes, num_tokens=tokens)


def test_a_hanging_read_delays_its_own_load_only(make_server: MakeServer, root: Path) -> None:
    """It ends at its deadline as a miss; hits, misses, pings and probes of others do not wait."""
    go, port = root / "go", free_port()
    server = hanging(make_server, "load.before_read", go, "--http", f"127.0.0.1:{port}")
    with engine(server, "stuck", 1.0) as stuck, engine(server, "other", 20.0) as other:
        # As many as there are readers, and more.
        loads = [begun(stuck, 1) for _ in range(4)]
        assert other.store(prompt(other, 2)) == CHUNKS
        assert hits(other, 2) == CHUNKS
        assert hits(other, 3) == 0
        assert other.client.stats(10)["counters"]["disk_hit_chunks"] == 0
        assert fetch(port, "/healthz")[0] == 200
        assert fetch(port, "/readyz")[0] == 200
        for load in loads:
            result = load.wait(20)
            assert result is not None
            assert result.tokens == 0
            assert isinstance(result.error, RequestTimeout)
            load.release()
        # Nothing is lost: once the disk is back, so are the hits.
        go.touch()
        wait_until(lambda: hits(stuck, 1) == CHUNKS, "hits are back")
        assert other.client.stats(10)["counters"]["corrupt_chunks"] == 0
        assert fetch(port, "/readyz")[0] == 200


def test_a_stop_waits_for_no_hanging_read(make_server: MakeServer, root: Path) -> None:
    """The stop is bounded and says what hangs; the next start has everything."""
    flags = ("--shutdown-timeout", "1")
    server = hanging(make_server, "load.before_read", root / "never", *flags)
    with engine(server, "stuck", 20.0) as stuck:
        load = begun(stuck, 1)
        wait_until(lambda: stuck.client.stats(10)["leased_bytes"] > 0, "the load has begun")
        at = time.monotonic()
        assert server.terminate() == 1
        # Far less than the read would have taken, with room for a machine that is shared.
        assert time.monotonic() - at < 20
        assert "not closed in good order" in server.log()
        assert "Traceback" not in server.log()
        load.release()
    assert list(server.pool_dir.glob("*.pool")) == []
    assert run_cli("verify", str(server.data_dir)).returncode == 0
    again = make_server(pool_size=POOL).start()
    with engine(again, "again", 20.0) as back:
        assert hits(back, 1) == CHUNKS


def test_a_stop_waits_for_no_hanging_manifest(make_server: MakeServer, root: Path) -> None:
    """A bind that hangs before its commit is given up with the process, and never was."""
    env = {"LMCACHE_PERSIST_FAILPOINTS": f"bind.before_commit=pause:{root / 'never'}"}
    server = make_server("--shutdown-timeout", "1", pool_size=POOL, env=env).start()
    done = run_cli("negotiate", "--server", server.url, "--groups", "256", "--timeout", "1")
    assert done.returncode == 4
    at = time.monotonic()
    assert server.terminate() == 1
    assert time.monotonic() - at < 20
    assert "Traceback" not in server.log()
    assert list(server.pool_dir.glob("*.pool")) == []
    again = make_server(pool_size=POOL).start()
    assert inspect(again.data_dir)["binding"] is None
    with engine(again, "again", 20.0) as back:
        assert back.chunk_size == 256


@pytest.mark.parametrize("point", ["commit.before_write", "commit.before_sync"])
def test_a_backlog_that_the_disk_does_not_take_is_cleanly_absent(
    make_server: MakeServer, root: Path, point: str
) -> None:
    """Given up in bounded time, said, and a miss afterwards; what was durable is there."""
    server = hanging(make_server, point, root / "never", "--shutdown-timeout", "1")
    with ClientProcess(server.url) as client:
        client.call("join", "engine", OBJECT)
        assert client.call("store", 2, CHUNKS) == CHUNKS
        process = server.process
        assert process is not None
        at = time.monotonic()
        process.terminate()
        assert server.terminate() == 1  # a second one changes nothing
        assert time.monotonic() - at < 20
    assert "giving them up" in server.log()
    assert "Traceback" not in server.log()
    assert list(server.pool_dir.glob("*.pool")) == []
    assert run_cli("verify", str(server.data_dir)).returncode == 0
    again = make_server(pool_size=POOL).start()
    with engine(again, "again", 20.0) as back:
        assert hits(back, 1) == CHUNKS
        assert hits(back, 2) == 0


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is in no file and no pool."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say")


def test_stores_outrun_a_hanging_disk(make_server: MakeServer, root: Path) -> None:
    """What does not fit is dropped and counted, memory does not grow, and loads go first."""
    go = root / "go"
    server = hanging(make_server, "commit.before_write", go)
    assert server.process is not None
    with engine(server, "engine", 20.0) as made:
        stored = sum(made.store(prompt(made, number)) for number in range(10, 20))
        before = anonymous_bytes(server.process.pid)
        offered = 10 * CHUNKS
        for number in range(20, 120):
            offered += CHUNKS
            stored += made.store(prompt(made, number))
        grown = anonymous_bytes(server.process.pid) - before
        assert stored == STORE_OBJECTS
        assert made.client.stats(10)["dropped_stores"]["no_slot"] == offered - stored
        assert grown < 4 << 20
        # The disk reads, the writer hangs: a hit still finds its room.
        assert hits(made, 1) == CHUNKS
        go.touch()
        made.client.flush(20)
        assert made.client.stats(10)["counters"]["dropped_chunks"] == 0
        assert made.store(prompt(made, 200)) == CHUNKS


def test_a_late_verdict_on_an_old_copy_spares_the_new_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that is stored again while a read proves its old copy bad is not dropped."""
    with (
        local_server(root) as server,
        EmulatedEngine(server.url, [256], object_bytes=4096).join() as made,
    ):
        assert made.store(prompt(made, 1)) == CHUNKS
        made.client.flush(20)
        server.empty_pool()
        disk = server.disk

        def late(record: ChunkRecord, place: Place, buffer: memoryview) -> bool:
            # Another read was quicker: its verdict is carried out, and an engine stored it anew.
            content = disk._contents[record.serial, place]
            assert disk.drop({record.key: record.serial}) == [record.key]
            disk.write([ChunkWrite(record.key, {place: content})])
            raise ObjectCorrupt("it has another digest")

        with monkeypatch.context() as slow:
            slow.setattr(disk, "read_into", late)
            assert hits(made, 1) == 0
        server.state.writer.run(lambda: None).result(20)
        assert hits(made, 1) == CHUNKS


def test_searches_of_a_hanging_disk_do_not_pile_up(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond a bound a lookup is decided by the pool; those that gave up are never searched for."""
    monkeypatch.setattr(finding, "MAX_KEYS_SEARCHED", 2 * CHUNKS)
    options = ClientOptions(request_timeout_s=10.0, lookup_timeout_s=20.0)
    with (
        local_server(root) as server,
        EmulatedEngine(server.url, [256], object_bytes=4096, options=options).join() as made,
    ):
        find, go, searched = server.disk.find, threading.Event(), []

        def hang(keys: Sequence[ChunkKey]) -> list[ChunkRecord | None]:
            go.wait(20)
            searched.append(chunk_hash_of(keys[0]))
            return find(keys)

        for number in (1, 2):
            assert made.store(prompt(made, number)) == CHUNKS
        made.client.flush(20)
        server.empty_pool()
        monkeypatch.setattr(server.disk, "find", hang)
        first, second = begun(made, 1), begun(made, 2)
        third = begun(made, 3).wait(20)
        assert (third.tokens, third.error) == (0, None)
        second.release()
        wait_until(lambda: made.client.stats(10)["lookups_open"] == 1, "the second one gave up")
        go.set()
        assert first.wait(20).tokens == CHUNKS * made.chunk_size
        first.release()
        assert hits(made, 2) == CHUNKS
        assert searched == [prompt(made, number)[0] for number in (1, 2)]


def test_an_idle_server_that_is_stopped_says_so_afterwards(make_server: MakeServer) -> None:
    """Nobody asked, and yet nobody would have been answered: it counts, in log and numbers."""
    server = make_server().start()
    assert server.process is not None
    json_here("inspect", str(server.data_dir))  # its loop turns
    os.kill(server.process.pid, signal.SIGSTOP)
    stays(lambda: True, "it is stopped for longer than a turn", 1.5)
    os.kill(server.process.pid, signal.SIGCONT)
    wait_until(lambda: "the server answered nobody for" in server.log(), "it is told")
    silence = json_here("inspect", str(server.data_dir))["server"]["longest_turn_s"]
    assert silence >= 0.5
