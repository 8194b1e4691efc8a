"""The identity of a VllmConfig: which changes count, and which do not."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from lmcache_persist.connector.vllm import model_files, model_identity
from lmcache_persist.connector.vllm.model_identity import read_identity
from lmcache_persist.errors import IdentityUnknown
from lmcache_persist.identity import differing_fields
from support.vllm_config import Engine

GENERATION = "generation.attn_temperature_tuning"
ROPE_OVERRIDE = "overrides.rope_parameters"


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


def _file(name: str, text: str = "{}") -> Callable[[Engine], None]:
    def apply(engine: Engine) -> None:
        (engine.folder / name).write_text(text)

    return apply


def _both(*changes: Callable[[Engine], None]) -> Callable[[Engine], None]:
    def apply(engine: Engine) -> None:
        for change in changes:
            change(engine)

    return apply


def _plugin(engine: Engine) -> None:
    engine.model_class = type("Other", (), {"__module__": "pytest.models"})


def _set(**values: Any) -> Callable[[Engine], None]:
    return lambda engine: vars(engine).update(values)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_change("model", revision="v2"), "revision"),
        (_change("model", code_revision="v2"), "code_revision"),
        (_change("model", architectures=["Other"]), "implementation.architecture"),
        (_change("model", hf_overrides={"rope_theta": 1.0}), "overrides.rope_theta"),
        (_change("model", dtype=torch.half), "dtype"),
        (_change("model", disable_sliding_window=True), "sliding_window_disabled"),
        (_change("cache", cache_dtype="fp8_e5m2"), "cache_dtype"),
        (_change("parallel", tensor_parallel_size=2), "parallel.tp"),
        (_change("parallel", pipeline_parallel_size=2), "parallel.pp"),
        (_change("parallel", decode_context_parallel_size=2), "parallel.dcp"),
        (_change("parallel", prefill_context_parallel_size=2), "parallel.pcp"),
        (_change("load", load_format="mistral"), "load_format"),
        (
            _change("model", override_generation_config={"attn_temperature_tuning": True}),
            GENERATION,
        ),
        (_file("generation_config.json", '{"attn_temperature_tuning": 1}'), GENERATION),
        (_file("sparse_attention_config.json"), "files.sparse_attention_config.json"),
        (_file("model.safetensors.index.json"), "files.model.safetensors.index.json"),
        (_file("params.json"), "second_config"),
        (_set(additional={"plugin": 1}), "additional.plugin"),
        (_set(additional={"plugin": {"of": 1}}), "additional.plugin"),
        (_raw(rope_scaling={"type": "linear", "factor": 2}), "config.rope_scaling"),
        (_change("model", hf_overrides={"rope_parameters": {"factor": 8.0}}), ROPE_OVERRIDE),
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
        _change("model", served_model_name="another", seed=5, enforce_eager=True),
        _change("model", tokenizer="other", override_generation_config={"temperature": 0.1}),
        _change("load", load_format="safetensors", use_tqdm_on_load=False),
        _change("cache", gpu_memory_utilization=0.5, enable_prefix_caching=False),
        _change("scheduler", max_num_batched_tokens=512, max_num_seqs=2),
        _change("parallel", cp_kv_cache_interleave_size=16, data_parallel_size=2),
        _change(
            "parallel", master_port=29501, data_parallel_rpc_port=29502, max_parallel_loading=4
        ),
        _set(num_blocks=99),
        _file("tokenizer_config.json"),
        _file("generation_config.json", '{"temperature": 1.0}'),
        _file("modeling_own.py", "x = 1"),
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
        {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 2048}},
        {"rope_scaling": {"rope_type": "default", "type": "su"}},
        {"dual_chunk_attention_config": {"chunk_size": 8}},
        {"text_config": {"model_type": "llama4_text"}},
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
        (_change("model", quantization_config={"linear": 1}), "quantization_config"),
        (_change("model", is_encoder_decoder=True), "encoder"),
        (_raw(text_model_id="org/other"), "second repository"),
        (_change("model", hf_overrides={"x": object()}), "canonical"),
        (
            _both(
                _raw(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
                _change("model", using_transformers_backend=lambda: True),
            ),
            "longest sequence",
        ),
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
    with pytest.raises(IdentityUnknown, match="config"):
        read_identity(engine.config(), KVCacheConfig(8, [], []))


def test_length_counts_through_an_override(engine: Engine) -> None:
    """A scaling that only the overrides name makes the length count as well."""
    engine.model.hf_overrides = {"rope_parameters": {"rope_type": "longrope"}}
    before = engine.identity()
    engine.model.max_model_len = 2048
    assert differing_fields(before, engine.identity()) == ["max_model_len"]


def test_code_from_elsewhere_is_not_trusted_with_lengths(engine: Engine) -> None:
    """What a plugin's model does with max_model_len is not known, and its version counts."""
    _plugin(engine)
    before = engine.identity()
    assert before["implementation"]["versions"] == {"pytest": pytest.__version__}
    engine.model.max_model_len = 2048
    assert differing_fields(before, engine.identity()) == ["max_model_len"]


