"""One model folder, one thing changed between two runs: never another model's bytes.

The model's RoPE depends on ``max_model_len`` (longrope: beyond 2048 tokens its long
factors apply), so each of the changes makes other KV of the same size.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmcache_persist.demo.engine import EngineProcess
from lmcache_persist.demo.model import make_llama, make_prompt
from lmcache_persist.demo.server import ServerProcess
from lmcache_persist.hashing import ChunkHash, ChunkHasher
from support.altering import alter_chunk
from support.engines import IN_PROCESS, Starter, ask, ask_uncached, assert_same, warm_up

CHUNK = 544
PROMPT = make_prompt(1500, seed=41)
BEACON = make_prompt(600, seed=42)
RESET_PROMPT = make_prompt(1500, seed=43)
"""Stored in several namespaces; of the first one every extent is there once."""
CACHED = 2 * CHUNK
OWN_IDS = {**IN_PROCESS, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}
RESUME_TIMEOUT_S = 60.0
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 32,
    "long_factor": [4.0] * 32,
    "original_max_position_embeddings": 2048,
}


@dataclass
class World:
    """A server that lives through the module's tests, and what was first stored in it: both
    prompts by ``engine``, which computed them cold.
    """

    starter: Starter
    model: Path
    server: ServerProcess
    cold: dict[str, Any]
    reset_cold: dict[str, Any]
    engine: EngineProcess

    def models(self) -> list[dict[str, Any]]:
        """What ``inspect --models`` says of each, the first one first."""
        text = self.server.run("inspect", str(self.server.data_dir), "--json", "--models")
        return list(json.loads(text)["models"])

    def fingerprint(self) -> str:
        """Of the model as it was first stored."""
        return str(self.models()[0]["fingerprint"])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The prompts computed cold by the unchanged model, and stored durably."""
    folder = tmp_path_factory.mktemp("identity")
    model = make_llama(folder / "llama", seed=5)
    set_rope(model, LONGROPE)
    starter = Starter(model, folder)
    try:
        server = starter.server(folder / "data")
        engine = starter.engine(server, env=OWN_IDS).wait_ready()
        warm_up(engine)
        cold, reset_cold = (ask(engine, prompt) for prompt in (PROMPT, RESET_PROMPT))
        assert cold["cached_tokens"] == reset_cold["cached_tokens"] == 0
        assert engine.call("reset_prefix_cache")
        assert ask(engine, PROMPT)["cached_tokens"] == CACHED
        server.flush()
        yield World(starter, model, server, cold, reset_cold, engine)
    finally:
        starter.kill_all()


def set_rope(model: Path, rope: dict[str, Any]) -> None:
    """Write another RoPE into the model's config."""
    path = model / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "rope_parameters": rope}, indent=2))


@contextmanager
def kept(path: Path) -> Iterator[Path]:
    """A file that has its old bytes again afterwards, in the same place."""
    content = path.read_bytes()
    try:
        yield path
    finally:
        path.write_bytes(content)


@contextmanager
def other_factor(world: World) -> Iterator[dict[str, Any]]:
    """The scaling's factors are 8 instead of 4."""
    with kept(world.model / "config.json"):
        set_rope(world.model, {**LONGROPE, "long_factor": [8.0] * 32})
        yield {}


@contextmanager
def other_weights(world: World) -> Iterator[dict[str, Any]]:
    """Other weights in the same file: names, sizes and header are as before."""
    with kept(world.model / "model.safetensors") as path:
        size = path.stat().st_size
        other = make_llama(world.model.parent / "other", seed=6) / path.name
        assert other.stat().st_size == size
        path.write_bytes(other.read_bytes())
        yield {}


@contextmanager
def other_length(world: World) -> Iterator[dict[str, Any]]:
    """A context so short that the short factors apply."""
    yield {"max_model_len": 2048}


