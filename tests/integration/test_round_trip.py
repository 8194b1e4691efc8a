"""Storing and loading through a real server, byte for byte, over restarts of either side."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from lmcache_persist.connector import ClientOptions
from lmcache_persist.errors import Stale
from lmcache_persist.geometry import Group, GroupKind
from support.emulated import EmulatedEngine, pattern
from support.server import ServerProcess, inspect, run_cli
from support.waiting import wait_until

PATIENT = ClientOptions(request_timeout_s=5.0)


def store_and_flush(engine: EmulatedEngine, num_chunks: int) -> tuple[list[bytes], int]:
    """Store a prompt of so many chunks and one token; its hashes and length."""
    tokens = list(range(num_chunks * engine.chunk_size + 1))
    hashes = engine.hashes(tokens)
    assert engine.store(hashes) == num_chunks
    engine.client.flush(20)
    return list(hashes), len(tokens)


GEOMETRIES = {
    "glm": ([640, 0, 640, 640, 640, 640], 1, 640),
    "two-ranks": ([544], 2, 544),
    "lcm": ([544, 64], 1, 1088),
    "sliding": ([Group(GroupKind.SLIDING, 128, 128, 512), 128], 1, 256),
    "slots-differ": ([400, Group(GroupKind.FULL, 400, 100)], 2, 400),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_what_was_stored_comes_back_after_a_kill(
    make_server: Callable[..., ServerProcess], name: str
) -> None:
    """Flushed objects of every geometry come back byte for byte, from disk, after SIGKILL."""
    sizes, world_size, chunk_size = GEOMETRIES[name]
    server = make_server().start()
    with EmulatedEngine(server.url, sizes, world_size=world_size, options=PATIENT) as engine:
        engine.join()
        assert engine.chunk_size == chunk_size
        hashes, num_tokens = store_and_flush(engine, 5)
        warm = engine.lookup(hashes, num_tokens)
        assert (warm.tokens, warm.disk_chunks) == (5 * chunk_size, 0)
    server.kill()
    server.start()
    with EmulatedEngine(server.url, sizes, world_size=world_size, options=PATIENT) as engine:
        engine.join()
        back = engine.lookup(hashes, num_tokens)
        assert (back.tokens, back.memory_chunks) == (5 * chunk_size, 0)
        again = engine.lookup(hashes, num_tokens)
        assert (again.tokens, again.disk_chunks) == (5 * chunk_size, 0)
    server.terminate()
    assert inspect(server.data_dir)["store"]["clean_shutdown"] is True
    assert run_cli("verify", str(server.data_dir)).returncode == 0


def test_one_token_is_left_to_compute(server: ServerProcess) -> None:
    """A prompt of exactly n chunks hits n - 1, one token more hits n."""
    with EmulatedEngine(server.url, [544], options=PATIENT) as engine:
        engine.join()
        hashes, _ = store_and_flush(engine, 3)
        expected = {1632: 1088, 1633: 1632, 1631: 1088, 544: 0, 545: 544, 1: 0}
        found = {n: engine.lookup(hashes[: n // 544], n).tokens for n in expected}
        assert found == expected


def test_a_sliding_group_loads_its_window_only(server: ServerProcess) -> None:
    """Of a sliding group only the chunks that cover the window are brought into slots."""
    groups = [Group(GroupKind.SLIDING, 128, 128, 512), 128]
    with EmulatedEngine(server.url, groups, options=PATIENT) as engine:
        engine.join()
        hashes, num_tokens = store_and_flush(engine, 8)
        result = engine.lookup(hashes, num_tokens)
        firsts = {run.group: (run.first_chunk, len(run.offsets)) for run in result.runs}
        assert firsts == {0: (6, 2), 1: (0, 8)}


def test_a_chunk_is_visible_when_all_ranks_committed(server: ServerProcess) -> None:
    """With one rank's commit missing the chunk is no hit; with it, it is."""
    with EmulatedEngine(server.url, [256], world_size=2, options=PATIENT) as engine:
        engine.join()
        hashes = engine.hashes(list(range(513)))
        engine.store(hashes, ranks=[0])
        assert engine.lookup(hashes, 513).tokens == 0
        engine.store(hashes, ranks=[1])
        assert engine.lookup(hashes, 513).tokens == 512


