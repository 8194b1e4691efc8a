"""What identifies a request's LoRA adapter: its name, path and the content of its files.

The engine loads an adapter when it is first asked for, or told to, and keeps it in memory
under its number: what lies in the files later says nothing about what it computes with.
So an adapter is identified only while nothing can have come between: its files are older
than the engine, and its number always meant the same. Else its requests are not cached.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from lmcache_persist.connector.vllm.weights import digest_files, digest_whole
from lmcache_persist.errors import IdentityUnknown
from lmcache_persist.identity import canonical_json

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILE = "adapter_model.safetensors"

CLOCK_MARGIN_S = 1.0
"""Seconds by which files must be older than the engine; file systems count coarsely."""

MAX_WHOLE_BYTES = 32 << 20
"""Bytes of weights that are digested whole, some 20 ms; of larger ones samples are."""

MAX_ADAPTERS = 65536
"""Adapters that are remembered. Later ones are not cached, until the engine restarts."""

ENGINE_OPTIONS = (
    "lora_dtype",
    "target_modules",
    "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)
"""The engine's LoRA settings that decide what an adapter computes."""

_DIGEST_LABEL = b"lmcache-persist adapter 1"

Stamp = tuple[tuple[int, ...], ...]
"""Device, inode, size and times of each of an adapter's files."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that can be told from all others.

    Attributes:
        key: of its content and name, for the chunk hashes.
        folder: where its files are.
        stamp: of the files, when they were digested.
    """

    key: bytes
    folder: Path
    stamp: Stamp

    def is_unchanged(self) -> bool:
        """Whether the files are still those that were digested."""
        try:
            return _stamp(self.folder) == self.stamp
        except OSError:
            return False


class Adapters:
    """The adapters that requests of one engine asked for.

    Args:
        lora_config: vLLM's, None if the engine takes no adapters.
        engine_since: wall clock seconds before which the engine had loaded none; now by
            default.

    Threads: vLLM's scheduler thread only.
    """

    def __init__(self, lora_config: Any = None, engine_since: float | None = None) -> None:
        self._options = {name: _plain(getattr(lora_config, name, None)) for name in ENGINE_OPTIONS}
        self._since_ns = int(
            ((time.time() if engine_since is None else engine_since) - CLOCK_MARGIN_S) * 1e9
        )
        self._known: dict[int, tuple[tuple[str, str, bool], Adapter | None]] = {}

    def identify(self, request: Any) -> Adapter | None:
        """The adapter of a ``LoRARequest``; None if it cannot be told what it computes with.

        Reads the adapter's files once per number, and their times each time.
        """
        said = (request.lora_name, request.lora_path, bool(request.is_3d_lora_weight))
        if request.lora_int_id not in self._known:
            if len(self._known) >= MAX_ADAPTERS:
                return None
            self._known[request.lora_int_id] = said, self._read(*said)
        first_said, adapter = self._known[request.lora_int_id]
        if adapter is not None and (first_said != said or not adapter.is_unchanged()):
            # From now on nobody knows which of the two the engine has in memory.
            self._known[request.lora_int_id] = first_said, None
            return None
        return adapter

    def _read(self, name: str, path: str, is_3d: bool) -> Adapter | None:
        folder = Path(os.path.expanduser(path))
        try:
            stamp = _stamp(folder)
            if max(when for file in stamp for when in file[3:]) >= self._since_ns:
                return None
            digest = _digest_weights(folder)
            config = digest_whole(folder / CONFIG_FILE)
            if _stamp(folder) != stamp:
                return None
        except (OSError, IdentityUnknown):
            return None  # A hub name, another format, or nothing at all.
        said = {
            "name": name,
            "path": path,
            "weights": digest,
            "config": config,
            "3d": is_3d,
            **self._options,
        }
        return Adapter(
            blake3(_DIGEST_LABEL + canonical_json(said).encode()).digest(), folder, stamp
        )


def _digest_weights(folder: Path) -> str:
    path = folder / WEIGHT_FILE
    if path.stat().st_size <= MAX_WHOLE_BYTES:
        return digest_whole(path)
    return digest_files(folder, [path])


def _stamp(folder: Path) -> Stamp:
    found = [(folder / name).stat() for name in (CONFIG_FILE, WEIGHT_FILE)]
    return tuple(
        (one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found
    )


def _plain(value: Any) -> Any:
    """A setting as JSON: sorted names, a dtype as text."""
    if isinstance(value, list | tuple | set):
        return sorted(map(str, value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, str | bool | int) else str(value)
