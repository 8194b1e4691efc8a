"""From vLLM's ``KVCacheConfig`` to groups, spec by spec.

Only specs named here are served: what an unknown one keeps in its blocks, and when it
drops them, is not known, and a guess would hand out wrong KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    is_mamba_prefill_checkpoint_valid,
)

from lmcache_persist.errors import UnsupportedGroup
from lmcache_persist.geometry import Group, GroupKind, check_groups

SERVED: dict[type[KVCacheSpec], GroupKind] = {
    FullAttentionSpec: GroupKind.FULL,
    MLAAttentionSpec: GroupKind.FULL,
    SlidingWindowSpec: GroupKind.SLIDING,
    SlidingWindowMLASpec: GroupKind.SLIDING,
    MambaSpec: GroupKind.RECURRENT,
}
"""What each spec keeps. Exact types: a subclass exists because it behaves differently."""

_SCRATCH = Group(GroupKind.SCRATCH, 0)


def layer_specs(group: KVCacheGroupSpec) -> Iterator[tuple[str, KVCacheSpec]]:
    """Each layer of a group that has a cache of its own, with its own spec."""
    spec = group.kv_cache_spec
    for name in group.layer_names:
        if not isinstance(spec, UniformTypeKVCacheSpecs):
            yield name, spec
        elif name in spec.kv_cache_specs:
            # The scheduler's config keeps one spec for all; a worker's has each layer's.
            # One that has none here shares another layer's cache.
            yield name, spec.kv_cache_specs[name]


def read_groups(config: KVCacheConfig, dcp_size: int) -> tuple[Group, ...]:
    """The geometry, one group per KV cache group of vLLM, in its order.

    Groups that vLLM does not prefix-cache or does not transfer are scratch.

    Args:
        config: a worker's or the scheduler's; both give the same.
        dcp_size: ranks of decode context parallelism.

    Raises:
        UnsupportedGroup: a spec is unknown, or keeps what no prefix can be restored from.
        GeometryError: the numbers make no geometry.
    """
    cacheable = set(config.prefix_cacheable_group_ids)
    groups = tuple(
        _read_group(index, group, dcp_size) if index in cacheable else _scratch(index, group)
        for index, group in enumerate(config.kv_cache_groups)
    )
    check_groups(groups)
    return groups


def scheduling_block_size(config: KVCacheConfig) -> int:
    """Tokens: what vLLM sets ``cache_config.block_size`` to when it knows the groups."""
    return min(int(group.kv_cache_spec.block_size) for group in config.prefix_cacheable_groups)


def is_checkpoint(config: KVCacheConfig, group: int, steps: range, boundary: int) -> bool:
    """Whether a step exports the state at a boundary inside it, as some backends do.

    Args:
        config: the scheduler's.
        group: index of a recurrent group.
        steps: positions that the step computes.
        boundary: tokens.
    """
    spec, hash_block_size = config.kv_cache_groups[group].kv_cache_spec, config.hash_block_size
    if not isinstance(spec, MambaSpec) or not hash_block_size:
        return False
    return spec.num_prefill_checkpoint_blocks > 0 and bool(
        is_mamba_prefill_checkpoint_valid(
            query_start=steps.start,
            query_end=steps.stop,
            checkpoint_position=boundary,
            hash_block_size=hash_block_size,
            mamba_block_size=spec.block_size,
            checkpoint_alignment=spec.prefill_checkpoint_alignment,
        )
    )


def _scratch(index: int, group: KVCacheGroupSpec) -> Group:
    if group.kv_cache_spec.prefix_replay_tokens:
        raise UnsupportedGroup(
            f"group {index} ({type(group.kv_cache_spec).__name__}) is computed again over the last"
            f" {group.kv_cache_spec.prefix_replay_tokens} tokens of a prefix",
            hint="this version cannot cache such a model; run it without this connector",
            group=index,
        )
    return _SCRATCH


def _read_group(index: int, group: KVCacheGroupSpec, dcp_size: int) -> Group:
    read = {_read_spec(index, spec, dcp_size) for spec in _specs_of(group)}
    if len(read) != 1:
        raise UnsupportedGroup(
            f"group {index} mixes layers that keep different things: {sorted(map(str, read))}",
            group=index,
        )
    if group.is_eagle_group:
        raise UnsupportedGroup(
            f"group {index} holds the layers of a draft model, whose KV depends on the token"
            " after a chunk",
            hint="run without a draft model, or without this connector",
            group=index,
        )
    return read.pop()


def _specs_of(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    """Specs of the layers, or of the group where a pipeline stage has none of its layers."""
    if group.layer_names:
        return [spec for _, spec in layer_specs(group)]
    spec = group.kv_cache_spec
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())


def _read_spec(index: int, spec: KVCacheSpec, dcp_size: int) -> Group:
    kind = SERVED.get(type(spec))
    if kind is None:
        raise UnsupportedGroup(
            f"group {index} has spec {type(spec).__name__}, expected one of"
            f" {', '.join(sorted(known.__name__ for known in SERVED))}",
            hint="this version cannot cache such a model; run it without this connector",
            group=index,
        )
    if isinstance(spec, MambaSpec):
        _check_states(index, spec)
    if getattr(spec, "non_causal", False) or getattr(spec, "non_causal_multi_token_decode", False):
        raise UnsupportedGroup(
            f"group {index} attends to later tokens (non-causal): its KV depends on more than"
            " the prefix",
            hint="run this model without this connector",
            group=index,
        )
    tokens = spec.block_size * (dcp_size if spec.dcp_sharded else 1)
    return Group(kind, tokens, spec.num_states, _window(spec))


def _check_states(index: int, spec: MambaSpec) -> None:
    """States must be left at block ends, and it must be sure which block holds which."""
    if spec.mamba_cache_mode != "align":
        raise UnsupportedGroup(
            f"group {index} is recurrent in mode {spec.mamba_cache_mode!r}, expected 'align':"
            " the engine keeps no states at block ends",
            hint="switch prefix caching on (--enable-prefix-caching), or run this model without"
            " this connector",
            group=index,
        )
    if spec.num_speculative_blocks:
        raise UnsupportedGroup(
            f"group {index} is recurrent with {spec.num_speculative_blocks} speculative blocks:"
            " a state may hold tokens that are rejected",
            hint="run this model without speculative decoding, or without this connector",
            group=index,
        )


def _window(spec: Any) -> int:
    """Tokens that a sliding spec needs behind a position, what it retains included."""
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window) + int(spec.extra_retained_tokens)
    return 0
