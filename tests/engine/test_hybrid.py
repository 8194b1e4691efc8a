"""Qwen3-Next: three groups of states and a full one, a chunk size of 640 that nobody typed in.

In bfloat16, where this geometry is 640; a warm run cuts its prompt into the same steps as
the cold one, so no near tie is decided otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcache_persist.demo.engine import EngineProcess
from lmcache_persist.demo.model import make_hybrid, make_prompt
from lmcache_persist.demo.server import ServerProcess
from support.crowds import assert_nothing_is_held, check_aborts
from support.engine_child import TOP
from support.engines import (
    IN_PROCESS,
    OWN_PROCESS,
    Starter,
    Stored,
    ask,
    ask_uncached,
    assert_right,
    assert_same,
    check_failed_load,
    differences,
    wait_registered,
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
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-Next."""
    return make_hybrid(tmp_path_factory.mktemp("model") / "hybrid", seed=1)


def test_states_are_restored_after_everything_was_killed(
    stored: Stored, start: Starter, tmp_path: Path
) -> None:
    """From disk, by a new server and a new engine: the 640 case, and what a state is worth."""
    assert stored.found["binding"]["chunk_size"] == 640
    (found,) = stored.found["models"]
    groups = [(one["kind"], one["tokens_per_block"]) for one in found["groups"]]
    assert sorted(groups) == [("full", 640)] + [("recurrent", 640)] * 3
    server = start.server(stored.data_dir)
    engine = start.engine(server, **OPTIONS).wait_ready()
    warm_up(engine)
    for tokens, (prompt, cached_tokens) in PROMPTS.items():
        result = ask(engine, prompt)
        assert (tokens, result["cached_tokens"]) == (tokens, cached_tokens)
        assert_same(result, stored.expected[tokens])
    assert engine.call("counters")["load_disk_chunks"] == 5
    check_false_states(engine, stored)
    check_failed_load(engine, LONG, 1280, stored.expected[1500])
    check_prefixes(engine, stored.expected[1500])
    check_own_prefix_cache(engine)
    check_follow_up(engine, stored)
    assert server.inspect()["server"]["leased_bytes"] == 0
    check_states_that_the_server_lost(start, engine, server, tmp_path)


def check_false_states(engine: EngineProcess, stored: Stored) -> None:
    """These tests can fail: with states that are zeros or another prompt's, at P + 1, they do."""
    expected = stored.expected[1281]
    states = engine.call("groups_of_kind", kind="recurrent")
    assert len(states) == 3
    for falsify, groups in (
        ("blank_loads", [0, 1, 2, 3]),
        ("blank_loads", states),
        ("stale_loads", states),
    ):
        engine.call(falsify, groups=groups)
        for prompt in (LONG, PROMPTS[1281][0]):
            assert engine.call("reset_prefix_cache")
            wrong = ask(engine, prompt)
            assert wrong["cached_tokens"] == 1280
        with pytest.raises(AssertionError):
            assert_same(wrong, expected)
    engine.call("blank_loads", groups=[])
    assert engine.call("reset_prefix_cache")
    assert_same(ask(engine, PROMPTS[1281][0]), expected)


def check_prefixes(engine: EngineProcess, expected: dict[str, Any]) -> None:
    """A hit reaches as far back as a state was kept, and no further."""
    # A prompt of 1500 goes to 1280 in one step: there is no state at 640.
    prompt = make_prompt(1500, seed=67)
    assert_right(engine, prompt, 0)
    short = assert_right(engine, prompt[:1280], 0)
    # Computing its first 1280 tokens alone left one.
    assert_right(engine, prompt[:1280], 640, short)
    branch = LONG[:640] + make_prompt(400, seed=61)
    assert_right(engine, branch, 0)
    assert_right(engine, make_prompt(1, seed=62) + LONG[1:], 0)
    # So did computing the branch.
    assert_right(engine, LONG[:1280], 640)
    assert_right(engine, LONG[:640] + make_prompt(900, seed=63), 640)
    assert_right(engine, LONG, 1280, expected)


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
    # It holds more of the full group than of the states, which are its hit: all is loaded.
    assert engine.call("reset_prefix_cache")
    assert ask(engine, LONG)["cached_tokens"] == 1280
    branch = LONG[:640] + make_prompt(5, seed=69)
    loaded = engine.call("counters")["load_tokens"]
    result = ask(engine, branch)
    assert result["cached_tokens"] == 640
    assert engine.call("counters")["load_tokens"] == loaded + 640
    assert_same(result, ask_uncached(engine, branch))


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


