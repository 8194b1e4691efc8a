"""What the demo does before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_persist.demo import run
from lmcache_persist.demo.engine import EngineFailed, EngineProcess
from lmcache_persist.demo.model import VOCABULARY, make_prompt
from lmcache_persist.demo.run import Outcome, Run, _summary
from lmcache_persist.errors import ConfigError


@pytest.mark.parametrize("block_size", [0, -32, 100])
def test_block_size_that_no_engine_takes_is_refused(block_size: int) -> None:
    """Refused by name before a model is made."""
    with pytest.raises(ConfigError, match="--block-size"):
        run(block_size=block_size)


def test_model_that_is_not_there_is_refused() -> None:
    """With the ones that are; and a block size that the model would not take."""
    with pytest.raises(ConfigError, match="expected one of llama, hybrid") as caught:
        run(model="hybird")
    assert caught.value.hint == "try hybrid"
    with pytest.raises(ConfigError, match="expected none with --model hybrid"):
        run(model="hybrid", block_size=640)


def test_prompts_are_reproducible() -> None:
    """The same seed gives the same prompt, a shorter one is a prefix, another seed is another."""
    prompt = make_prompt(1500, seed=3)
    assert prompt == make_prompt(1500, seed=3)
    assert prompt[:544] == make_prompt(544, seed=3)
    assert prompt[:544] != make_prompt(544, seed=4)
    assert all(2 < token < VOCABULARY for token in prompt)


@pytest.mark.parametrize(
    ("cold_cached", "warm_cached", "warm_tokens", "good"),
    [
        (0, 1088, [1, 2], True),
        (0, 0, [1, 2], False),
        (544, 1088, [1, 2], False),
        (0, 1088, [1, 3], False),
    ],
)
def test_demo_is_good_only_if_it_restored_the_right_thing(
    cold_cached: int, warm_cached: int, warm_tokens: list[int], good: bool
) -> None:
    """Cold is cold, warm is warm, and the tokens are those of an engine without a cache."""
    plain = Run([1, 2], 0, 0.1, {})
    cold = Run([1, 2], cold_cached, 0.1, {})
    warm = Run(warm_tokens, warm_cached, 0.1, {"load_disk_chunks": 2})
    outcome = Outcome(544, 1500, plain, cold, warm, {})
    assert outcome.good is good
    assert (_summary(outcome).startswith("After the kill 1088 tokens, 2 chunks of 544,")) is good
    assert (plain.tier, warm.tier) == ("-", "disk")


def test_engine_that_ends_is_reported_with_its_output(tmp_path: Path) -> None:
    """The error has the end of the engine's output, and the process group is gone."""
    (tmp_path / "dying_child.py").write_text("print('this is why'); raise SystemExit(3)")
    engine = EngineProcess(
        tmp_path, tmp_path / "log", child="dying_child", env={"PYTHONPATH": str(tmp_path)}
    )
    with engine, pytest.raises(EngineFailed, match="this is why"):
        engine.wait_ready(60)
