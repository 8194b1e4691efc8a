"""Block size 544, a number that nobody typed in: what is left after everything is killed."""

from __future__ import annotations

from typing import Any

from lmcache_persist.demo.model import make_prompt
from support.engines import (
    OWN_PROCESS,
    TWO_RANKS,
    Starter,
    Stored,
    ask,
    ask_uncached,
    assert_same,
    check_failed_load,
    wait_registered,
    warm_up,
)

PROMPTS = {
    # name: (prompt, cached tokens once it is stored)
    "1500 tokens": (make_prompt(1500, seed=11), 1088),
    "exactly two chunks": (make_prompt(1088, seed=12), 544),
    "two chunks and one token": (make_prompt(1089, seed=13), 1088),
    "two chunks less one token": (make_prompt(1087, seed=14), 544),
    "exactly a chunk": (make_prompt(544, seed=15), 0),
}
LONG = PROMPTS["1500 tokens"][0]
OPTIONS: dict[str, Any] = {}


def test_restored_from_disk_after_everything_was_killed(stored: Stored, start: Starter) -> None:
    """A new server and a new engine restore what was durable, and say the same tokens."""
    assert stored.found["binding"]["chunk_size"] == 544
    server = start.server(stored.data_dir)
    engine = start.engine(server).wait_ready()
    warm_up(engine)
    disk_chunks = 0
    for name, (prompt, cached_tokens) in PROMPTS.items():
        result = ask(engine, prompt)
        assert (name, result["cached_tokens"]) == (name, cached_tokens)
        assert_same(result, stored.expected[name])
        disk_chunks += cached_tokens // 544
        assert engine.call("counters")["load_disk_chunks"] == disk_chunks
    # No store outlives its step, so nothing holds a block.
    assert engine.call("reset_prefix_cache")
    again = ask(engine, LONG)
    assert again["cached_tokens"] == 1088
    assert engine.call("counters")["load_memory_chunks"] == 2
    check_failed_load(engine, LONG, 1088, stored.expected["1500 tokens"])
    # What is known is not offered a second time; a salt is a world of its own.
    assert server.inspect()["store"]["objects"] == 2 + 2 + 2 + 1 + 1
    salted = ask(engine, LONG, cache_salt="tenant")
    assert salted["cached_tokens"] == 0
    assert_same(salted, stored.expected["1500 tokens"])
    assert engine.call("reset_prefix_cache")
    assert ask(engine, LONG, cache_salt="tenant")["cached_tokens"] == 1088


def test_engine_core_in_its_own_process(stored: Stored, start: Starter) -> None:
    """Two engines share one server; killed with it, what one stored is restored for another."""
    server = start.server(stored.data_dir)
    first, second = (start.engine(server, env=OWN_PROCESS) for _ in range(2))
    fresh = make_prompt(1500, seed=21)
    first.wait_ready()
    second.wait_ready()
    warm_up(first)
    result = ask(first, LONG)
    assert result["cached_tokens"] == 1088
    assert_same(result, stored.expected["1500 tokens"])
    cold = ask(first, fresh)
    assert cold["cached_tokens"] == 0
    # What the first engine stored, the second one hits.
    shared = ask(second, fresh)
    assert shared["cached_tokens"] == 1088
    assert_same(shared, cold)
    server.flush()
    for one in (server, first, second):
        one.kill()
    server = start.server(stored.data_dir)
    third = start.engine(server, env=OWN_PROCESS).wait_ready()
    warm = ask(third, fresh)
    assert warm["cached_tokens"] == 1088
    assert_same(warm, cold)
    assert server.inspect()["server"]["counters"]["disk_hit_chunks"] == 2


def test_tensor_parallel_engine_has_a_cache_of_its_own(stored: Stored, start: Starter) -> None:
    """Two ranks share nothing with one, and restore both of their parts after a kill."""
    options = {"tensor_parallel_size": 2, "env": TWO_RANKS}
    server = start.server(stored.data_dir)
    engine = start.engine(server, **options).wait_ready()
    cold = ask(engine, LONG)
    assert cold["cached_tokens"] == 0
    server.flush()
    server.kill()
    engine.kill()
    server = start.server(stored.data_dir)
    engine = start.engine(server, **options).wait_ready()
    warm = ask(engine, LONG)
    assert warm["cached_tokens"] == 1088
    assert_same(warm, cold)
    # Two chunks of two ranks: as many as no other model here has.
    assert 4 in [one["objects"] for one in server.inspect()["models"]]


def test_pipeline_stages_restore_their_own_layers(stored: Stored, start: Starter) -> None:
    """Two stages share nothing with one rank; a new server has both parts, from disk."""
    server = start.server(stored.data_dir)
    engine = start.engine(server, pipeline_parallel_size=2, env=TWO_RANKS).wait_ready()
    engine.call("make_stage_buffers")
    cold = ask(engine, LONG)
    assert cold["cached_tokens"] == 0
    server.flush()
    server.kill()
    server = start.server(stored.data_dir)
    wait_registered(server)
    assert engine.call("reset_prefix_cache")
    warm = ask(engine, LONG)
    assert warm["cached_tokens"] == 1088
    for one in (cold, warm):
        assert_same(one, stored.expected["1500 tokens"])
    assert server.inspect()["server"]["counters"]["disk_hit_chunks"] == 2


def test_other_dtype_never_sees_this_one_s_bytes(stored: Stored, start: Starter) -> None:
    """Same model name, same data dir, float16 after bfloat16: cold, and right."""
    server = start.server(stored.data_dir)
    first = start.engine(server, dtype="bfloat16").wait_ready()
    assert ask(first, LONG)["cached_tokens"] == 0
    assert first.call("reset_prefix_cache")
    assert ask(first, LONG)["cached_tokens"] == 1088
    first.kill()
    second = start.engine(server, dtype="float16").wait_ready()
    result = ask(second, LONG)
    assert result["cached_tokens"] == 0
    assert_same(result, ask_uncached(second, LONG))
    assert len({one["fingerprint"] for one in server.inspect()["models"]}) >= 3
