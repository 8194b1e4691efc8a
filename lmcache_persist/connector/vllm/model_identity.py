"""The identity of what a ``VllmConfig`` runs: everything that decides its KV's meaning.

Taken as the operator gave it. vLLM rewrites ``hf_config`` while it starts, and not in the
same way in every version, so the raw config is read from its file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from lmcache_persist.connector.vllm.kv_geometry import layer_specs
from lmcache_persist.connector.vllm.weights import digest_folder, snapshot_commit
from lmcache_persist.errors import IdentityUnknown
from lmcache_persist.identity import canonical_json, check_identity, without_cosmetic_keys

CONNECTOR_NAME = "vllm"
CONNECTOR_FORMAT = 1
"""Bumped when the same pages would be stored as other bytes, or read another way."""

WHOLE_LOAD_FORMATS = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "mistral"})
"""Load formats that read whole local checkpoint files, so that a digest speaks for them."""

LENGTH_INDEPENDENT_ROPE = frozenset({"default", "linear", "llama3", "mrope", "yarn"})
"""RoPE types whose rotation of a token does not depend on max_model_len. Others count."""

_CONFIG_FILES = ("config.json", "params.json")


def read_identity(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, Any]:
    """The identity, with every field that :mod:`lmcache_persist.identity` requires.

    Reads the config file and samples the weights: fractions of a second on a warm cache.

    Raises:
        IdentityUnknown: something cannot be identified; the model's KV is not cached.
    """
    model = vllm_config.model_config
    check_identifiable(vllm_config)
    folder = model_folder(model)
    config = read_raw_config(model)
    identity = {
        "connector": CONNECTOR_NAME,
        "connector_format": CONNECTOR_FORMAT,
        "model": model.model,
        "revision": model.revision,
        "code_revision": model.code_revision,
        "implementation": str(model.model_impl),
        "weights": _weights(folder),
        "config": without_cosmetic_keys(config),
        "overrides": dict(model.hf_overrides),
        "kv_dtype": _kv_dtypes(kv_cache_config),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "max_model_len": model.max_model_len if _rope_depends_on_length(model, config) else None,
        "sliding_window_disabled": model.disable_sliding_window,
        "parallel": _parallel(vllm_config),
        "runner": "v2" if vllm_config.use_v2_model_runner else "v1",
    }
    check_identity(identity)
    canonical_json(identity)
    return identity


def check_identifiable(vllm_config: VllmConfig) -> None:
    """Refuse what no identity can be given to; cheap, reads no weights.

    Raises:
        IdentityUnknown: says what cannot be identified.
    """
    reason = next(_obstacles(vllm_config), None)
    if reason is not None:
        raise IdentityUnknown(reason, hint="the model runs, its KV is not cached")


def _obstacles(vllm_config: VllmConfig) -> Iterator[str]:
    model, load = vllm_config.model_config, vllm_config.load_config
    load_format = str(load.load_format)
    if load_format not in WHOLE_LOAD_FORMATS:
        yield f"weights come by load format {load_format!r}, which has no files to identify them"
    if model.model_weights:
        yield f"weights are streamed from {model.model_weights!r}"
    if not isinstance(model.hf_overrides, Mapping):
        yield "hf_overrides is a function, whose effect cannot be identified"
    if model.quantization is not None and not _is_quantized_on_disk(read_raw_config(model)):
        yield f"weights are quantised to {model.quantization!r} while they are loaded"
    if getattr(model, "quantization_config", None) is not None:
        yield "weights are quantised by quantization_config while they are loaded"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        yield "KV scales are calculated at run time"


def model_folder(model: ModelConfig) -> Path:
    """The local folder of a model, the hub's snapshot for a name.

    Raises:
        IdentityUnknown: there is none.
    """
    given = Path(model.model)
    if given.is_dir():
        return given
    return _hub_file(model.model, model.revision).parent


def _hub_file(name: str, revision: str | None) -> Path:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in _CONFIG_FILES:
        try:
            found = try_to_load_from_cache(name, file, revision=revision)
        except HFValidationError as error:
            raise IdentityUnknown(f"model {name!r} is no folder and no hub name") from error
        if isinstance(found, str):
            return Path(found)
    raise IdentityUnknown(f"model {name!r} has no config in the hub's cache")


def read_raw_config(model: ModelConfig) -> dict[str, Any]:
    """The model's config as its file has it.

    Raises:
        IdentityUnknown: there is no such file, or it is no JSON object.
    """
    source = model.hf_config_path or model.model
    folder = Path(source) if Path(source).is_dir() else _hub_file(source, model.revision).parent
    path = next((folder / name for name in _CONFIG_FILES if (folder / name).is_file()), None)
    if path is None:
        raise IdentityUnknown(f"model folder {folder} has no {' or '.join(_CONFIG_FILES)}")
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise IdentityUnknown(f"model config {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise IdentityUnknown(f"model config {path} is no JSON object")
    return config


def _weights(folder: Path) -> dict[str, str]:
    commit = snapshot_commit(folder)
    if commit is not None:
        return {"commit": commit}
    return {"digest": digest_folder(folder)}


def _is_quantized_on_disk(config: Mapping[str, Any]) -> bool:
    keys = ("quantization_config", "compression_config", "quantization")
    texts = [config, config.get("text_config") or {}]
    return any(text.get(key) for text in texts for key in keys)


def _kv_dtypes(config: KVCacheConfig) -> list[str]:
    """What the specs hold, not what was asked for: ``auto`` is none of a dtype."""
    found: set[str] = set()
    for group in config.kv_cache_groups:
        for _, spec in layer_specs(group):
            dtypes = getattr(spec, "dtypes", None) or (getattr(spec, "dtype", None),)
            mode = getattr(spec, "kv_quant_mode", None)
            suffix = f"/{mode.name}" if mode is not None else ""
            found.update(f"{dtype}{suffix}" for dtype in dtypes)
    return sorted(found)


def _rope_depends_on_length(model: ModelConfig, config: Mapping[str, Any]) -> bool:
    """Whether a RoPE scaling is in sight that is not known to be independent of it."""
    overrides = model.hf_overrides if isinstance(model.hf_overrides, Mapping) else {}
    return any(
        kind not in LENGTH_INDEPENDENT_ROPE
        for source in (config, overrides)
        for kind in _rope_types(source)
    )


def _rope_types(value: Any, inside: bool = False) -> Iterator[str]:
    """Every RoPE type named anywhere in a config, under old and new names."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if inside and key in ("rope_type", "type") and isinstance(item, str):
                yield item
            else:
                yield from _rope_types(item, inside or key in ("rope_scaling", "rope_parameters"))
    elif isinstance(value, list):
        for item in value:
            yield from _rope_types(item, inside)


def _parallel(vllm_config: VllmConfig) -> dict[str, int]:
    parallel = vllm_config.parallel_config
    return {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
        "pcp": parallel.prefill_context_parallel_size,
    }
