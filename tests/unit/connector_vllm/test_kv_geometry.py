"""From vLLM's KV cache config to groups and layouts."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from lmcache_persist.connector.vllm import layouts
from lmcache_persist.connector.vllm.kv_geometry import (
    SERVED,
    is_checkpoint,
    read_groups,
    scheduling_block_size,
)
from lmcache_persist.errors import GeometryError, NoCacheableGroup, UnsupportedGroup
from lmcache_persist.geometry import Group, GroupKind

HEADS = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


def full(block_size: int = 32, **changes: object) -> FullAttentionSpec:
    """A full attention spec."""
    return FullAttentionSpec(block_size=block_size, **{**HEADS, **changes})


def mamba(mode: str = "align", **changes: object) -> MambaSpec:
    """A recurrent spec: a state of 268,288 bytes, padded to the page of the other groups."""
    fields = {
        "block_size": 640,
        "shapes": ((3, 768), (4, 128, 128)),
        "dtypes": (torch.bfloat16, torch.float32),
        "page_size_padded": 327_680,
        "mamba_cache_mode": mode,
        **changes,
    }
    return MambaSpec(**fields)


def sliding_mla(**changes: object) -> SlidingWindowMLASpec:
    """A sliding window of latent attention."""
    one_head = {**HEADS, "num_kv_heads": 1}
    return SlidingWindowMLASpec(block_size=32, sliding_window=128, **one_head, **changes)


def config(*specs: KVCacheSpec, num_blocks: int = 10, **group: object) -> KVCacheConfig:
    """One group per spec, two layers each."""
    groups = []
    for index, spec in enumerate(specs):
        names = list(getattr(spec, "kv_cache_specs", {})) or [f"{index}.a", f"{index}.b"]
        groups.append(KVCacheGroupSpec(names, spec, **group))
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def test_full_groups_keep_their_order_and_sizes() -> None:
    """Two full groups of 544 and 64 are two groups of 544 and 64."""
    assert read_groups(config(full(544), full(64)), 1) == (
        Group(GroupKind.FULL, 544, 544),
        Group(GroupKind.FULL, 64, 64),
    )


def test_context_parallelism_multiplies_sharded_groups_only() -> None:
    """A block id covers its slots on every rank of dcp if, and only if, dcp shards it."""
    assert read_groups(config(full(32)), 4)[0].tokens_per_block == 128
    assert read_groups(config(full(32, dcp_sharded=False)), 4)[0].tokens_per_block == 32


def test_latent_attention_is_full() -> None:
    """MLA keeps every token of the prefix."""
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    assert read_groups(config(spec), 1)[0].kind is GroupKind.FULL


def test_hybrids_are_read_group_by_group() -> None:
    """Recurrent groups keep one state a block; a window reaches as far as it is retained."""
    sliding = SlidingWindowSpec(
        block_size=128, sliding_window=512, extra_retained_tokens=3, **HEADS
    )
    assert read_groups(config(mamba(), full(640), sliding, sliding_mla()), 1) == (
        Group(GroupKind.RECURRENT, 640, 1),
        Group(GroupKind.FULL, 640, 640),
        Group(GroupKind.SLIDING, 128, 128, 515),
        Group(GroupKind.SLIDING, 32, 32, 128),
    )


@pytest.mark.parametrize(
    ("start", "end", "expected"), [(0, 1500, True), (896, 1408, False), (0, 1280, False)]
)
def test_checkpoint_inside_a_step(start: int, end: int, expected: bool) -> None:
    """Only a backend that exports states has them, and not in the block that the step began in."""
    exporting = mamba(num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)
    for spec, exports in ((exporting, True), (mamba(), False), (full(640), False)):
        cache_config = config(spec)
        cache_config.hash_block_size = 640
        found = is_checkpoint(cache_config, 0, range(start, end), 1280)
        assert found == (expected and exports)
    assert not is_checkpoint(config(exporting), 0, range(1500), 1280)


def test_states_are_not_sharded_by_context_parallelism() -> None:
    """Every rank of dcp holds the whole state of its block's tokens."""
    found = read_groups(config(mamba(block_size=128), full(32)), 4)
    assert [group.tokens_per_block for group in found] == [128, 128]


