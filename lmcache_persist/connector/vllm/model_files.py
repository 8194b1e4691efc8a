"""Where a model's files are, and what they say, as the operator gave them.

vLLM rewrites its config while it starts, and not in the same way in every version, so the
raw config is read from its file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3
from vllm.config import ModelConfig

from lmcache_persist.connector.vllm.weights import (
    digest_files,
    digest_whole,
    snapshot_commit,
    weight_files,
)
from lmcache_persist.errors import IdentityUnknown
from lmcache_persist.identity import canonical_json, without_cosmetic_keys

CONFIG_FILES = ("config.json", "params.json")
"""Configs that vLLM reads; if both are there, both count."""

COSMETIC_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "generation_config.json",
        "merges.json",
        "preprocessor_config.json",
        "processor_config.json",
        "special_tokens_map.json",
        "tekken.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "video_preprocessor_config.json",
        "vocab.json",
    }
)
"""JSON files beside the weights that decide prompts and defaults of requests, whose tokens and
items are in the chunk hashes. Others count: quantisation, the index of shards."""

MAX_VALUE_BYTES = 8 * 1024
"""Bytes of a config value that is kept as it is. A longer one is kept as its digest."""

OTHER_REPOSITORY_SUFFIX = "_model_id"
"""Config keys that name another repository, whose weights are loaded too."""


class Model(NamedTuple):
    """A model's name and where its files are.

    Attributes:
        name: as given; of a hub snapshot the repository's.
        revision: as given; of a hub snapshot "main" where none was.
        commit: of a hub snapshot, None for other folders.
        folder: on this machine.
    """

    name: str
    revision: str | None
    commit: str | None
    folder: Path


def locate(model: ModelConfig) -> Model:
    """Find a model's folder, the hub's snapshot for a name.

    Offline, vLLM replaces a hub name by its snapshot's path, and online it may or may not
    fill in the default revision: all of them are one model.

    Raises:
        IdentityUnknown: there is none.
    """
    given = Path(model.model)
    folder = given if given.is_dir() else _hub_file(model.model, model.revision).parent
    revision = None if model.revision is None else str(model.revision)
    commit, name = snapshot_commit(folder), model.model
    if commit is None:
        return Model(name, revision, None, folder)
    repository = Path(os.path.abspath(folder)).parent.parent.name
    if repository.startswith("models--"):
        name = repository.removeprefix("models--").replace("--", "/", 1)
    return Model(name, revision or "main", commit, folder)


def _hub_file(name: str, revision: str | None) -> Path:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    # The commit that vLLM resolved a revision to, where it could.
    revision = getattr(revision, "resolved", revision)
    for file in CONFIG_FILES:
        try:
            found = try_to_load_from_cache(name, file, revision=revision)
        except HFValidationError as error:
            raise IdentityUnknown(f"model {name!r} is no folder and no hub name") from error
        if isinstance(found, str):
            return Path(found)
    raise IdentityUnknown(f"model {name!r} has no config in the hub's cache")


def read_raw_configs(model: ModelConfig) -> list[dict[str, Any]]:
    """The model's config as its file has it; a second one if there are two.

    Raises:
        IdentityUnknown: there is no such file, or it is no JSON object.
    """
    source = model.hf_config_path or model.model
    revision = getattr(model, "_hf_config_revision", None) or model.revision
    folder = Path(source) if Path(source).is_dir() else _hub_file(source, revision).parent
    found = [folder / name for name in CONFIG_FILES if (folder / name).is_file()]
    if not found:
        raise IdentityUnknown(f"model folder {folder} has no {' or '.join(CONFIG_FILES)}")
    return [read_object(path) for path in found]


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        IdentityUnknown: it cannot be read, or is something else.
    """
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise IdentityUnknown(f"model config {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise IdentityUnknown(f"model config {path} is no JSON object")
    return config


def compact(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without cosmetic keys, its long values replaced by their digests.

    Raises:
        IdentityUnknown: a value has no JSON form.
    """
    return {key: _compact(value) for key, value in without_cosmetic_keys(config).items()}


def _compact(value: Any) -> Any:
    text = canonical_json(value).encode("ascii")
    if len(text) <= MAX_VALUE_BYTES:
        return value
    return {"bytes": len(text), "blake3": blake3(text).hexdigest()}


def identify_weights(model: Model) -> dict[str, str]:
    """The commit of a snapshot and the digest of safetensors, one of them at least.

    Raises:
        IdentityUnknown: there is neither, or weights cannot be read.
    """
    files = weight_files(model.folder)
    if model.commit is None:
        return {"digest": digest_files(model.folder, files)}
    # A snapshot's files can be overwritten like any others.
    digest = {"digest": digest_files(model.folder, files)} if files else {}
    return {"commit": model.commit, **digest}


def digest_path(path: str) -> str:
    """The digest of a file that a setting names.

    Raises:
        IdentityUnknown: it cannot be read.
    """
    return digest_whole(Path(path))


def identify_other_files(folder: Path, *, code: bool) -> dict[str, str]:
    """Digests of what else in the folder decides what a model computes, by name.

    Args:
        folder: the model's.
        code: whether the engine runs the folder's Python files.

    Raises:
        IdentityUnknown: one cannot be read.
    """
    ignored = COSMETIC_FILES | set(CONFIG_FILES)
    paths = [path for path in folder.glob("[!.]*.json") if path.name not in ignored]
    if code:
        paths.extend(folder.glob("*.py"))
    return {path.name: digest_whole(path)[:32] for path in sorted(paths) if path.is_file()}
