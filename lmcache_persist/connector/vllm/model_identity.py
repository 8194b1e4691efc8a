"""The identity of what a ``VllmConfig`` runs: everything that decides its KV's meaning.

Taken as the operator gave it; see :mod:`.model_files`. What differs between requests of one
engine (salt, adapter, images) is in their chunk hashes instead; see :mod:`.requests`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import vllm
from vllm.config import ModelConfig, VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs

from lmcache_persist.connector.vllm import context_length, model_files
from lmcache_persist.errors import IdentityUnknown
from lmcache_persist.identity import canonical_json, check_identity

CONNECTOR_NAME = "vllm"
CONNECTOR_FORMAT = 1
"""Bumped when the same pages would be stored as other bytes, or read another way."""

WHOLE_LOAD_FORMATS = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "mistral"})
"""Load formats that read whole local checkpoint files, so that a digest speaks for them."""

_QUANTIZATION_FILES = (
    "hf_quant_config.json",
    "quant_config.json",
    "quantization_config.json",
    "quantize_config.json",
)
_MULTIMODAL_FIELDS = (
    "language_model_only",
    "mm_encoder_attn_dtype",
    "video_pruning_method",
    "video_pruning_rate",
)
_ATTENTION_TUNING = "attn_temperature_tuning"


def read_identity(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, Any]:
    """The identity, with every field that :mod:`lmcache_persist.identity` requires.

    Reads the config files and samples the weights: fractions of a second on a warm cache.

    Raises:
        IdentityUnknown: something cannot be identified; the model's KV is not cached.
    """
    model = vllm_config.model_config
    check_identifiable(vllm_config)
    located = model_files.locate(model)
    config, *second = model_files.read_raw_configs(model)
    overrides = dict(model.hf_overrides)
    lengths_matter = context_length.depends_on_max_model_len(config, *second, overrides)
    implementation = _implementation(model)
    own_code = implementation["package"] != "vllm"
    identity = {
        "connector": CONNECTOR_NAME,
        "connector_format": CONNECTOR_FORMAT,
        # Nothing says how a backend arranges bytes inside a page, so its version has to.
        "engine": {"vllm": vllm.__version__},
        "model": located.name,
        "revision": located.revision,
        "code_revision": model.code_revision,
        "implementation": implementation,
        "weights": model_files.identify_weights(located),
        "load_format": _checkpoint(vllm_config),
        "files": model_files.identify_other_files(located.folder, code=model.trust_remote_code),
        "config": model_files.compact(config),
        "second_config": model_files.compact(second[0]) if second else None,
        "overrides": model_files.compact(overrides),
        "generation": _generation(model, located),
        "kv_dtype": _kv_dtypes(kv_cache_config),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "max_model_len": model.max_model_len if lengths_matter or own_code else None,
        "sliding_window_disabled": model.disable_sliding_window,
        "multimodal": _multimodal(model),
        "parallel": _parallel(vllm_config),
        "additional": _additional(vllm_config),
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
        return
    configs = model_files.read_raw_configs(model)
    if model.quantization is not None and not _is_quantized_on_disk(model, configs):
        yield f"weights are quantised to {model.quantization!r} while they are loaded"
    if getattr(model, "quantization_config", None) is not None:
        yield "weights are quantised by quantization_config while they are loaded"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        yield "KV scales are calculated at run time"
    if model.is_encoder_decoder:
        yield "the decoder's KV depends on the encoder's input, not on its own prefix alone"
    for key, value in configs[0].items():
        if key.endswith(model_files.OTHER_REPOSITORY_SUFFIX) and value:
            yield f"weights come from a second repository too ({key} is {value!r})"
    if model.using_transformers_backend() and context_length.follows_the_batch(
        *configs, model.hf_overrides
    ):
        yield "transformers' RoPE follows the longest sequence of a batch, so KV depends on others"


def _is_quantized_on_disk(model: ModelConfig, configs: list[dict[str, Any]]) -> bool:
    keys = ("quantization_config", "compression_config", "quantization")
    texts = [text for config in configs for text in (config, config.get("text_config") or {})]
    if any(text.get(key) for text in texts for key in keys):
        return True
    folder = model_files.locate(model).folder
    return any((folder / name).is_file() for name in _QUANTIZATION_FILES)


def _checkpoint(vllm_config: VllmConfig) -> str:
    """Which of a folder's files are read; several load formats read the same ones."""
    load_format = str(vllm_config.load_config.load_format)
    return load_format if load_format == "mistral" else "hf"


def _implementation(model: ModelConfig) -> dict[str, Any]:
    """Whose code computes the KV."""
    found, architecture = model.registry.resolve_model_cls(model.architectures, model)
    package = found.__module__.partition(".")[0]
    packages = {package, "transformers"} if model.using_transformers_backend() else {package}
    return {
        "architecture": architecture,
        "class": f"{found.__module__}.{found.__qualname__}",
        "package": package,
        "versions": {
            name: _version(name) for name in sorted(packages - {"vllm", "transformers_modules"})
        },
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _generation(model: ModelConfig, located: model_files.Model) -> dict[str, Any]:
    """What generation settings decide of KV: Llama 4 reads its attention tuning from them."""
    path = located.folder / "generation_config.json"
    given = dict(model.override_generation_config)
    value = given.get(_ATTENTION_TUNING)
    if value is None and path.is_file():
        value = model_files.read_object(path).get(_ATTENTION_TUNING)
    return {_ATTENTION_TUNING: value}


def _kv_dtypes(config: KVCacheConfig) -> list[str]:
    """What the specs hold, not what was asked for: ``auto`` is none of a dtype.

    From the groups' specs, which all ranks have, also those without a layer of a group.
    """
    found: set[str] = set()
    for group in config.kv_cache_groups:
        for spec in _specs(group.kv_cache_spec):
            dtypes = getattr(spec, "dtypes", None) or (getattr(spec, "dtype", None),)
            mode = getattr(spec, "kv_quant_mode", None)
            suffix = f"/{mode.name}" if mode is not None else ""
            found.update(f"{dtype}{suffix}" for dtype in dtypes)
    return sorted(found)


def _specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]


def _multimodal(model: ModelConfig) -> dict[str, Any] | None:
    """What decides the embeddings of an item beside its content."""
    config = model.multimodal_config
    if config is None:
        return None
    scales = getattr(config, "mm_encoder_fp8_scale_path", None)
    return {
        **{name: getattr(config, name, None) for name in _MULTIMODAL_FIELDS},
        "fp8_scales": model_files.digest_path(scales) if scales else None,
    }


def _parallel(vllm_config: VllmConfig) -> dict[str, int]:
    parallel = vllm_config.parallel_config
    context_ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    return {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
        "pcp": parallel.prefill_context_parallel_size,
        # Which of the context ranks holds which tokens of a block.
        "interleave": parallel.cp_kv_cache_interleave_size if context_ranks > 1 else 1,
    }


def _additional(vllm_config: VllmConfig) -> Any:
    """Settings for platforms and plugins: nobody here knows what they do."""
    given = vllm_config.additional_config
    return dict(given) if isinstance(given, Mapping) else str(given.compute_hash())
