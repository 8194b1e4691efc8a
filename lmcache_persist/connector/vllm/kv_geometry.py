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
)

from lmcache_persist.errors import UnsupportedGroup
from lmcache_persist.geometry import Group, GroupKind, check_groups

# Exact types, no isinstance: a subclass exists because it behaves differently.
_KINDS: dict[type[KVCacheSpec], GroupKind] = {
    FullAttentionSpec: GroupKind.FULL,
    MLAAttentionSpec: GroupKind.FULL,
    SlidingWindowSpec: GroupKind.SLIDING,
    SlidingWindowMLASpec: GroupKind.SLIDING,
    MambaSpec: GroupKind.RECURRENT,
}

SERVED_KINDS = frozenset({GroupKind.FULL, GroupKind.SCRATCH})
"""Kinds of groups that this version stores and loads."""

_SCRATCH = Group(GroupKind.SCRATCH, 0)


def layer_specs(group: KVCacheGroupSpec) -> Iterator[tuple[str, KVCacheSpec]]:
    """Each layer of a group with its own spec."""
    spec = group.kv_cache_spec
    for name in group.layer_names:
        if isinstance(spec, UniformTypeKVCacheSpecs):
            # The scheduler's config keeps one spec for all; a worker's has each layer's.
            yield name, spec.kv_cache_specs[name]
        else:
            yield name, spec


def read_groups(config: KVCacheConfig, dcp_size: int) -> tuple[Group, ...]:
    """The geometry, one group per KV cache group of vLLM, in its order.

    Groups that vLLM does not prefix-cache or does not transfer are scratch.

    Args:
        config: a worker's or the scheduler's; both give the same.
        dcp_size: ranks of decode context parallelism.

    Raises:
        UnsupportedGroup: a spec is unknown, or of a kind that is not served yet.
        GeometryError: the numbers make no geometry.
    """
    cacheable = set(config.prefix_cacheable_group_ids)
    groups = tuple(
        _read_group(index, group, dcp_size) if index in cacheable else _SCRATCH
        for index, group in enumerate(config.kv_cache_groups)
    )
    check_groups(groups)
    return groups


def _read_group(index: int, group: KVCacheGroupSpec, dcp_size: int) -> Group:
    read = {_read_spec(index, spec, dcp_size) for _, spec in layer_specs(group)}
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


def _read_spec(index: int, spec: KVCacheSpec, dcp_size: int) -> Group:
    kind = _KINDS.get(type(spec))
    if kind is None:
        raise UnsupportedGroup(
            f"group {index} has spec {type(spec).__name__}, expected one of"
            f" {', '.join(sorted(known.__name__ for known in _KINDS))}",
            hint="this version cannot cache such a model; run it without this connector",
            group=index,
        )
    if kind not in SERVED_KINDS:
        raise UnsupportedGroup(
            f"group {index} is {kind.value} ({type(spec).__name__}), expected only full"
            " attention groups",
            hint="this version caches models whose groups are all full attention; run this"
            " one without this connector",
            group=index,
        )
    if getattr(spec, "non_causal", False) or getattr(spec, "non_causal_multi_token_decode", False):
        raise UnsupportedGroup(
            f"group {index} attends to later tokens (non-causal): its KV depends on more than"
            " the prefix",
            hint="run this model without this connector",
            group=index,
        )
    tokens = spec.block_size * (dcp_size if spec.dcp_sharded else 1)
    return Group(kind, tokens, spec.num_states, _window(spec))


def _window(spec: Any) -> int:
    """Tokens that a sliding spec needs behind a position, what it retains included."""
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window) + int(spec.extra_retained_tokens)
    return 0