def test_models_do_not_share(server: ServerProcess) -> None:
    """Another identity is a namespace of its own; the same one shares."""
    with EmulatedEngine(server.url, [256], options=PATIENT) as engine:
        engine.join()
        hashes, num_tokens = store_and_flush(engine, 2)
    other = {"weights": "w1"}
    with EmulatedEngine(server.url, [256], changes=other, options=PATIENT) as engine:
        engine.join()
        assert engine.lookup(hashes, num_tokens).tokens == 0
    with EmulatedEngine(server.url, [128], options=PATIENT) as engine:
        engine.join()
        assert engine.lookup(hashes, num_tokens).tokens == 0
    with EmulatedEngine(server.url, [256], name="second", options=PATIENT) as engine:
        engine.join()
        assert engine.lookup(hashes, num_tokens).tokens == 512


def test_an_unwritten_slot_is_refused(server: ServerProcess) -> None:
    """A commit whose slot still holds the server's stamp is refused and never found."""
    with EmulatedEngine(server.url, [256], options=PATIENT) as engine:
        engine.join()
        hashes = engine.hashes(list(range(257)))
        reserved = engine.client.reserve(
            engine=engine.name, rank=0, hashes=hashes, masks=[engine.mask]
        ).result(20)
        number = reserved.grants[0].reservation
        committed = engine.client.commit([number]).result(20)
        assert committed.refused == [number]
        assert engine.lookup(hashes, 257).tokens == 0
        assert engine.store(hashes) == 1
        assert engine.lookup(hashes, 257).tokens == 256


def test_a_full_pool_shortens_hits_and_refuses_stores(
    make_server: Callable[..., ServerProcess],
) -> None:
    """A prompt larger than half the pool is stored and hit as far as it fits, never wrong."""
    server = make_server(pool_size="8MiB").start()
    with EmulatedEngine(server.url, [256], object_bytes=1 << 20, options=PATIENT) as engine:
        engine.join()
        tokens = list(range(256 * 12 + 1))
        hashes = engine.hashes(tokens)
        for start in range(0, 12, 3):
            assert engine.store(hashes[start : start + 3]) == 3
            engine.client.flush(20)
        result = engine.lookup(hashes, len(tokens))
        assert result.tokens == 4 * 256
        assert engine.client.stats(20)["leased_bytes"] >= 0
        wait_until(lambda: engine.client.stats(20)["leased_bytes"] == 0, "leases back to zero")


def test_eviction_keeps_the_disk_within_capacity(
    make_server: Callable[..., ServerProcess],
) -> None:
    """Far more than the capacity goes through; usage stays below it, heads of prompts hit."""
    server = make_server(capacity="32MiB", pool_size="16MiB").start()
    with EmulatedEngine(server.url, [256], object_bytes=1 << 20, options=PATIENT) as engine:
        engine.join()
        last: list[bytes] = []
        for prompt in range(12):
            last = list(engine.hashes([prompt, *range(256 * 6)]))
            for start in range(0, 6, 3):
                assert engine.store(last[start : start + 3]) == 3
                engine.client.flush(20)
            assert inspect(server.data_dir)["store"]["bytes"] <= 32 << 20
        assert engine.lookup(last, 256 * 6 + 1).tokens >= 256
    server.kill()
    assert run_cli("verify", str(server.data_dir)).returncode == 0


