"""Gemma 3: five groups with a window of 512 tokens and a full one, chunks of 256."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcache_persist.demo.engine import EngineProcess
from lmcache_persist.demo.model import make_gemma, make_prompt
from lmcache_persist.demo.server import ServerProcess
from support.engines import (
    Starter,
    Stored,
    ask,
    ask_uncached,
    assert_right,
    assert_same,
    check_failed_load,
    warm_up,
)

WINDOW = 512
PROMPTS = {
    # tokens: (prompt, cached tokens once it is stored)
    1500: (make_prompt(1500, seed=71), 1280),
    1280: (make_prompt(1280, seed=72), 1024),
    1281: (make_prompt(1281, seed=73), 1280),
    700: (make_prompt(700, seed=74), 512),
    256: (make_prompt(256, seed=75), 0),
}
LONG = PROMPTS[1500][0]
OPTIONS: dict[str, Any] = {"block_size": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3."""
    return make_gemma(tmp_path_factory.mktemp("model") / "gemma", seed=1)


def test_windows_are_restored_after_everything_was_killed(stored: Stored, start: Starter) -> None:
    """From disk, by a new server and a new engine; of the windows no more than is needed."""
    check_what_was_stored(stored)
    server = start.server(stored.data_dir)
    engine = start.engine(server, **OPTIONS).wait_ready()
    warm_up(engine)
    check_only_the_window_is_read(server, engine, stored)
    for tokens, (prompt, cached_tokens) in PROMPTS.items():
        assert engine.call("reset_prefix_cache")
        result = ask(engine, prompt)
        assert (tokens, result["cached_tokens"]) == (tokens, cached_tokens)
        assert_same(result, stored.expected[tokens])
    check_blank_groups(engine, stored)
    check_failed_load(engine, LONG, 1280, stored.expected[1500])
    check_prefixes(engine, stored)
    check_own_prefix_cache(engine)
    assert server.inspect()["server"]["leased_bytes"] == 0


def check_what_was_stored(stored: Stored) -> None:
    """Every complete chunk of every group: a later prefix may need it."""
    assert stored.found["binding"]["chunk_size"] == 256
    (found,) = stored.found["models"]
    groups = [(one["kind"], one["window"]) for one in found["groups"]]
    assert sorted(groups) == [("full", 0)] + [("sliding", WINDOW)] * 5
    assert found["objects"] == 6 * (5 + 5 + 5 + 2 + 1)


def check_only_the_window_is_read(
    server: ServerProcess, engine: EngineProcess, stored: Stored
) -> None:
    """1280 tokens take five chunks of the full group, and two of each sliding one."""
    result = ask(engine, LONG)
    assert result["cached_tokens"] == 1280
    assert_same(result, stored.expected[1500])
    found = server.inspect()
    (model,) = found["models"]
    object_bytes = model["bytes"] // model["objects"]
    read_objects = 5 + 5 * 2
    assert found["server"]["counters"]["disk_read_bytes"] == read_objects * object_bytes
    assert engine.call("counters")["load_disk_chunks"] == 5


def check_blank_groups(engine: EngineProcess, stored: Stored) -> None:
    """These tests can fail: with zeros for the windows, or for the rest, they do."""
    for kind in ("sliding", "full"):
        assert engine.call("reset_prefix_cache")
        engine.call("blank_loads", groups=engine.call("groups_of_kind", kind=kind))
        wrong = ask(engine, PROMPTS[1281][0])
        assert wrong["cached_tokens"] == 1280
        with pytest.raises(AssertionError):
            assert_same(wrong, stored.expected[1281])
    engine.call("blank_loads", groups=[])


def check_prefixes(engine: EngineProcess, stored: Stored) -> None:
    """Every chunk was stored, so a hit ends at any of them."""
    assert_right(engine, LONG[:1000], 768)
    assert_right(engine, LONG[:256] + make_prompt(500, seed=81), 256)
    assert_right(engine, make_prompt(1, seed=82) + LONG[1:], 0)
    turn = LONG + stored.expected[1500]["tokens"] + make_prompt(600, seed=83)
    assert_right(engine, turn, 1280)
    assert_right(engine, turn + make_prompt(10, seed=84), 2048)


def check_own_prefix_cache(engine: EngineProcess) -> None:
    """VLLM's own hit ends inside a chunk, or beyond ours: nothing is loaded over it."""
    expected = ask_uncached(engine, LONG)
    assert engine.call("reset_prefix_cache")
    block = 128
    # Of 400 tokens it comes to hold three blocks: a chunk and a half.
    assert ask(engine, LONG[:400])["cached_tokens"] == 256
    loaded = engine.call("counters")["load_tokens"]
    result = ask(engine, LONG)
    assert result["cached_tokens"] == 1280
    assert engine.call("counters")["load_tokens"] == loaded + 1280 - 3 * block
    assert_same(result, expected)
    result = ask(engine, LONG)
    assert result["cached_tokens"] == 11 * block
    assert engine.call("counters")["load_tokens"] == loaded + 1280 - 3 * block
    assert_same(result, expected)


def test_chunks_longer_than_the_window(start: Starter, tmp_path: Path) -> None:
    """In chunks of 1024 computed in short steps the engine has dropped what the window passed;
    the rest of the chunk is stored, and is all that a prefix needs.
    """
    server = start.server(tmp_path / "data")
    engine = start.engine(
        server,
        **OPTIONS,
        max_num_batched_tokens=600,
        settings={"persist.base_chunk_size": 1024},
    ).wait_ready()
    prompt = make_prompt(2100, seed=85)
    cold = ask(engine, prompt)
    assert cold["cached_tokens"] == 0
    assert server.inspect()["binding"]["chunk_size"] == 1024
    assert_right(engine, prompt, 2048)
    assert_right(engine, prompt[:1100], 1024)
