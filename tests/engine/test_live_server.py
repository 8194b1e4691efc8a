"""Block size 32: what a live engine makes of a server that comes and goes, or refuses."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lmcache_persist.demo.engine import EngineFailed, EngineProcess
from lmcache_persist.demo.model import make_prompt
from lmcache_persist.demo.server import ServerProcess
from support.engines import OWN_PROCESS, Starter, ask, ask_uncached, assert_same, warm_up

PROMPTS = [
    # (prompt, cached tokens once it is stored)
    (make_prompt(1500, seed=31), 1280),
    (make_prompt(512, seed=32), 256),
    (make_prompt(513, seed=33), 512),
]
RESUME_TIMEOUT_S = 60.0


def test_server_restarts_beside_a_live_engine(
    start: Starter, small_mount: Path, tmp_path: Path
) -> None:
    """Hits resume although two pools do not fit the mount; no request fails meanwhile."""
    flags = ("--pool-dir", str(small_mount), "--pool-size", "60MiB")
    server = start.server(tmp_path / "data", *flags)
    engine = start.engine(server, block_size=32).wait_ready()
    warm_up(engine)
    cold = [ask(engine, prompt) for prompt, _ in PROMPTS]
    assert [result["cached_tokens"] for result in cold] == [0, 0, 0]
    check_decode_is_not_stored(engine)
    server.flush()
    assert server.inspect()["binding"]["chunk_size"] == 256
    server.kill()
    engine.kill()

    server = start.server(tmp_path / "data", *flags)
    engine = start.engine(server, block_size=32).wait_ready()
    warm_up(engine)
    for (prompt, cached_tokens), expected in zip(PROMPTS, cold, strict=True):
        result = ask(engine, prompt)
        assert result["cached_tokens"] == cached_tokens
        assert_same(result, expected)
    check_metrics(engine, server)
    assert engine.call("reset_prefix_cache")
    assert_same(ask_uncached(engine, PROMPTS[0][0]), cold[0])

    server.kill()
    down = ask(engine, make_prompt(700, seed=34))
    assert down["cached_tokens"] == 0
    assert down["finish_reason"] == "length"
    server = start.server(tmp_path / "data", *flags, "--chunk-size", "256")
    wait_for_hit(engine, PROMPTS[0][0], 1280)
    check_refusal(start, server, engine)


def check_metrics(engine: EngineProcess, server: ServerProcess) -> None:
    """VLLM's own metrics and the server's agree on what was asked, found and loaded."""
    shown = engine.call("metrics")
    asked = sum(len(prompt) for prompt, _ in PROMPTS)
    found = sum(tokens for _, tokens in PROMPTS)
    assert shown["vllm:persist_lookups"] == len(PROMPTS)
    assert shown["vllm:persist_lookup_tokens"] == asked
    assert shown["vllm:persist_hit_tokens"] == shown["vllm:persist_loaded_tokens"] == found
    assert shown["vllm:persist_loads"] == len(PROMPTS)
    assert shown["vllm:persist_breaker_open"] == 0
    counters = server.inspect()["server"]["counters"]
    for name in ("lookups", "lookup_tokens", "hit_tokens", "loaded_tokens", "loads"):
        assert counters[name] == shown["vllm:persist_" + name], name
    assert counters["loaded_bytes"] == shown["vllm:persist_loaded_bytes"] > 0


def check_decode_is_not_stored(engine: EngineProcess) -> None:
    """Sampled output does not grow the store, unless it was asked for."""
    prompt = make_prompt(250, seed=35)
    before = engine.call("counters").get("chunks_offered", 0)
    results = engine.generate([prompt] * 4, 20, temperature=1.0)
    assert all(len(result["tokens"]) == 20 for result in results)
    assert engine.call("counters")["chunks_offered"] == before


def wait_for_hit(engine: EngineProcess, prompt: list[int], cached_tokens: int) -> None:
    """Ask until the client has found the new server and the prompt hits again."""
    deadline = time.monotonic() + RESUME_TIMEOUT_S
    while True:
        assert engine.call("reset_prefix_cache")
        result = ask(engine, prompt)
        assert result["finish_reason"] == "length"
        if result["cached_tokens"] == cached_tokens:
            return
        assert result["cached_tokens"] == 0
        assert time.monotonic() < deadline


def check_refusal(start: Starter, server: ServerProcess, served: EngineProcess) -> None:
    """A fixed 256 and an engine of 544: the engine stops with a message that helps; the
    server lives, serves the compatible engine, and records the rejection.
    """
    refused = start.engine(server, block_size=544, env=OWN_PROCESS)
    begin = time.monotonic()
    with pytest.raises(EngineFailed):
        refused.wait_ready(120)
    refused.wait_ended(30)
    print(f"engine stopped after {time.monotonic() - begin:.1f} s")
    log = refused.log.read_text(errors="replace")
    message = next(line for line in log.splitlines() if "bound to a chunk size of 256" in line)
    for word in ("544", "group 0", "data dir of its own"):
        assert word in message
    wait_for_hit(served, PROMPTS[1][0], 256)
    (rejection,) = server.inspect()["rejections"]
    assert rejection["reason"] == "incompatible_alignment"
    assert "544" in rejection["detail"]