def test_reset_makes_the_cache_private(world: World) -> None:
    """After a reset of the connector nothing from before is found, what comes after it is;
    a reset while a request runs either preempts it or ends all caching until the next.

    The engine of the module's last test is a start after that: it hits what is shared.
    """
    engine = world.engine

    def hits(tokens: int) -> None:
        result = ask(engine, RESET_PROMPT)
        assert result["cached_tokens"] == tokens
        assert_same(result, world.reset_cold)

    assert engine.call("reset_prefix_cache")
    hits(CACHED)
    assert engine.call("reset_all")
    hits(0)
    assert engine.call("reset_prefix_cache")
    hits(CACHED)
    running = {"id": "r", "prompt": RESET_PROMPT, "max_tokens": 8, "start": 0}
    for preempted in (False, True):
        assert engine.call("reset_prefix_cache")
        # From the cache it takes some steps to load; then it decodes.
        found = engine.call("drive", requests=[running], reset_at=6, reset_running=preempted)
        assert found["reset"] is preempted
        assert found["results"]["r"]["tokens"] == world.reset_cold["tokens"]
        for _ in range(2):
            assert engine.call("reset_prefix_cache")
            hits(CACHED if preempted else 0)
    assert set(engine.call("held").values()) == {0}
    engine.kill()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (other_factor, "config.rope_parameters.long_factor[0]"),
        (other_weights, "weights.digest"),
        (other_length, "max_model_len"),
    ],
)
def test_changed_model_is_cold_and_right(
    world: World, change: Callable[[World], Any], field: str
) -> None:
    """Nothing of the other model is used, the tokens are its own, and inspect names the field."""
    with change(world) as options:
        engine = world.starter.engine(world.server, **options).wait_ready()
        warm_up(engine)
        result = ask(engine, PROMPT)
        assert result["cached_tokens"] == 0
        assert_same(result, ask_uncached(engine, PROMPT))
        # It matters: what was stored first would have said something else.
        assert result["tokens"] != world.cold["tokens"]
        assert engine.call("reset_prefix_cache")
        assert ask(engine, PROMPT)["cached_tokens"] == CACHED
        engine.kill()
    first, *_, last = world.models()
    assert last["name"] == first["name"] == str(world.model)
    assert last["differs_from"]["fingerprint"] == first["fingerprint"]
    assert field in last["differs_from"]["fields"]
    assert {name.partition("[")[0] for name in last["differs_from"]["fields"]} == {
        field.partition("[")[0]
    }


def test_back_again_hits_all_and_survives_bad_bytes(world: World) -> None:
    """The old model hits in full, whatever memory and batches it has now; and a bit that
    flips on disk costs its chunk, not the tokens.
    """
    engine = world.starter.engine(
        world.server,
        max_num_batched_tokens=768,
        max_num_seqs=3,
        num_gpu_blocks_override=24,
        seed=7,
        env={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_LOGGING_LEVEL": "WARNING",
        },
    ).wait_ready()
    warm_up(engine)
    for prompt, cold in ((PROMPT, world.cold), (RESET_PROMPT, world.reset_cold)):
        back = ask(engine, prompt)
        assert back["cached_tokens"] == CACHED
        assert_same(back, cold)
    ask(engine, BEACON)
    world.server.flush()
    world.server.kill()
    key = bytes.fromhex(world.fingerprint()) + chunk_hashes()[1]
    alter_chunk(world.server.data_dir, key)
    world.server = world.starter.server(world.server.data_dir)
    wait_for_server(engine)
    result = ask(engine, PROMPT)
    assert result["cached_tokens"] == CHUNK
    assert_same(result, world.cold)
    assert world.server.inspect()["server"]["counters"]["corrupt_chunks"] == 1
    # It was dropped, computed and stored again.
    assert engine.call("reset_prefix_cache")
    again = ask(engine, PROMPT)
    assert again["cached_tokens"] == CACHED
    assert_same(again, world.cold)
    world.server.flush()
    world.server.run("verify", str(world.server.data_dir))


def chunk_hashes() -> list[ChunkHash]:
    """The prompt's."""
    hashes: list[ChunkHash] = []
    ChunkHasher(CHUNK).extend(hashes, PROMPT)
    return hashes


def wait_for_server(engine: EngineProcess) -> None:
    """Return when the engine's client has found the new server: another prompt hits.

    The prompt itself must not be asked for: computed and stored once more, it would be
    served from memory.
    """
    deadline = time.monotonic() + RESUME_TIMEOUT_S
    while True:
        assert engine.call("reset_prefix_cache")
        result = ask(engine, BEACON)
        assert result["finish_reason"] == "length"
        if result["cached_tokens"] == CHUNK:
            return
        assert time.monotonic() < deadline
