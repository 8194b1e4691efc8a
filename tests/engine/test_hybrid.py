"""Qwen3-Next: three groups of states and a full one, a chunk size of 640 that nobody typed in.

In bfloat16, where this geometry is 640; a warm run cuts its prompt into the same steps as
the cold one, so no near tie is decided otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmcache_persist.demo.engine import EngineProcess
from lmcache_persist.demo.model import make_hybrid, make_prompt
from support.engines import (
    IN_PROCESS,
    OWN_PROCESS,
    Starter,
    ask,
    ask_uncached,
    assert_same,
    warm_up,
)

OPTIONS: dict[str, Any] = {"block_size": None, "dtype": "bfloat16"}
PROMPTS = {
    # tokens: (prompt, cached tokens once it is stored)
    1500: (make_prompt(1500, seed=51), 1280),
    1280: (make_prompt(1280, seed=52), 640),
    1281: (make_prompt(1281, seed=53), 1280),
    639: (make_prompt(639, seed=54), 0),
}
LONG = PROMPTS[1500][0]


@pytest.fixture(scope="module")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-Next."""
    return make_hybrid(tmp_path_factory.mktemp("model") / "hybrid", seed=1)


@pytest.fixture
def start(hybrid_model: Path, tmp_path: Path) -> Iterator[Starter]:
    """The starter of one test, with the hybrid model."""
    starter = Starter(hybrid_model, tmp_path)
    try:
        yield starter
    finally:
        starter.kill_all()


