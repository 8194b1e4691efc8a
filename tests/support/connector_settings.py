"""The connector's settings, read without vLLM: their package imports it, their module does not."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lmcache_persist

NAME = "lmcache_persist_connector_settings"


def read_extra_config(extra: Mapping[str, Any]) -> Any:
    """``ConnectorSettings`` of a ``kv_connector_extra_config``; raises as it does."""
    if NAME not in sys.modules:
        file = Path(lmcache_persist.__file__).parent / "connector" / "vllm" / "settings.py"
        spec = importlib.util.spec_from_file_location(NAME, file)
        if spec is None or spec.loader is None:
            raise RuntimeError(f"{file} cannot be loaded")
        sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[NAME].ConnectorSettings.from_extra_config(extra)