def test_steps_are_cut_by_the_smallest_cacheable_block() -> None:
    """As vLLM does it: a small block that takes no part in prefixes does not count."""
    some = config(mamba(), full(640), full(16))
    some.kv_cache_groups[2].enable_kv_transfer = False
    assert scheduling_block_size(some) == 640


def test_compressed_tokens_take_fewer_slots() -> None:
    """A block of 400 tokens that are kept as 100 states spans 400 tokens."""
    spec = MLAAttentionSpec(
        block_size=400, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, tokens_per_state=4
    )
    assert read_groups(config(spec), 1) == (Group(GroupKind.FULL, 400, 100),)


def test_layers_that_share_a_cache_are_stored_once() -> None:
    """Whatever the engine registers, the groups say which layers have pages of their own."""
    wrapped = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"0.a": full()})
    cache_config = config(wrapped)
    cache_config.kv_cache_groups[0].layer_names.append("0.b")
    groups = read_groups(cache_config, 1)
    (layers,) = layouts.read_layers(caches(10), cache_config, groups)
    assert [layer.name for layer in layers] == ["0.a"]


def test_states_lie_in_the_pages_of_other_groups() -> None:
    """A state is shorter than the page that its block shares with other groups' blocks."""
    cache_config = config(mamba())
    groups = read_groups(cache_config, 1)
    memory = torch.zeros(10 * 327_680, dtype=torch.int8)
    state = memory.as_strided((10, 1, 1, 268_288), (327_680, 268_288, 268_288, 1))
    registered = {"0.a": state, "0.b": state.clone(), "not.ours": state}
    layers = layouts.read_layers(registered, cache_config, groups)
    found = layouts.describe(layers, cache_config, groups, engine_config())
    (form,) = found["groups"][0]["forms"]
    assert form["spec"]["dtypes"] == ["torch.bfloat16", "torch.float32"]
    assert form["spec"]["shapes"] == [[3, 768], [4, 128, 128]]
    assert form["block_shape"] == [1, 1, 268_288]
    other = config(mamba(dtypes=(torch.float16, torch.float32)))
    assert layouts.describe(layers, other, groups, engine_config()) != found


def test_wrapped_layers_are_read_one_by_one() -> None:
    """Layers of other sizes in one group are one group, of other kinds are refused."""
    wrapped = UniformTypeKVCacheSpecs(
        block_size=32, kv_cache_specs={"a": full(), "b": full(head_size=128)}
    )
    assert read_groups(config(wrapped), 1) == (Group(GroupKind.FULL, 32, 32),)
    mixed = UniformTypeKVCacheSpecs(
        block_size=32,
        kv_cache_specs={
            "a": full(),
            "b": ChunkedLocalAttentionSpec(block_size=32, attention_chunk_size=64, **HEADS),
        },
    )
    with pytest.raises(UnsupportedGroup, match="ChunkedLocalAttentionSpec"):
        read_groups(config(mixed), 1)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (mamba("none"), "group 1 is recurrent in mode 'none'"),
        (mamba("all"), "group 1 is recurrent in mode 'all'"),
        (mamba(num_speculative_blocks=2), "2 speculative blocks"),
        (
            ChunkedLocalAttentionSpec(block_size=32, attention_chunk_size=64, **HEADS),
            "ChunkedLocalAttentionSpec",
        ),
        (sliding_mla(bounded_replay=True), "again over the last 128 tokens"),
        (SinkFullAttentionSpec(block_size=32, sink_len=4, **HEADS), "SinkFullAttentionSpec"),
        (full(non_causal=True), "non-causal"),
    ],
)
def test_what_is_not_served_is_refused_by_name(spec: KVCacheSpec, words: str) -> None:
    """The refusal names group and kind, and says what to do."""
    with pytest.raises(UnsupportedGroup, match=words) as caught:
        read_groups(config(full(), spec), 1)
    assert "without this connector" in str(caught.value)


