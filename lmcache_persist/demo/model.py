"""Tiny models with random weights for which wrong KV changes the tokens.

Large random weights (``initializer_range`` 0.12 instead of 0.02) give peaked attention and
logits with a margin: what a model reads from its KV decides what it says. Dummy weights
give flat logits, and a test on those cannot fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 1000
"""Tokens of a tiny model's vocabulary."""

MAX_TOKENS = 4096
"""Tokens, the longest sequence of a tiny model."""

INITIALIZER_RANGE = 0.12
"""Standard deviation of the weights.

Source: measured; at 0.02 a zeroed KV leaves the greedy tokens as they are.
"""


def make_llama(directory: Path, *, seed: int = 0, layers: int = 4) -> Path:
    """Write a Llama of about 4 million parameters; the same seed gives the same bytes.

    Args:
        directory: is created; gets ``config.json`` and ``model.safetensors``.
        seed: of the weights.
        layers: number of layers.

    Returns:
        ``directory``.
    """
    return _make("Llama", directory, seed, num_hidden_layers=layers)


def make_hybrid(directory: Path, *, seed: int = 0) -> Path:
    """Write a Qwen3-Next of four layers: three of linear attention, one of full attention.

    With prefix caching and bfloat16 its groups are three recurrent ones and a full one of
    640 tokens a block: a size that nobody would have typed in.

    Args:
        directory: as for :func:`make_llama`.
        seed: of the weights.

    Returns:
        ``directory``.
    """
    return _make(
        "Qwen3Next",
        directory,
        seed,
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_key_head_dim=128,
        linear_num_value_heads=4,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    )


def make_gemma(directory: Path, *, seed: int = 0) -> Path:
    """Write a Gemma 3 of five layers with a window of 512 tokens and one of full attention.

    Args:
        directory: as for :func:`make_llama`.
        seed: of the weights.

    Returns:
        ``directory``.
    """
    return _make(
        "Gemma3",
        directory,
        seed,
        config="Gemma3Text",
        head_std=0.3,
        num_hidden_layers=6,
        query_pre_attn_scalar=64,
        sliding_window=512,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )


_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": INITIALIZER_RANGE,
    # Tied ones make a model echo its last token, whatever is in its KV.
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _make(
    family: str,
    directory: Path,
    seed: int,
    *,
    config: str = "",
    head_std: float | None = None,
    **changes: Any,
) -> Path:
    """Random weights of ``seed``; ``head_std`` makes the output layer's logits differ more."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind = getattr(transformers, f"{family}ForCausalLM")
    made = getattr(transformers, f"{config or family}Config")(**{**_COMMON, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(made)
        if head_std is not None:
            torch.nn.init.normal_(model.lm_head.weight, std=head_std)
        model = model.to(torch.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    return directory


def make_prompt(num_tokens: int, *, seed: int = 0) -> list[int]:
    """Token ids of a prompt, none of them special; the same seed gives the same prompt.

    A prompt is a prefix of every longer one with the same seed.
    """
    import random

    source = random.Random(seed)  # noqa: S311 - not for secrets
    return [source.randrange(3, VOCABULARY) for _ in range(num_tokens)]
