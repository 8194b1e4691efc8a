"""What an engine does to its requests, and what happens to the server beside it.

Whatever it is: the tokens of the same engine without a cache, and nothing is held afterwards.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_persist.demo.engine import EngineFailed, EngineProcess
from lmcache_persist.demo.model import make_prompt
from lmcache_persist.demo.server import ServerProcess
from support.crowds import assert_nothing_is_held, check_aborts
from support.engines import (
    IN_PROCESS,
    TWO_RANKS,
    Starter,
    ask,
    ask_uncached,
    assert_same,
    warm_up,
)
from support.waiting import wait_until

SMALL: dict[str, Any] = {
    # 99 blocks of 32 tokens: a fraction of what 64 requests want at the same time.
    "block_size": 32,
    "num_gpu_blocks_override": 100,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 64,
}
OWN_IDS = {**IN_PROCESS, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}
NEW_TOKENS = 24
SEED = 20261130
HANG_S = 60.0
"""Seconds. What is printed is the delay; this only tells a hang from a slow machine."""


def crowd() -> list[dict[str, Any]]:
    """64 requests that share prefixes of 256, 512 and 300 tokens, eight at each start."""
    rng = random.Random(SEED)
    trunks = [make_prompt(length, seed=length) for length in (256, 512, 300)]
    return [
        {
            "id": f"r{number}",
            "prompt": trunks[number % 3] + make_prompt(rng.randrange(20, 250), seed=1000 + number),
            "max_tokens": NEW_TOKENS,
            "start": number // 8 * 3,
        }
        for number in range(64)
    ]


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Every request that was not aborted says what it says without a cache."""
    wrong = [
        name
        for name, result in found["results"].items()
        if result["tokens"] != expected["results"][name]["tokens"]
    ]
    assert wrong == []
    assert {one["finish_reason"] for one in found["results"].values()} == {"length"}


def test_crowded_engine(start: Starter, tmp_path: Path) -> None:
    """Preemption, chunked prefill, 64 requests at once, aborts in every state, ids used again."""
    print(f"seed {SEED}")
    server = start.server(tmp_path / "data")
    plain = start.engine(None, env=OWN_IDS, **SMALL).wait_ready()
    requests = crowd()
    expected = plain.call("drive", requests=requests)
    assert expected["preemptions"] > 0
    plain.kill()
    engine = start.engine(server, env=OWN_IDS, **SMALL).wait_ready()
    warm_up(engine)
    for _ in range(2):
        # Cold and with shared prefixes, then with everything in the pool.
        found = engine.call("drive", requests=requests)
        assert len(found["results"]) == 64
        assert found["preemptions"] > 0
        compare(found, expected)
        assert_nothing_is_held(engine, server)
    check_counts(engine, server, 2 * requests)
    # Most of what is shared vLLM holds itself.
    assert engine.call("counters")["loads"] >= 8
    check_aborts(engine, requests, lambda _, found: compare(found, expected))
    assert_nothing_is_held(engine, server)
    check_ids_used_again(engine, server, requests, expected)
    assert not [name for name in engine.call("counters") if name.startswith("failed")]


def check_counts(
    engine: EngineProcess, server: ServerProcess, requests: list[dict[str, Any]]
) -> None:
    """Every prompt counts once, those that were preempted and looked up again too."""
    counts = engine.call("counters")
    shown = server.inspect()["server"]["counters"]
    for found in (counts, shown):
        assert found["lookups"] == len(requests)
        assert found["lookup_tokens"] == sum(len(one["prompt"]) for one in requests)
        assert found["lookups_repeated"] > 0
        assert 0 < found["hit_tokens"] <= found["lookup_tokens"]
    assert shown["loaded_tokens"] == counts["loaded_tokens"] > 0


def check_ids_used_again(
    engine: EngineProcess,
    server: ServerProcess,
    requests: list[dict[str, Any]],
    expected: dict[str, Any],
) -> None:
    """An id that was aborted while loading is used by another prompt at once."""
    for step in range(1, 8):
        assert engine.call("reset_prefix_cache")
        first = {**requests[1], "start": 0, "abort": step}
        second = {**requests[2], "id": first["id"], "start": step}
        found = engine.call("drive", requests=[first, second])
        result = found["results"][first["id"]]
        assert result["tokens"] == expected["results"]["r2"]["tokens"]
    assert_nothing_is_held(engine, server)


def test_speculation(start: Starter, tmp_path: Path) -> None:
    """N-grams: what is stored of decoded tokens holds no rejected draft."""
    server = start.server(tmp_path / "data")
    engine = start.engine(
        server,
        block_size=32,
        env=OWN_IDS,
        settings={"persist.cache_decode": True},
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
    ).wait_ready()
    phrase, decoded = make_prompt(12, seed=91), 40
    for length in (230, 250, 500):
        prompt = (make_prompt(1, seed=length) + phrase * 60)[:length]
        one = {"id": str(length), "prompt": prompt, "max_tokens": decoded, "start": 0}
        found = engine.call("drive", requests=[one])
        cold = found["results"][str(length)]
        assert cold["cached_tokens"] == 0
        print(f"{decoded} tokens in {found['steps']} steps")
        turn = prompt + cold["tokens"] + make_prompt(10, seed=length)
        assert engine.call("reset_prefix_cache")
        warm = ask(engine, turn)
        # All but the last sampled token have been computed.
        assert warm["cached_tokens"] == (length + decoded - 1) // 256 * 256
        assert_same(warm, ask_uncached(engine, turn))
    assert_nothing_is_held(engine, server)


