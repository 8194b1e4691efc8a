"""How this rank's KV pages lie in memory, read from the registered caches.

Two engines share objects only if their pages hold the same bytes for the same tokens: the
layout is part of the fingerprint. Block counts and the strides that memory size changes
stay out of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from lmcache_persist.connector.vllm.kv_geometry import layer_specs
from lmcache_persist.errors import UnsupportedGroup
from lmcache_persist.geometry import Group


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache with the engine's blocks as dimension 0.

    Attributes:
        name: the layer's.
        planes: ``(num_blocks, ...)`` each: one, or K and V where a block has a page in each
            of two planes.
    """

    name: str
    planes: tuple[torch.Tensor, ...]

    @property
    def cache(self) -> torch.Tensor:
        """The first plane; others have the same shape and strides."""
        return self.planes[0]


def read_layers(
    kv_caches: Mapping[str, torch.Tensor],
    config: KVCacheConfig,
    groups: Sequence[Group],
) -> list[list[LayerCache]]:
    """Per group its layers' caches, in the group's order; none for scratch groups.

    Raises:
        UnsupportedGroup: a layer is not there, or has another number of blocks.
    """
    return [
        [
            _read_layer(index, name, kv_caches.get(name), config.num_blocks)
            for name, _ in (layer_specs(spec_group) if group.cacheable else ())
        ]
        for index, (group, spec_group) in enumerate(
            zip(groups, config.kv_cache_groups, strict=True)
        )
    ]


def _read_layer(index: int, name: str, cache: Any, num_blocks: int) -> LayerCache:
    if not isinstance(cache, torch.Tensor):
        raise UnsupportedGroup(
            f"layer {name} of group {index} registered {type(cache).__name__}, expected a tensor",
            group=index,
        )
    if cache.shape[0] == 2 != num_blocks and cache.dim() > 2 and cache.shape[1] % num_blocks == 0:
        return LayerCache(name, tuple(_by_block(plane, num_blocks) for plane in cache))
    if cache.shape[0] % num_blocks:
        raise UnsupportedGroup(
            f"layer {name} of group {index} has {cache.shape[0]} kernel blocks, expected a"
            f" multiple of {num_blocks}",
            group=index,
        )
    return LayerCache(name, (_by_block(cache, num_blocks),))


def _by_block(plane: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A block may be split into kernel blocks; a page is the whole block."""
    return plane if plane.shape[0] == num_blocks else plane.unflatten(0, (num_blocks, -1))


def describe(
    layers: Sequence[Sequence[LayerCache]],
    config: KVCacheConfig,
    groups: Sequence[Group],
    vllm_config: VllmConfig,
) -> dict[str, Any]:
    """The layout as plain JSON, equal wherever pages hold equal bytes for equal tokens.

    Per group its layers in their order, each with the index of its form: most layers of a
    model look alike.
    """
    modules = vllm_config.compilation_config.static_forward_context
    return {
        "kv_cache_layout": config.kv_cache_layout,
        "device": _device(layers),
        "groups": [
            _describe_group(
                group,
                [
                    (layer.name, _describe_layer(layer, spec, modules.get(layer.name)))
                    for layer, (_, spec) in zip(members, layer_specs(spec_group), strict=True)
                ]
                if group.cacheable
                else [],
            )
            for members, group, spec_group in zip(
                layers, groups, config.kv_cache_groups, strict=True
            )
        ],
    }


def _describe_group(group: Group, members: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    forms: list[dict[str, Any]] = []
    layers = []
    for name, form in members:
        if form not in forms:
            forms.append(form)
        layers.append([name, forms.index(form)])
    return {
        "kind": group.kind.value,
        "tokens_per_block": group.tokens_per_block,
        "layers": layers,
        "forms": forms,
    }


def _describe_layer(layer: LayerCache, spec: KVCacheSpec, module: Any) -> dict[str, Any]:
    return {
        "spec": {
            "type": type(spec).__name__,
            # All of them: equal byte counts are not enough, and a field of tomorrow counts.
            **{one.name: _plain(getattr(spec, one.name)) for one in dataclasses.fields(spec)},
        },
        "stored_dtype": str(layer.cache.dtype),
        "planes": len(layer.planes),
        "block_shape": list(layer.cache.shape[1:]),
        "block_strides": list(layer.cache.stride()[1:]),
        "backend": _backend_name(module),
        # Hosts with other instructions write other bytes for the same shape and strides.
        "isa": getattr(module, "isa", None),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _device(layers: Sequence[Sequence[LayerCache]]) -> dict[str, Any]:
    """What kind of device holds the caches: kernels for another one may pack otherwise."""
    device = next((layer.cache.device for members in layers for layer in members), None)
    if device is None:
        return {"type": None, "capability": None}
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return {"type": device.type, "capability": list(capability) if capability else None}


def _backend_name(module: Any) -> str | None:
    backend = getattr(module, "attn_backend", None)
    if backend is None and module is not None and hasattr(module, "get_attn_backend"):
        backend = module.get_attn_backend()
    return backend.get_name() if backend is not None else None
