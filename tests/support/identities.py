"""Adapters and multimodal items as requests bring them along."""

from __future__ import annotations

import json
import time
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from lmcache_persist.connector.vllm.adapters import Adapters


def lora(path: Path, name: str = "a", number: int = 1, **changes: Any) -> Any:
    """A LoRARequest."""
    fields = {
        "lora_name": name,
        "lora_int_id": number,
        "lora_path": str(path),
        "is_3d_lora_weight": False,
    }
    return SimpleNamespace(**{**fields, **changes})


def write_adapter(folder: Path, value: float = 1.0, rank: int = 8) -> Path:
    """An adapter's files."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    save_file({"w": torch.full((64, 8), value)}, folder / "adapter_model.safetensors")
    return folder


def later(config: Any = None) -> Adapters:
    """Those of an engine that starts once all files so far are old enough."""
    return Adapters(config, engine_since=time.time() + 60)


def item(**tensors: Any) -> Any:
    """Processed tensors of an item, as vLLM keeps them."""
    return UserDict({name: SimpleNamespace(data=value) for name, value in tensors.items()})


def feature(
    data: Any, offset: int = 4, length: int = 8, name: str = "id", **changes: Any
) -> SimpleNamespace:
    """An item in a prompt."""
    position = SimpleNamespace(offset=offset, length=length, is_embed=changes.pop("is_embed", None))
    fields = {"data": data, "modality": "image", "identifier": name, "mm_position": position}
    return SimpleNamespace(**{**fields, **changes})