def test_rank_that_cannot_load(start: Starter, tmp_path: Path) -> None:
    """One of two ranks fails a load: both compute, the request goes on, the next one hits."""
    server = start.server(tmp_path / "data")
    engine = start.engine(
        server,
        block_size=32,
        tensor_parallel_size=2,
        env=TWO_RANKS,
    ).wait_ready()
    prompt = make_prompt(1500, seed=111)
    cold = ask(engine, prompt)
    assert cold["cached_tokens"] == 0
    for broken, cached_tokens in ((False, 1280), (True, 0), (False, 1280)):
        engine.call("break_loads_of_rank", rank=1, broken=broken)
        assert engine.call("reset_prefix_cache")
        result = ask(engine, prompt)
        assert (broken, result["cached_tokens"]) == (broken, cached_tokens)
        assert_same(result, cold)
    found = server.inspect()["server"]
    assert (found["lookups_open"], found["leased_bytes"]) == (0, 0)


PROMPTS = [make_prompt(1500, seed=101), make_prompt(700, seed=102)]


class Beside:
    """An engine that is never restarted, and the servers that come and go beside it."""

    def __init__(self, start: Starter, folder: Path) -> None:
        self._start, self._folder = start, folder
        self.url = f"ipc://{folder}/s"
        self.seed = 200

    def server(self, name: str, *flags: str) -> ServerProcess:
        """A server on the one endpoint, with a data dir of that name."""
        return self._start.server(self._folder / name, "--listen", self.url, *flags)

    def computes(self, engine: EngineProcess, what: str) -> None:
        """A new prompt is computed, right and without an error; prints the time it takes."""
        self.seed += 1
        prompt = make_prompt(700, seed=self.seed)
        begin = time.monotonic()
        result = ask(engine, prompt)
        took_s = time.monotonic() - begin
        begin = time.monotonic()
        expected = ask_uncached(engine, prompt)
        print(f"{what}: {took_s:.2f} s, without a cache {time.monotonic() - begin:.2f} s")
        assert result["cached_tokens"] == 0
        assert_same(result, expected)
        assert took_s < HANG_S


def hits_resume(engine: EngineProcess, prompt: list[int], cached_tokens: int) -> None:
    """By itself, within seconds; no request fails on the way."""

    def hit() -> bool:
        assert engine.call("reset_prefix_cache")
        result = ask(engine, prompt)
        assert result["finish_reason"] == "length"
        return bool(result["cached_tokens"] == cached_tokens)

    wait_until(hit, f"{cached_tokens} tokens hit again", HANG_S)
    result = ask(engine, prompt)
    assert_same(result, ask_uncached(engine, prompt))


def test_server_that_comes_and_goes(start: Starter, tmp_path: Path) -> None:
    """Absent, killed, hung, restarted at once, on another data dir, incompatible, and back."""
    beside = Beside(start, tmp_path)
    settings = {
        "persist.server": beside.url,
        "persist.required": False,
        "persist.connect_timeout": 1.0,
        "persist.request_timeout": 1.0,
    }
    with pytest.raises(EngineFailed, match="lmcache-persist serve"):
        start.engine(
            None, block_size=32, kv_settings={**settings, "persist.required": True}
        ).wait_ready()
    engine = start.engine(None, block_size=32, kv_settings=settings).wait_ready()
    warm_up(engine)
    beside.computes(engine, "absent at start")
    server = beside.server("one")
    long = PROMPTS[0]
    hits_resume(engine, long, 1280)

    server.kill()
    beside.computes(engine, "killed")
    server = beside.server("one")
    hits_resume(engine, long, 1280)

    os.kill(server.pid, signal.SIGSTOP)
    for number in range(3):
        beside.computes(engine, f"hung, request {number}")
    os.kill(server.pid, signal.SIGCONT)
    hits_resume(engine, long, 1280)

    # Quicker than a heartbeat: the next request goes to the new one, or is a miss.
    server.kill()
    server = beside.server("one")
    hits_resume(engine, long, 1280)

    check_other_data_dirs(beside, engine, server, long)
    assert_nothing_is_held(engine, beside.server("one"))
    hits_resume(engine, long, 1280)


def check_other_data_dirs(
    beside: Beside, engine: EngineProcess, server: ServerProcess, long: list[int]
) -> None:
    """Nothing of one binding is used under another; an incompatible one leaves it cold."""
    cases: list[tuple[str, tuple[str, ...], Callable[[], None]]] = [
        ("other", (), lambda: hits_resume(engine, long, 1280)),
        ("half", ("--chunk-size", "512"), lambda: hits_resume(engine, long, 1024)),
        ("odd", ("--chunk-size", "400"), lambda: beside.computes(engine, "incompatible")),
    ]
    for name, flags, check in cases:
        server.kill()
        server = beside.server(name, *flags)
        check()
    assert server.inspect()["store"]["objects"] == 0
    server.kill()
