"""As much of a ``VllmConfig`` as an identity reads, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from lmcache_persist.connector.vllm.model_identity import read_identity

RAW = {"model_type": "llama", "hidden_size": 256, "rope_theta": 10000.0, "_name_or_path": "x"}


class Llama:
    """Stands for the class of a model."""


Llama.__module__, Llama.__qualname__ = "vllm.models.llama", "LlamaForCausalLM"


class Engine:
    """As much of an engine's configuration as an identity reads, to change one thing of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.raw = dict(RAW)
        self.kv = FullAttentionSpec(
            block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16
        )
        self.weight = torch.zeros(1000)
        self.model = SimpleNamespace(
            model=str(folder),
            revision=None,
            code_revision=None,
            model_impl="auto",
            hf_config_path=None,
            hf_overrides={},
            quantization=None,
            quantization_config=None,
            dtype=torch.bfloat16,
            max_model_len=4096,
            disable_sliding_window=False,
            model_weights="",
            architectures=["LlamaForCausalLM"],
            registry=SimpleNamespace(resolve_model_cls=self._resolve),
            using_transformers_backend=lambda: False,
            trust_remote_code=False,
            is_encoder_decoder=False,
            multimodal_config=None,
            override_generation_config={},
        )
        self.model_class: type = Llama
        self.load = SimpleNamespace(load_format="auto")
        self.cache = SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False)
        self.parallel = SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        )
        self.scheduler = SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=128)
        self.v2 = False
        self.additional: dict[str, Any] = {}
        self.num_blocks = 8

    def _resolve(self, architectures: list[str], model: Any) -> tuple[type, str]:
        return self.model_class, architectures[0]

    def config(self) -> Any:
        """What stands for the VllmConfig."""
        return SimpleNamespace(
            model_config=self.model,
            load_config=self.load,
            cache_config=self.cache,
            parallel_config=self.parallel,
            scheduler_config=self.scheduler,
            additional_config=self.additional,
            use_v2_model_runner=self.v2,
        )

    def identity(self) -> dict[str, Any]:
        """The identity as it is now."""
        (self.folder / "config.json").write_text(json.dumps(self.raw))
        save_file({"w": self.weight}, self.folder / "model.safetensors")
        group = KVCacheGroupSpec(["l"], self.kv)
        return read_identity(self.config(), KVCacheConfig(self.num_blocks, [], [group]))