def test_code_that_the_folder_brings_along_counts(engine: Engine) -> None:
    """With trust_remote_code the model's Python files are part of it."""
    engine.model.trust_remote_code = True
    (engine.folder / "modeling_own.py").write_text("x = 1")
    before = engine.identity()
    (engine.folder / "modeling_own.py").write_text("x = 2")
    assert differing_fields(before, engine.identity()) == ["files.modeling_own.py"]


def test_engine_version_is_named(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release may arrange the bytes of a page of equal shape in another way."""
    before = engine.identity()
    monkeypatch.setattr(model_identity.vllm, "__version__", "99.0")
    assert differing_fields(before, engine.identity()) == ["engine.vllm"]


def test_interleaving_counts_where_ranks_share_a_context(engine: Engine) -> None:
    """Which rank holds which token is part of the identity once there are several."""
    engine.parallel.decode_context_parallel_size = 2
    before = engine.identity()
    engine.parallel.cp_kv_cache_interleave_size = 16
    assert differing_fields(before, engine.identity()) == ["parallel.interleave"]


def test_what_decides_embeddings_counts(engine: Engine) -> None:
    """Pruned videos are other tokens' KV; the size of a cache of items is not."""
    engine.model.multimodal_config = SimpleNamespace(
        video_pruning_rate=0.0, mm_processor_cache_gb=4
    )
    before = engine.identity()
    engine.model.multimodal_config.mm_processor_cache_gb = 0
    assert engine.identity() == before
    engine.model.multimodal_config.video_pruning_rate = 0.5
    assert differing_fields(before, engine.identity()) == ["multimodal.video_pruning_rate"]


def test_no_revision_is_no_wildcard(engine: Engine) -> None:
    """None is a value: it matches None, and none of two revisions."""
    found = []
    for revision in (None, "a", "b", None):
        engine.model.revision = revision
        found.append(json.dumps(engine.identity(), sort_keys=True))
    assert found[0] == found[3]
    assert len(set(found)) == 3


def test_long_values_are_kept_as_their_digests(engine: Engine) -> None:
    """A config of a megabyte fits into an identity, and a change in it is still named."""
    engine.raw["quantization_config"] = {"layers": {f"l{n}": n for n in range(100_000)}}
    before = engine.identity()
    assert len(json.dumps(before)) < 16_384
    engine.raw["quantization_config"]["layers"]["l7"] = 8
    assert differing_fields(before, engine.identity()) == ["config.quantization_config.blake3"]


def test_dtypes_are_those_of_groups_without_a_layer_here(engine: Engine) -> None:
    """A pipeline rank that has no layer of a group says the same as the others."""
    engine.identity()
    full, bare = (KVCacheGroupSpec(names, engine.kv) for names in (["l"], []))
    both = [read_identity(engine.config(), KVCacheConfig(8, [], [one])) for one in (full, bare)]
    assert both[0] == both[1]


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path: Path) -> Engine:
    """An engine of a hub snapshot."""
    folder = tmp_path / "models--org--a--b" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return Engine(folder)


def test_hub_snapshot_is_one_model_by_name_and_by_path(
    snapshot: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline vLLM gives the path, online the name, and the revision only if it could ask."""
    found = snapshot.identity()
    assert found["model"] == "org/a--b"
    assert found["revision"] == "main"
    assert found["weights"]["commit"] == COMMIT
    config = str(snapshot.folder / "config.json")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: config)
    snapshot.model.model = "org/a--b"
    assert snapshot.identity() == found
    snapshot.model.revision = "main"
    assert snapshot.identity() == found


def test_overwritten_snapshot_is_noticed(snapshot: Engine) -> None:
    """A commit in the path does not stop anybody from writing there."""
    before = snapshot.identity()
    snapshot.weight = torch.ones(1000)
    assert differing_fields(before, snapshot.identity()) == ["weights.digest"]


def test_snapshot_without_safetensors_has_its_commit(snapshot: Engine) -> None:
    """Other formats are identified by the commit alone; a plain folder of them by nothing."""
    snapshot.identity()
    (snapshot.folder / "model.safetensors").unlink()
    located = model_files.locate(snapshot.model)
    assert model_files.identify_weights(located) == {"commit": COMMIT}
    with pytest.raises(IdentityUnknown, match="no safetensors"):
        model_files.identify_weights(located._replace(commit=None))
