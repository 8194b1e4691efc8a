"""What must not share a byte does not, and what must does: at a real server, by real keys."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from lmcache_persist.connector.vllm.requests import RequestExtra, Requests
from lmcache_persist.hashing import ChunkHasher
from support.emulated import EmulatedEngine, identity
from support.identities import later, lora, write_adapter
from support.server import ServerProcess, inspect
from support.vllm_config import Engine
from support.vllm_fakes import request

CHUNK = 640
OBJECT_BYTES = 4096


def chain(num_chunks: int, extra: RequestExtra | str | None = None) -> list[bytes]:
    """The chunk hashes of one prompt."""
    assert not isinstance(extra, str)
    found: list[Any] = []
    encoded = extra.of_chunks(CHUNK, num_chunks) if extra else b""
    assert ChunkHasher(CHUNK).extend(found, range(num_chunks * CHUNK), encoded)
    return found


class Engines:
    """Engines of one server, each with an id of its own."""

    def __init__(self, server: ServerProcess) -> None:
        self._server, self._numbers = server, itertools.count()

    def hits(self, changes: dict[str, Any], hashes: Sequence[bytes]) -> int:
        """Chunks that a fresh engine of this identity finds; it stores all of them then."""
        name = f"engine-{next(self._numbers)}"
        with EmulatedEngine(
            self._server.url, [CHUNK], OBJECT_BYTES, name=name, changes=changes
        ) as one:
            one.join()
            found = one.lookup(hashes, len(hashes) * CHUNK + 1).tokens // CHUNK
            assert one.store(hashes) == len(hashes)
            assert one.lookup(hashes, len(hashes) * CHUNK + 1).tokens == len(hashes) * CHUNK
        return found


@pytest.fixture
def engines(server: ServerProcess) -> Engines:
    """Those of a fresh server."""
    return Engines(server)


def _revision(engine: Engine) -> None:
    engine.model.revision = "main"


def _path(engine: Engine) -> None:
    engine.folder = engine.folder.parent / "elsewhere"
    engine.folder.mkdir()
    engine.model.model = str(engine.folder)
    engine.model.served_model_name = "the same"


def _weights(engine: Engine) -> None:
    engine.weight = torch.ones(1000)


def _kv(engine: Engine, dtype: torch.dtype) -> None:
    engine.kv = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=dtype)


def _half(engine: Engine) -> None:
    # The cache's own dtype stays "auto", and its bytes are as many.
    engine.model.dtype = torch.float16
    _kv(engine, torch.float16)


def _e4m3(engine: Engine) -> None:
    engine.cache.cache_dtype = "fp8_e4m3"
    _kv(engine, torch.uint8)


def _e5m2(engine: Engine) -> None:
    engine.cache.cache_dtype = "fp8_e5m2"
    _kv(engine, torch.uint8)


def _quantised(engine: Engine) -> None:
    engine.model.quantization = "awq"
    engine.raw["quantization_config"] = {"quant_method": "awq"}


def _other_bits(engine: Engine) -> None:
    _quantised(engine)
    engine.raw["quantization_config"] = {"quant_method": "awq", "bits": 8}


def _cosmetic(engine: Engine) -> None:
    engine.model.served_model_name, engine.model.seed = "another", 7
    engine.cache.gpu_memory_utilization, engine.num_blocks = 0.4, 99
    engine.scheduler.max_num_batched_tokens, engine.scheduler.max_num_seqs = 512, 2
    engine.raw["transformers_version"] = "99"


CHANGES = (_revision, _path, _weights, _half, _e4m3, _e5m2, _quantised, _other_bits)


def test_one_changed_field_shares_nothing_and_back_again_all(
    engines: Engines, tmp_path: Path
) -> None:
    """Case B1: revision (none is no wildcard), path, weights, dtype under ``auto``, one fp8 or the
    other, quantisation: each is cold for all 8 chunks; unchanged, or changed in what does not
    count, it hits 8.
    """
    hashes = chain(8)

    def hits(change: Callable[[Engine], None] | None) -> int:
        # All in one folder, but for the one that is elsewhere.
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        engine = Engine(folder)
        if change is not None:
            change(engine)
        return engines.hits(engine.identity(), hashes)

    assert hits(None) == 0
    found = {change.__name__: hits(change) for change in (*CHANGES, _cosmetic)}
    assert found == {**{change.__name__: 0 for change in CHANGES}, "_cosmetic": 8}
    assert hits(None) == 8


def test_base_adapters_and_tenants_share_nothing(engines: Engines, tmp_path: Path) -> None:
    """Case B4: the base model stores two chunks; adapters, one of them with new weights under
    its old name, and tenants find none of them; no salt and an empty one are the same.
    """
    requests = Requests(later())
    first = write_adapter(tmp_path / "a")

    def hits(source: Requests = requests, **changes: Any) -> int:
        extra = source.identify(request(num_tokens=2 * CHUNK, **changes))
        return engines.hits({}, chain(2, extra))

    assert [hits(), hits(), hits(cache_salt="")] == [0, 2, 2]
    assert hits(lora_request=lora(first, "a", 1)) == 0
    assert hits(lora_request=lora(first, "a", 1)) == 2
    assert hits(lora_request=lora(write_adapter(tmp_path / "b", 2.0), "b", 2)) == 0
    assert [hits(cache_salt="t1"), hits(cache_salt="t2"), hits(cache_salt="t1")] == [0, 0, 2]
    assert hits(cache_salt="t1", lora_request=lora(first, "a", 1)) == 0
    write_adapter(first, 3.0)
    reloaded = Requests(later())
    assert hits(reloaded, lora_request=lora(first, "a", 1)) == 0


def test_names_that_look_alike_are_stored_apart(engines: Engines, server: ServerProcess) -> None:
    """Case B6: separators, spellings, NUL and 300 characters: all stored, none found by another."""
    composed = unicodedata.normalize("NFC", "mod\u00e9le")
    decomposed = unicodedata.normalize("NFD", composed)
    pairs: list[tuple[str, str | None]] = [
        ("org/model-SEP-name", None),
        ("org/model/name", None),
        ("a@b", "c"),
        ("a", "b@c"),
        (composed, None),
        (decomposed, None),
        ("a", composed),
        ("a", decomposed),
        ("a\0b", None),
        ("a", "\0"),
        ("m" * 300, "s" * 300),
        ("m" * 300, "s" * 299),
    ]
    for (model, salt), expected in itertools.product(pairs, (0, 1)):
        hashes = chain(1, Requests().identify(request(num_tokens=CHUNK, cache_salt=salt)))
        assert engines.hits(identity(model=model), hashes) == expected, (model, salt)
    assert inspect(server.data_dir)["store"]["objects"] == len(pairs)
