"""Whether a model's KV depends on ``max_model_len``, as its config was given. Pure.

Most RoPE scalings are a function of the position alone. Some choose their frequencies by
the longest sequence that the engine admits, so that one config with two lengths makes two
different KV caches. What is not known to be independent counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

LENGTH_INDEPENDENT_ROPE = frozenset(
    {"default", "linear", "llama3", "mrope", "yarn", "deepseek_yarn", "proportional"}
)
"""RoPE types whose rotation of a token does not depend on max_model_len. Others count.

Source: vllm/model_executor/layers/rotary_embedding (0.32).
"""

SCALED_BY_FACTOR = frozenset({"linear", "llama3", "yarn", "deepseek_yarn"})
"""Of those, the ones that need a ``factor``: without it, it comes from lengths."""

LENGTH_READING_MODELS = frozenset({"llama4", "llama4_text"})
"""Model types that read max_model_len for other things than RoPE: Llama 4 scales its
attention from 32k on."""

_ROPE_KEYS = frozenset({"rope_scaling", "rope_parameters"})


def depends_on_max_model_len(*sources: Mapping[str, Any]) -> bool:
    """Whether anything in a config or its overrides may depend on ``max_model_len``."""
    return any(_depends(source) for source in sources)


def follows_the_batch(*sources: Mapping[str, Any]) -> bool:
    """Whether transformers' own RoPE would follow the longest sequence in a batch."""
    return any(
        rope.get("rope_type", rope.get("type", "default")) not in LENGTH_INDEPENDENT_ROPE
        for source in sources
        for rope in _ropes(source)
    )


def _depends(source: Mapping[str, Any]) -> bool:
    return any(_scaling_depends(rope) for rope in _ropes(source)) or any(
        key == "dual_chunk_attention_config" or (key == "model_type" and _reads_length(value))
        for key, value in _items(source)
    )


def _reads_length(model_type: Any) -> bool:
    return isinstance(model_type, str) and model_type in LENGTH_READING_MODELS


def _scaling_depends(rope: Mapping[str, Any]) -> bool:
    kinds = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None]
    return any(
        kind not in LENGTH_INDEPENDENT_ROPE
        or (kind in SCALED_BY_FACTOR and not isinstance(rope.get("factor"), int | float))
        for kind in map(str, kinds)
    )


def _ropes(value: Any, inside: bool = False) -> Iterator[Mapping[str, Any]]:
    """Every mapping at or below a RoPE key: one per layer type in newer configs."""
    if isinstance(value, Mapping):
        if inside:
            yield value
        for key, item in value.items():
            yield from _ropes(item, inside or key in _ROPE_KEYS)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _ropes(item, inside)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key and value anywhere in a config."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key), item
            yield from _items(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _items(item)
