"""The identity of a VllmConfig: which changes count, and which do not."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from lmcache_persist.connector.vllm.model_identity import read_identity
from lmcache_persist.errors import IdentityUnknown
from lmcache_persist.identity import differing_fields

RAW = {"model_type": "llama", "hidden_size": 256, "rope_theta": 10000.0, "_name_or_path": "x"}


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
        )
        self.load = SimpleNamespace(load_format="auto")
        self.cache = SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False)
        self.parallel = SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        )
        self.v2 = False

    def identity(self) -> dict[str, Any]:
        """The identity as it is now."""
        (self.folder / "config.json").write_text(json.dumps(self.raw))
        save_file({"w": self.weight}, self.folder / "model.safetensors")
        config = SimpleNamespace(
            model_config=self.model,
            load_config=self.load,
            cache_config=self.cache,
            parallel_config=self.parallel,
            use_v2_model_runner=self.v2,
        )
        group = KVCacheGroupSpec(["l"], self.kv)
        return read_identity(config, KVCacheConfig(8, [], [group]))  # type: ignore[arg-type]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """An engine of its own folder."""
    return Engine(tmp_path)


def _change(target: str, **values: Any) -> Callable[[Engine], None]:
    def apply(engine: Engine) -> None:
        vars(getattr(engine, target)).update(values)

    return apply


def _other_weights(engine: Engine) -> None:
    engine.weight = torch.ones(1000)


def _half_kv(engine: Engine) -> None:
    engine.kv = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.half)


def _raw(**values: Any) -> Callable[[Engine], None]:
    return lambda engine: engine.raw.update(values)


def _runner(engine: Engine) -> None:
    engine.v2 = True


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_change("model", revision="v2"), "revision"),
        (_change("model", code_revision="v2"), "code_revision"),
        (_change("model", model_impl="transformers"), "implementation"),
        (_change("model", hf_overrides={"rope_theta": 1.0}), "overrides.rope_theta"),
        (_change("model", dtype=torch.half), "dtype"),
        (_change("model", disable_sliding_window=True), "sliding_window_disabled"),
        (_change("cache", cache_dtype="fp8_e5m2"), "cache_dtype"),
        (_change("parallel", tensor_parallel_size=2), "parallel.tp"),
        (_change("parallel", pipeline_parallel_size=2), "parallel.pp"),
        (_change("parallel", decode_context_parallel_size=2), "parallel.dcp"),
        (_raw(rope_theta=5.0), "config.rope_theta"),
        (_raw(a_key_of_tomorrow=1), "config.a_key_of_tomorrow"),
        (_raw(rope_scaling={"type": "llama3", "factor": 8}), "config.rope_scaling"),
        (_other_weights, "weights.digest"),
        (_half_kv, "kv_dtype[0]"),
        (_runner, "runner"),
    ],
)
def test_one_change_is_another_identity_and_is_named(
    engine: Engine, change: Callable[[Engine], None], field: str
) -> None:
    """Whatever may change KV bytes changes exactly its own field."""
    before = engine.identity()
    change(engine)
    assert differing_fields(before, engine.identity()) == [field]


@pytest.mark.parametrize(
    "change",
    [
        _raw(transformers_version="99", _name_or_path="y", use_cache=False),
        _change("model", max_model_len=2048),
        _change("model", served_model_name="another"),
    ],
)
def test_cosmetic_changes_are_the_same_identity(
    engine: Engine, change: Callable[[Engine], None]
) -> None:
    """Names and versions that decide no byte keep the cache."""
    before = engine.identity()
    change(engine)
    assert engine.identity() == before


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_scaling": {"rope_type": "longrope"}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "unheard_of"}}},
        {"text_config": {"rope_scaling": {"type": "longrope"}}},
    ],
)
def test_length_counts_where_rope_depends_on_it(engine: Engine, scaling: dict[str, Any]) -> None:
    """A scaling that is not known to be independent of max_model_len makes it count."""
    engine.raw.update(scaling)
    before = engine.identity()
    engine.model.max_model_len = 2048
    assert differing_fields(before, engine.identity()) == ["max_model_len"]


def test_quantised_on_disk_is_an_identity_of_its_own(engine: Engine) -> None:
    """Quantisation that the checkpoint brings along is identified by it."""
    engine.raw["quantization_config"] = {"quant_method": "awq"}
    before = engine.identity()
    engine.model.quantization = "awq"
    assert differing_fields(before, engine.identity()) == ["quantization"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_change("load", load_format="dummy"), "'dummy'"),
        (_change("load", load_format="runai_streamer"), "runai_streamer"),
        (_change("model", model_weights="s3://b/m"), "streamed"),
        (_change("model", quantization="fp8"), "quantised to 'fp8'"),
        (_change("model", hf_overrides=lambda config: config), "function"),
        (_change("cache", calculate_kv_scales=True), "KV scales"),
    ],
)
def test_what_cannot_be_identified_is_said(
    engine: Engine, change: Callable[[Engine], None], words: str
) -> None:
    """Dummy, streamed and online-quantised weights have no identity."""
    change(engine)
    with pytest.raises(IdentityUnknown, match=words):
        engine.identity()


def test_absent_config_is_said(engine: Engine) -> None:
    """A model folder without a config has no identity."""
    engine.identity()
    (engine.folder / "config.json").unlink()
    config = SimpleNamespace(
        model_config=engine.model,
        load_config=engine.load,
        cache_config=engine.cache,
        parallel_config=engine.parallel,
        use_v2_model_runner=False,
    )
    with pytest.raises(IdentityUnknown, match="config"):
        read_identity(config, KVCacheConfig(8, [], []))  # type: ignore[arg-type]
