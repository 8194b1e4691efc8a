"""Adapters on a real engine: each is a world of its own, by the content of its files (B4)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lmcache_persist.demo.engine import EngineProcess
from lmcache_persist.demo.model import make_prompt
from support.engines import Starter, ask, assert_same, warm_up

PROMPT = make_prompt(1281, seed=51)
CHUNK, CACHED = 640, 1280
LAYERS, HIDDEN, RANK = 4, 256, 8
OUTPUTS = {"q_proj": 256, "k_proj": 128, "v_proj": 128}
ENGINE = {"block_size": CHUNK, "enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}


def write_adapter(folder: Path, seed: int) -> Path:
    """An adapter of the tiny Llama that changes its KV, and with it what it says."""
    folder.mkdir(exist_ok=True)
    source = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module, outputs in OUTPUTS.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=source)
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, RANK, generator=source) * 0.1
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "bias": "none",
        "target_modules": list(OUTPUTS),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def ask_again(engine: EngineProcess, **request: Any) -> dict[str, Any]:
    """Without what the engine itself holds."""
    assert engine.call("reset_prefix_cache")
    return ask(engine, PROMPT, **request)


def test_adapters_are_worlds_of_their_own(start: Starter, tmp_path: Path) -> None:
    """Base, two adapters, new weights under an old name: 0 hits, the right tokens, and each
    hits what it stored itself, also after everything was restarted.
    """
    first, second = write_adapter(tmp_path / "a", 1), write_adapter(tmp_path / "b", 2)
    adapters = {"a": ["a", 1, str(first)], "b": ["b", 2, str(second)]}
    server = start.server(tmp_path / "data")
    engine = start.engine(server, **ENGINE).wait_ready()
    warm_up(engine)
    base = ask(engine, PROMPT)
    cold = {name: ask_again(engine, lora=lora) for name, lora in adapters.items()}
    for result in (base, *cold.values()):
        assert result["cached_tokens"] == 0
    assert len({tuple(one["tokens"]) for one in (base, *cold.values())}) == 3
    warm = ask_again(engine, lora=adapters["a"])
    assert warm["cached_tokens"] == CACHED
    assert_same(warm, cold["a"])

    # Overwritten in place: the engine still computes with what it loaded, which nobody can tell.
    write_adapter(first, 3)
    stale = ask_again(engine, lora=adapters["a"])
    assert stale["cached_tokens"] == 0
    assert_same(stale, cold["a"])
    assert engine.call("counters")["requests_not_cached_lora"] == 1
    server.flush()
    engine.kill()

    engine = start.engine(server, **ENGINE).wait_ready()
    warm_up(engine)
    other = ask(engine, PROMPT, lora=adapters["a"])
    assert other["cached_tokens"] == 0
    assert other["tokens"] != cold["a"]["tokens"]
    warm = ask_again(engine, lora=adapters["a"])
    assert warm["cached_tokens"] == CACHED
    assert_same(warm, other)
    for lora, expected in ((adapters["b"], cold["b"]), (None, base)):
        warm = ask_again(engine, lora=lora)
        assert warm["cached_tokens"] == CACHED
        assert_same(warm, expected)