def test_served_specs_are_the_documented_ones() -> None:
    """The table in docs/vllm.md has each spec that is served with its kind, and no other."""
    text = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    table = text.partition("## Which KV cache specs are served")[2].partition("\n## ")[0]
    documented: dict[str, str] = {}
    for row in table.splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if len(cells) == 4 and cells[1] in list(GroupKind):
            documented.update(dict.fromkeys(re.findall(r"`(\w+Spec)`", cells[0]), cells[1]))
    assert documented == {spec.__name__: kind.value for spec, kind in SERVED.items()}
    for refused in ("ChunkedLocalAttentionSpec", "SinkFullAttentionSpec"):
        assert f"`{refused}`" in table
        assert refused not in documented


def test_draft_layers_are_refused() -> None:
    """A draft model's KV depends on the token after a chunk."""
    with pytest.raises(UnsupportedGroup, match="draft"):
        read_groups(config(full(), is_eagle_group=True), 1)


def test_groups_that_are_not_transferred_are_scratch() -> None:
    """They keep their place and take no part; a model of only such has nothing to store."""
    some = config(full(544), full(64))
    some.kv_cache_groups[1].enable_kv_transfer = False
    assert read_groups(some, 1)[1] == Group(GroupKind.SCRATCH, 0)
    with pytest.raises(NoCacheableGroup):
        read_groups(config(full(), enable_kv_transfer=False), 1)
    assert issubclass(NoCacheableGroup, GeometryError)


def test_pipeline_stages_have_one_geometry() -> None:
    """A stage that has no layer of a group has the group, and a layout without layers of it."""
    wrapped = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"0.a": full(), "0.b": full()})
    whole = config(wrapped, mamba(block_size=32))
    stage = config(wrapped, mamba(block_size=32))
    stage.kv_cache_groups[1].layer_names = []
    other = config(wrapped, mamba(block_size=32))
    other.kv_cache_groups[0].layer_names = []
    groups = read_groups(whole, 1)
    assert read_groups(stage, 1) == read_groups(other, 1) == groups
    layers = layouts.read_layers(caches(10), stage, groups)
    assert [len(members) for members in layers] == [2, 0]
    found = layouts.describe(layers, stage, groups, engine_config())
    assert [len(one["layers"]) for one in found["groups"]] == [2, 0]
    assert found["groups"][1]["kind"] == "recurrent"


def engine_config(isa: str = "amx") -> SimpleNamespace:
    """As much of a VllmConfig as a layout reads."""
    module = SimpleNamespace(isa=isa, attn_backend=SimpleNamespace(get_name=lambda: "CPU_ATTN"))
    context = dict.fromkeys(("0.a", "0.b"), module)
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))


def caches(num_blocks: int, block: int = 32, ratio: int = 1) -> dict[str, torch.Tensor]:
    """Two layers of ``[n, H, N, C]``, ``ratio`` kernel blocks in each block."""
    shape = (num_blocks * ratio, 2, block // ratio, 128)
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name in ("0.a", "0.b")}


def describe(num_blocks: int, isa: str = "amx", ratio: int = 1) -> dict:
    """The layout of an engine with that much memory on such a host."""
    cache_config = config(full(), num_blocks=num_blocks)
    groups = read_groups(cache_config, 1)
    layers = layouts.read_layers(caches(num_blocks, ratio=ratio), cache_config, groups)
    return layouts.describe(layers, cache_config, groups, engine_config(isa))


def test_memory_size_is_not_in_the_layout() -> None:
    """An engine with more blocks has the same layout."""
    assert describe(10) == describe(77)


def test_instruction_set_is_in_the_layout() -> None:
    """Hosts that write other bytes for the same shape have other layouts."""
    assert describe(10, isa="amx") != describe(10, isa="vec")


