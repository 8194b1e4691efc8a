"""SIGKILL of a real server at every named step of bind and commit.

After each, the next start is in the state before the step or after it, never in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from lmcache_persist import failpoints
from lmcache_persist.connector import ClientOptions
from lmcache_persist.errors import TransportError
from lmcache_persist.geometry import groups_from_sizes
from support.emulated import EmulatedEngine
from support.server import ServerProcess, inspect, run_cli
from support.waiting import wait_until

QUICK = ClientOptions(request_timeout_s=5.0)
MakeServer = Callable[..., ServerProcess]
NUM_CHUNKS = 6

BIND_POINTS = {name for name in failpoints.NAMES if name.startswith("bind.")}
COMMIT_POINTS = {name for name in failpoints.NAMES if name.startswith("commit.")}


def test_the_steps_are_the_ones_tested() -> None:
    """A new step of bind or commit has to be given its outcome here."""
    assert set(BIND_OUTCOMES) == BIND_POINTS
    assert set(COMMIT_OUTCOMES) == COMMIT_POINTS


BIND_OUTCOMES = {
    "bind.before_commit": None,
    "bind.after_commit": 544,
    "bind.after_stamp": 544,
}


@pytest.mark.parametrize("point", BIND_OUTCOMES)
def test_a_bind_is_all_or_nothing(make_server: MakeServer, point: str) -> None:
    """A server killed at a step of bind comes back unbound, or bound in manifest and store."""
    server = make_server()
    fresh_env = server._env
    server._env = {**fresh_env, failpoints.ENV: f"{point}=kill"}
    server.start()
    with EmulatedEngine(server.url, [544], options=QUICK) as engine:
        engine.client.wait_connected(20)
        with pytest.raises(TransportError):
            engine.client.bind(groups_from_sizes([544]), timeout_s=3)
    assert server.wait() == -9
    size = BIND_OUTCOMES[point]
    binding = inspect(server.data_dir)["binding"]
    assert (binding and binding["chunk_size"]) == size
    server._env = fresh_env
    server.start()
    # What was bound stays bound to that; what was not can still be bound to another size.
    wanted = size or 400
    with EmulatedEngine(server.url, [wanted], options=QUICK) as engine:
        engine.join()
        assert engine.chunk_size == wanted
        if size:
            assert inspect(server.data_dir)["binding"] == binding
        hashes = engine.hashes(list(range(wanted + 1)))
        assert engine.store(hashes) == 1
        engine.client.flush(20)
    server.kill()
    assert run_cli("verify", str(server.data_dir)).returncode == 0


COMMIT_OUTCOMES = {
    "commit.before_write": [0],
    "commit.after_extents": [0],
    "commit.before_sync": [0],
    # The first batch has at least one chunk, and as many as had come by then.
    "commit.after_sync": range(1, NUM_CHUNKS + 1),
}


@pytest.mark.parametrize("point", COMMIT_OUTCOMES)
def test_a_commit_is_all_or_nothing(make_server: MakeServer, point: str) -> None:
    """A server killed while it writes has what was flushed before, and whole batches only."""
    server = make_server().start()
    with EmulatedEngine(server.url, [256], options=QUICK) as engine:
        engine.join()
        kept = engine.hashes([1, *range(256 * 2)])
        engine.store(kept)
        engine.client.flush(20)
    server.terminate()
    fresh_env = server._env
    server._env = {**fresh_env, failpoints.ENV: f"{point}=kill"}
    server.start()
    with EmulatedEngine(server.url, [256], options=QUICK) as engine:
        engine.join()
        hashes = engine.hashes([2, *range(256 * NUM_CHUNKS)])
        # The kill may come before or after the answer to the commit.
        with contextlib.suppress(TransportError):
            engine.store(hashes)
        wait_until(lambda: engine.client.breaker_open, "the server is dead")
    assert server.wait() == -9
    server._env = fresh_env
    server.start()
    with EmulatedEngine(server.url, [256], options=QUICK) as engine:
        engine.join()
        assert engine.lookup(kept, 256 * 2 + 1).tokens == 256 * 2
        found = engine.lookup(hashes, 256 * NUM_CHUNKS + 1).tokens // 256
        assert found in COMMIT_OUTCOMES[point]
        # And the server goes on: what was lost can be stored again.
        assert engine.store(hashes) == NUM_CHUNKS
        engine.client.flush(20)
    server.kill()
    assert run_cli("verify", str(server.data_dir)).returncode == 0