def check_states_that_the_server_lost(
    start: Starter, engine: EngineProcess, server: ServerProcess, folder: Path
) -> None:
    """What only vLLM's own prefix cache holds is stored again, its state too."""
    prompt = PROMPTS[1281][0]
    assert engine.call("reset_prefix_cache")
    expected = ask(engine, prompt)
    server.kill()
    other = start.server(folder / "other", "--listen", server.url)

    wait_registered(other)
    loaded = engine.call("counters")["load_tokens"]
    own = ask(engine, prompt)
    assert own["cached_tokens"] == 1280
    assert engine.call("counters")["load_tokens"] == loaded
    assert engine.call("reset_prefix_cache")
    result = ask(engine, prompt)
    assert result["cached_tokens"] == 1280
    assert engine.call("counters")["load_tokens"] == loaded + 1280
    for one in (own, result):
        assert_same(one, expected)


def crowd(turn: int) -> list[dict[str, Any]]:
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


TOLERANCE = 0.1
"""Of logprobs, in bfloat16. Source: measured, 0.06 at most where steps differ, else 0."""


def compare_crowd(
    engine: EngineProcess,
    requests: list[dict[str, Any]],
    found: dict[str, Any],
    alone: list[dict[str, Any]],
) -> None:
    """Each request that was not aborted says what it says alone, up to its first near tie.

    One that was preempted computes its first tokens again, as a part of its prompt, which in
    bfloat16 puts later ones off by up to 1: it says what such a longer prompt says alone.
    """
    for one, expected in zip(requests, alone, strict=True):
        if one["id"] not in found["results"]:
            continue
        result = found["results"][one["id"]]
        off = differences(result, expected)
        print(f"{one['id']} is off by " + " ".join(f"{part:.3f}" for part in off))
        right = [part < TOLERANCE for part in off]
        assert all(right) or any(
            says_the_same_from(engine, one, result, resumed)
            for resumed in range(1, right.index(False) + 1)
        )


def says_the_same_from(
    engine: EngineProcess, one: dict[str, Any], result: dict[str, Any], resumed: int
) -> bool:
    """Whether a request goes on like its prompt and its first ``resumed`` tokens, alone."""
    left = len(result["tokens"]) - resumed
    prompt = one["prompt"] + result["tokens"][:resumed]
    expected = ask_alone(engine, prompt, left)
    rest = {**result, "tokens": result["tokens"][resumed:], "top": result["top"][resumed:]}
    return max(differences(rest, expected)) < TOLERANCE


def ask_alone(engine: EngineProcess, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """From nothing, in a world of its own: what a crowd finds it has stored itself."""
    (result,) = engine.generate(
        [prompt], max_tokens, cache_salt="alone", skip_reading_prefix_cache=True, logprobs=TOP
    )
    return result


def test_crowded_hybrid_engine(start: Starter, tmp_path: Path) -> None:
    """Preempted, aborted, with prefixes that others store meanwhile: right, and nothing is held."""
    server = start.server(tmp_path / "data")
    engine = start.engine(
        server,
        num_gpu_blocks_override=26,
        max_model_len=2048,
        max_num_batched_tokens=1000,
        env={**IN_PROCESS, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"},
        **OPTIONS,
    ).wait_ready()
    alone = [ask_alone(engine, one["prompt"], one["max_tokens"]) for one in crowd(0)]
    for turn in (1, 2):
        requests = crowd(turn)
        found = engine.call("drive", requests=requests)
        assert len(found["results"]) == 16
        assert found["preemptions"] > 0
        compare_crowd(engine, requests, found, alone)
        assert_nothing_is_held(engine, server)
    check_aborts(engine, crowd(3), lambda *driven: compare_crowd(engine, *driven, alone))
    assert_nothing_is_held(engine, server)
    for one in crowd(0)[:8]:
        prompt = one["prompt"]
        assert_right(engine, prompt, (len(prompt) - 1) // 640 * 640)
    # And it would be noticed.
    for groups in (engine.call("groups_of_kind", kind="recurrent"), [0, 1, 2, 3]):
        engine.call("blank_loads", groups=groups)
        requests = crowd(4 + len(groups))
        assert engine.call("reset_prefix_cache")
        found = engine.call("drive", requests=requests)
        with pytest.raises(AssertionError):
            compare_crowd(engine, requests, found, alone)