def layout(
    spec: KVCacheSpec, names: tuple[str, ...] = ("0.a", "0.b"), backend: str = "CPU_ATTN"
) -> dict:
    """The layout of two layers of equal caches under one spec."""
    cache_config = config(spec)
    cache_config.kv_cache_groups[0].layer_names = list(names)
    groups = read_groups(cache_config, 1)
    layers = layouts.read_layers(caches(10), cache_config, groups)
    module = SimpleNamespace(isa=None, attn_backend=SimpleNamespace(get_name=lambda: backend))
    context = SimpleNamespace(static_forward_context=dict.fromkeys(names, module))
    engine = SimpleNamespace(compilation_config=context)
    return layouts.describe(layers, cache_config, groups, engine)


def test_equal_byte_counts_are_not_enough() -> None:
    """Caches of one shape and size differ by order of layers, backend and every field of a spec."""
    found = [
        layout(full()),
        layout(full(), names=("0.b", "0.a")),
        layout(full(), backend="OTHER"),
        layout(full(num_kv_heads=4, head_size=32)),
        layout(full(dtype=torch.float16)),
        layout(full(head_size_v=32)),
        layout(full(sliding_window=512)),
        layout(full(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)),
    ]
    texts = {json.dumps(one) for one in found}
    assert len(texts) == len(found)
    assert layout(full()) == found[0]


def test_layers_that_look_alike_share_a_form() -> None:
    """A model of two hundred layers fits into a registration."""
    names = tuple(f"model.layers.{at}.self_attn.attn" for at in range(200))
    cache_config = config(full())
    cache_config.kv_cache_groups[0].layer_names = list(names)
    groups = read_groups(cache_config, 1)
    registered = dict.fromkeys(names, caches(10)["0.a"])
    layers = layouts.read_layers(registered, cache_config, groups)
    found = layouts.describe(layers, cache_config, groups, engine_config())
    (group,) = found["groups"]
    assert len(group["layers"]) == 200
    assert len(group["forms"]) == 1
    assert len(json.dumps(found)) < 32_768


def test_split_blocks_keep_the_engine_s_blocks_first() -> None:
    """A block that is split into kernel blocks is one block, of another layout."""
    cache_config = config(full(), num_blocks=10)
    groups = read_groups(cache_config, 1)
    layers = layouts.read_layers(caches(10, ratio=2), cache_config, groups)
    assert [layer.cache.shape for layer in layers[0]] == [(10, 2, 2, 16, 128)] * 2
    assert describe(10, ratio=2) != describe(10, ratio=1)


@pytest.mark.parametrize("ratio", [1, 2])
def test_two_planes_are_two_pages_of_a_block(ratio: int) -> None:
    """K of all blocks before V of all blocks: a layer of two caches, described as such."""
    cache_config = config(full(), num_blocks=10)
    groups = read_groups(cache_config, 1)
    both = torch.arange(2 * 10 * 32 * 4).view(2, 10 * ratio, 32 // ratio, 4)
    registered = {"0.a": both, "0.b": both.clone()}
    layers = layouts.read_layers(registered, cache_config, groups)
    first, second = layers[0][0].planes
    assert first.shape[0] == second.shape[0] == 10
    assert torch.equal(second.flatten(), both[1].flatten())
    found = layouts.describe(layers, cache_config, groups, engine_config())
    assert found["groups"][0]["forms"][0]["planes"] == 2


def test_other_number_of_blocks_is_refused() -> None:
    """A cache that is no multiple of the engine's blocks is not guessed at."""
    cache_config = config(full(), num_blocks=9)
    with pytest.raises(UnsupportedGroup, match="10 kernel blocks, expected a multiple of 9"):
        layouts.read_layers(caches(10), cache_config, read_groups(cache_config, 1))


def test_absent_layer_is_refused() -> None:
    """A layer of ours that was not registered is named."""
    cache_config = config(full(), num_blocks=10)
    with pytest.raises(UnsupportedGroup, match=r"layer 0\.b"):
        layouts.read_layers({"0.a": caches(10)["0.a"]}, cache_config, read_groups(cache_config, 1))