def test_a_restart_is_noticed_and_hits_resume(
    make_server: Callable[..., ServerProcess],
) -> None:
    """A client whose server was killed and came back starts over by itself and hits again."""
    server = make_server().start()
    with EmulatedEngine(server.url, [256], options=PATIENT) as engine:
        engine.join()
        hashes, num_tokens = store_and_flush(engine, 3)
        boot = engine.client.boot_id
        server.kill()
        wait_until(lambda: engine.client.breaker_open, "the client notices")
        assert engine.lookup(hashes, num_tokens).tokens == 0
        server.start()
        wait_until(lambda: engine.client.boot_id not in (None, boot), "the client is back")
        assert wait_until(lambda: engine.lookup(hashes, num_tokens).tokens, "hits resume") == 768


def test_a_dead_client_gives_back_what_it_held(server: ServerProcess) -> None:
    """Reservations and leases of a killed process are free again; those of others stay."""
    import os
    import subprocess
    import sys

    code = (
        "import sys; from support.emulated import EmulatedEngine\n"
        "e = EmulatedEngine(sys.argv[1], [256], object_bytes=1 << 20, name='dying').join()\n"
        "h = e.hashes(list(range(256 * 8)))\n"
        "r = e.client.reserve(engine='dying', rank=0, hashes=h, masks=[1] * 8).result(20)\n"
        "print(len(r.grants), flush=True); sys.stdin.read()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with (
        EmulatedEngine(server.url, [256], object_bytes=1 << 20, options=PATIENT) as engine,
        subprocess.Popen(
            [sys.executable, "-c", code, server.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        ) as child,
    ):
        engine.join()
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "8"
        assert engine.client.stats(20)["pool"]["reservations"] == 8
        child.kill()
        free = engine.client.stats(20)["pool"]["size_bytes"]
        wait_until(
            lambda: engine.client.stats(20)["pool"]["free_bytes"] == free, "slots are free again"
        )
        assert engine.client.stats(20)["pool"]["reservations"] == 0


def test_a_message_of_another_boot_is_stale(server: ServerProcess) -> None:
    """Whoever names another boot id is told to start over."""
    import zmq

    from lmcache_persist import protocol
    from support.raw import ask, hello

    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(server.url)
        welcome = hello(socket)
        reply = ask(socket, protocol.Ping(boot="0" * 32, session=welcome.session))
        assert isinstance(reply, protocol.ErrorReply)
        assert reply.code == Stale.code


def test_altered_bytes_are_a_miss_and_never_served(
    make_server: Callable[..., ServerProcess],
) -> None:
    """A bit flipped on disk costs its chunk and what follows it; the chunk is dropped."""
    server = make_server().start()
    with EmulatedEngine(server.url, [256], options=PATIENT) as engine:
        engine.join()
        hashes, num_tokens = store_and_flush(engine, 4)
        victim = pattern(hashes[2], 0, 0, engine.object_bytes)
    server.terminate()
    data = server.data_dir / "store" / "data.mdb"
    content = data.read_bytes()
    at = content.index(victim[:4096]) + 1000
    with data.open("r+b") as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))
    assert run_cli("verify", str(server.data_dir)).returncode == 1
    server.start()
    with EmulatedEngine(server.url, [256], options=PATIENT) as engine:
        engine.join()
        assert engine.lookup(hashes, num_tokens).tokens == 2 * 256
        assert engine.client.stats(20)["counters"]["corrupt_chunks"] == 1
        assert engine.store(hashes) == 4
        engine.client.flush(20)
        assert engine.lookup(hashes, num_tokens).tokens == 4 * 256
    server.terminate()
    assert run_cli("verify", str(server.data_dir)).returncode == 0


def test_verify_asks_a_live_server(server: ServerProcess) -> None:
    """``verify`` beside a running server checks every object through it."""
    with EmulatedEngine(server.url, [256], options=PATIENT) as engine:
        engine.join()
        store_and_flush(engine, 4)
    done = run_cli("verify", str(server.data_dir), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checked_objects"] == 4
