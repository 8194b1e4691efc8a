"""What identifies a LoRA adapter, and when nothing does."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_persist.connector.vllm import adapters
from lmcache_persist.connector.vllm.adapters import Adapters
from support.identities import later, lora, write_adapter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter."""
    return write_adapter(tmp_path / "a")


def key(found: Any) -> bytes:
    """The key of an adapter that was identified."""
    assert found is not None
    return bytes(found.key)


def test_same_files_have_the_same_key_in_every_engine(folder: Path) -> None:
    """Neither the engine's number for it nor the time of asking counts."""
    assert key(later().identify(lora(folder))) == key(later().identify(lora(folder, number=7)))


def test_every_difference_is_another_key(folder: Path, tmp_path: Path) -> None:
    """Name, path, weights, config, kind, and the engine's settings for adapters."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    options = SimpleNamespace(lora_dtype=torch.half, target_modules=["q_proj"])
    keys = [
        key(later().identify(lora(folder))),
        key(later().identify(lora(folder, name="b"))),
        key(later().identify(lora(copy))),
        key(later().identify(lora(folder, is_3d_lora_weight=True))),
        key(later(options).identify(lora(folder))),
        key(later().identify(lora(write_adapter(tmp_path / "a", value=2.0)))),
        key(later().identify(lora(write_adapter(tmp_path / "a", rank=4)))),
    ]
    assert len(set(keys)) == len(keys)


def test_large_weights_are_sampled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a size the digest is made of samples, and still tells weights apart."""
    monkeypatch.setattr(adapters, "MAX_WHOLE_BYTES", 16)
    first = key(later().identify(lora(folder)))
    write_adapter(folder, value=2.0)
    assert key(later().identify(lora(folder))) != first


def test_changed_files_say_nothing_about_the_engine_s_memory(folder: Path) -> None:
    """Overwritten while the engine runs: it may hold either, so neither is cached any more."""
    known = later()
    first = known.identify(lora(folder))
    assert first is not None
    assert first.is_unchanged()
    before = write_adapter(folder, value=2.0)
    assert not first.is_unchanged()
    assert known.identify(lora(before)) is None
    write_adapter(folder, value=1.0)
    assert known.identify(lora(folder)) is None


def test_files_newer_than_the_engine_are_not_trusted(folder: Path) -> None:
    """The engine may have been told to load what was there before them."""
    assert Adapters(engine_since=time.time() - 60).identify(lora(folder)) is None
    # A time that was set by hand does not make them older.
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    assert Adapters(engine_since=time.time() - 60).identify(lora(folder)) is None


def test_number_that_means_two_adapters_is_neither(folder: Path, tmp_path: Path) -> None:
    """The engine keeps what it loaded first under a number."""
    other, known = write_adapter(tmp_path / "b", value=2.0), later()
    assert known.identify(lora(folder)) is not None
    assert known.identify(lora(other, name="b")) is None
    assert known.identify(lora(folder)) is None


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_absent_file_is_no_identity(folder: Path, name: str) -> None:
    """A name on the hub, another format, a broken folder."""
    (folder / name).unlink()
    assert later().identify(lora(folder)) is None


def test_vanished_files_are_changed_files(folder: Path) -> None:
    """What cannot be looked at any more is not what it was."""
    found = later().identify(lora(folder))
    assert found is not None
    shutil.rmtree(folder)
    assert not found.is_unchanged()


def test_the_number_of_adapters_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it new ones are not cached; forgetting old ones would forget their stamps."""
    monkeypatch.setattr(adapters, "MAX_ADAPTERS", 1)
    known = later()
    assert known.identify(lora(folder, number=1)) is not None
    assert known.identify(lora(folder, number=2)) is None
    assert known.identify(lora(folder, number=1)) is not None
