"""Tiny models with random weights for which wrong KV changes the tokens.

Large random weights (``initializer_range`` 0.12 instead of 0.02) give peaked attention and
logits with a margin: what a model reads from its KV decides what it says. Dummy weights
give flat logits, and a test on those cannot fail.
"""

from __future__ import annotations

from pathlib import Path

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
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
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