@dataclass(frozen=True)
class Stored:
    """A data dir whose server and engine were killed, and what plain vLLM says."""

    data_dir: Path
    expected: dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def stored(hybrid_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    """All prompts run cold by an engine with the cache, flushed; everything SIGKILLed."""
    folder = tmp_path_factory.mktemp("hybrid")
    starter = Starter(hybrid_model, folder)
    try:
        server = starter.server(folder / "data")
        engine = starter.engine(server, **OPTIONS)
        plain = starter.engine(None, **OPTIONS)
        engine.wait_ready()
        plain.wait_ready()
        expected = {tokens: ask(plain, prompt) for tokens, (prompt, _) in PROMPTS.items()}
        plain.kill()
        for tokens, (prompt, _) in PROMPTS.items():
            result = ask(engine, prompt)
            assert (tokens, result["cached_tokens"]) == (tokens, 0)
            assert_same(result, expected[tokens])
        server.flush()
        found = server.inspect()
        assert found["binding"]["chunk_size"] == 640
        groups = [(one["kind"], one["tokens_per_block"]) for one in found["models"][0]["groups"]]
        assert sorted(groups) == [("full", 640)] + [("recurrent", 640)] * 3
        server.kill()
        engine.kill()
        yield Stored(folder / "data", expected)
    finally:
        starter.kill_all()


def test_states_are_restored_after_everything_was_killed(stored: Stored, start: Starter) -> None:
    """From disk, by a new server and a new engine: the 640 case, and what a state is worth."""
    server = start.server(stored.data_dir)
    engine = start.engine(server, **OPTIONS).wait_ready()
    warm_up(engine)
    for tokens, (prompt, cached_tokens) in PROMPTS.items():
        result = ask(engine, prompt)
        assert (tokens, result["cached_tokens"]) == (tokens, cached_tokens)
        assert_same(result, stored.expected[tokens])
    assert engine.call("counters")["load_disk_chunks"] == 5
    check_blank_states(engine, stored)
    check_prefixes(engine)
    check_own_prefix_cache(engine)
    check_follow_up(engine, stored)
    assert server.inspect()["server"]["leased_bytes"] == 0


def check_blank_states(engine: EngineProcess, stored: Stored) -> None:
    """These tests can fail: with zeros for states, one token after the prefix, they do."""
    expected = stored.expected[1281]
    assert engine.call("reset_prefix_cache")
    engine.call("blank_loads", groups=[0, 1, 2, 3])
    everything = ask(engine, PROMPTS[1281][0])
    assert engine.call("reset_prefix_cache")
    engine.call("blank_loads", groups=recurrent_groups(engine))
    states = ask(engine, PROMPTS[1281][0])
    engine.call("blank_loads", groups=[])
    for wrong in (everything, states):
        assert wrong["cached_tokens"] == 1280
        with pytest.raises(AssertionError):
            assert_same(wrong, expected)
    assert engine.call("reset_prefix_cache")
    assert_same(ask(engine, PROMPTS[1281][0]), expected)


def recurrent_groups(engine: EngineProcess) -> list[int]:
    """Indexes of the groups that keep a state."""
    groups: list[int] = engine.call("groups_of_kind", kind="recurrent")
    assert len(groups) == 3
    return groups


def check_prefixes(engine: EngineProcess) -> None:
    """A hit reaches as far back as a state was kept, and no further."""
    assert engine.call("reset_prefix_cache")
    # The long prompt went to 1280 in one step: there is no state at 640.
    branch = LONG[:640] + make_prompt(400, seed=61)
    assert_right(engine, branch, 0)
    assert_right(engine, make_prompt(1, seed=62) + LONG[1:], 0)
    # Computing the branch left one.
    assert_right(engine, LONG[:1280], 640)
    assert_right(engine, LONG[:640] + make_prompt(900, seed=63), 640)
    assert_right(engine, LONG, 1280)


def assert_right(engine: EngineProcess, prompt: list[int], cached_tokens: int) -> None:
    """A hit of so many tokens, and the tokens of the same engine that reads no cache."""
    assert engine.call("reset_prefix_cache")
    result = ask(engine, prompt)
    assert (len(prompt), result["cached_tokens"]) == (len(prompt), cached_tokens)
    assert_same(result, ask_uncached(engine, prompt))


def check_own_prefix_cache(engine: EngineProcess) -> None:
    """What vLLM holds itself is neither loaded nor counted twice."""
    expected = ask_uncached(engine, LONG)
    assert engine.call("reset_prefix_cache")
    # It holds less: 640 of its own, the rest is loaded.
    assert ask(engine, LONG[:700])["cached_tokens"] == 640
    loaded = engine.call("counters")["load_tokens"]
    result = ask(engine, LONG)
    assert result["cached_tokens"] == 1280
    assert engine.call("counters")["load_tokens"] == loaded + 640
    assert_same(result, expected)
    # It holds as much.
    result = ask(engine, LONG)
    assert result["cached_tokens"] == 1280
    assert engine.call("counters")["load_tokens"] == loaded + 640
    assert_same(result, expected)


def check_follow_up(engine: EngineProcess, stored: Stored) -> None:
    """The next turn of a conversation: prompt, answer, new text."""
    turn = LONG + stored.expected[1500]["tokens"] + make_prompt(500, seed=64)
    assert_right(engine, turn, 1280)
    # That one left a state at its own last boundary.
    assert_right(engine, turn + make_prompt(10, seed=65), 1920)


def test_short_steps_leave_more_states(stored: Stored, start: Starter) -> None:
    """With 1000 tokens a step a 1500-token prompt leaves states at 640 and 1280."""
    server = start.server(stored.data_dir)
    engine = start.engine(server, max_num_batched_tokens=1000, env=OWN_PROCESS, **OPTIONS)
    engine.wait_ready()
    prompt = make_prompt(1500, seed=66)
    assert ask(engine, prompt)["cached_tokens"] == 0
    assert_right(engine, prompt[:1280], 640)
    assert_right(engine, prompt, 1280)
    assert_right(engine, LONG, 1280)


def crowd(turn: int = 0) -> list[dict[str, Any]]:
    """Requests that share a trunk: some outgrow their blocks while they decode, some depend
    on the state that ends one token before they do.

    Ids are new at each turn: vLLM 0.32 keeps the last finished request's state index when no
    step follows, and takes it for that of another request of the same id.
    """
    trunk = make_prompt(700, seed=68)
    lengths = [640 * 2 - 3, 640 * 2 + 1, 640 * 3 - 5, 641]
    return [
        {
            "id": f"{turn}-{number}",
            "prompt": (trunk + make_prompt(1300, seed=300 + number))[: lengths[number % 4]],
            "max_tokens": 8,
            "start": number // 4,
        }
        for number in range(16)
    ]


def test_crowded_hybrid_engine(start: Starter, tmp_path: Path) -> None:
    """What preempted requests stored of their states is right, and nothing is held.

    Tokens of the crowd itself are not compared: in bfloat16, all that this backend computes
    states in, a preempted request's other steps decide near ties otherwise.
    """
    server = start.server(tmp_path / "data")
    engine = start.engine(
        server,
        num_gpu_blocks_override=26,
        max_model_len=2048,
        max_num_batched_tokens=1000,
        env={**IN_PROCESS, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"},
        **OPTIONS,
    ).wait_ready()
    for turn in range(2):
        found = engine.call("drive", requests=crowd(turn))
        assert len(found["results"]) == 16
        assert found["preemptions"] > 0
        assert engine.call("reset_prefix_cache")
        assert set(engine.call("held").values()) == {0}
    for one in crowd():
        prompt = one["prompt"]
        assert_right(engine, prompt, (len(prompt) - 1) // 640 * 640)
    assert server.inspect()["server"]["leased_bytes"] == 0
