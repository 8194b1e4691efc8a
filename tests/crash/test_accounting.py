"""Usage, order and quota over a kill: exact before anybody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lmcache_persist.connector import ClientOptions
from lmcache_persist.hashing import EXTENT_BYTES
from support.emulated import EmulatedEngine
from support.server import ServerProcess, inspect, run_cli

MIB = 1 << 20
CHUNK = 256
PROMPTS, CHUNKS = 9, 10
OPTIONS = ClientOptions(request_timeout_s=10.0, lookup_timeout_s=20.0)


@contextmanager
def engine_of(server: ServerProcess) -> Iterator[EmulatedEngine]:
    """An engine with objects of one extent."""
    with EmulatedEngine(
        server.url, [CHUNK], object_bytes=EXTENT_BYTES, options=OPTIONS
    ).join() as engine:
        yield engine


def store(engine: EmulatedEngine, prompt: int) -> None:
    """Store a prompt and make it durable."""
    assert engine.store(engine.hashes([prompt, *range(CHUNKS * CHUNK)])) == CHUNKS
    engine.client.flush(30)


def hit(engine: EmulatedEngine, prompt: int) -> int:
    """Chunks of a prompt that are hit, byte for byte."""
    hashes = engine.hashes([prompt, *range(CHUNKS * CHUNK)])
    return engine.lookup(hashes, CHUNKS * CHUNK + 1).tokens // CHUNK


def test_quota_and_order_survive_a_kill(make_server: Callable[..., ServerProcess]) -> None:
    """Case C2: 90 of 100 MiB, killed: known at once, all hit; 20 more evict the oldest only."""
    server = make_server(capacity="100MiB", pool_size="32MiB").start()
    with engine_of(server) as engine:
        for prompt in range(PROMPTS):
            store(engine, prompt)
    server.kill()
    for _ in range(2):  # files alone, then a server that nobody has asked for anything
        found = inspect(server.data_dir)["store"]
        assert (found["objects"], found["bytes"]) == (90, 90 * EXTENT_BYTES)
        if server.process is not None and server.process.poll() is not None:
            server.start()
    with engine_of(server) as engine:
        # The first prompt is used last; storing one again makes that durable, and no more.
        for prompt in (*range(1, PROMPTS), 0):
            assert hit(engine, prompt) == CHUNKS
        for _ in range(5):
            store(engine, 0)
    assert inspect(server.data_dir)["store"]["objects"] == 90
    server.kill()
    server.start()
    with engine_of(server) as engine:
        for prompt in (100, 101):
            store(engine, prompt)
            found = inspect(server.data_dir)["store"]
            assert found["bytes"] == found["objects"] * EXTENT_BYTES <= 100 * MIB
        assert engine.client.stats(20)["counters"]["disk_evictions"] > 0
        assert [hit(engine, prompt) for prompt in (0, 100, 101)] == [CHUNKS] * 3
        assert hit(engine, 1) < CHUNKS, "used longest ago"
    assert server.terminate() == 0
    assert run_cli("verify", str(server.data_dir)).returncode == 0
