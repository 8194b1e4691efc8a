"""What besides the tokens goes into chunk hashes (cases B4 and B6)."""

from __future__ import annotations

import itertools
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_persist.connector.vllm.requests import RequestExtra, Requests
from lmcache_persist.hashing import ChunkHasher, ExtraKey, ExtraKind, encode_extra
from lmcache_persist.identity import fingerprint
from support.identities import feature, item, later, lora, write_adapter
from support.vllm_fakes import request

CHUNK = 640
TOKENS = 1280


def prompt(**changes: Any) -> Any:
    """A request of two chunks."""
    return request(num_tokens=TOKENS, **changes)


def hashes(found: RequestExtra | str, chunk: int = CHUNK, tokens: int = TOKENS) -> list[bytes]:
    """The chunk hashes of the prompt with this extra."""
    assert isinstance(found, RequestExtra), found
    chain: list[Any] = []
    extra = found.of_chunks(chunk, tokens // chunk)
    assert ChunkHasher(chunk).extend(chain, range(100, 100 + tokens), extra)
    return chain


def test_base_model_adapters_and_tenants_share_nothing(tmp_path: Path) -> None:
    """B4: base, two adapters, one of them with new weights, two tenants: six worlds."""
    requests, paths = (
        Requests(later()),
        [write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", 2.0)],
    )
    worlds = [
        hashes(requests.identify(prompt())),
        hashes(requests.identify(prompt(lora_request=lora(paths[0], "a", 1)))),
        hashes(requests.identify(prompt(lora_request=lora(paths[1], "b", 2)))),
        hashes(requests.identify(prompt(cache_salt="t1"))),
        hashes(requests.identify(prompt(cache_salt="t2"))),
        hashes(requests.identify(prompt(cache_salt="t1", lora_request=lora(paths[0], "a", 1)))),
    ]
    write_adapter(tmp_path / "a", 3.0)
    reloaded = Requests(later()).identify(prompt(lora_request=lora(paths[0], "a", 1)))
    worlds.append(hashes(reloaded))
    everything = list(itertools.chain(*worlds))
    assert len(everything) == len(set(everything)) == 2 * len(worlds)


def test_adapter_that_cannot_be_told_is_not_cached(tmp_path: Path) -> None:
    """B4: re-loaded in a running engine, its requests are not cached from then on."""
    path, requests = write_adapter(tmp_path / "a"), Requests(later())
    one = prompt(lora_request=lora(path))
    found = requests.identify(one)
    assert isinstance(found, RequestExtra)
    assert found.still_holds()
    write_adapter(path, 2.0)
    assert not found.still_holds()
    assert requests.identify(one) == "lora"
    assert isinstance(requests.identify(prompt()), RequestExtra)


def test_empty_salt_is_none() -> None:
    """B4: no salt, an empty one and the base model are one world."""
    plain = hashes(Requests().identify(prompt()))
    assert hashes(Requests().identify(prompt(cache_salt=""))) == plain


def test_item_is_in_the_chunks_that_it_overlaps_and_all_later_ones() -> None:
    """Chunks before an image are shared with other images, the rest with none."""
    pixels = item(pixels=torch.ones(4))
    chains = [
        hashes(Requests().identify(prompt(mm_features=features)), chunk=100)
        for features in (
            [],
            [feature(pixels, offset=250, length=100)],
            [feature(pixels, offset=251, length=100)],
            [feature(item(pixels=torch.zeros(4)), offset=250, length=100)],
            [feature(pixels, offset=250, length=101)],
        )
    ]
    for one, other in itertools.combinations(chains, 2):
        assert one[:2] == other[:2]
        assert not set(one[2:]) & set(other[2:])


def test_signed_offset_counts_where_an_item_began_before_the_chunk() -> None:
    """Two images whose ends lie in a chunk alike, but whose beginnings do not."""
    early, late = (
        Requests().identify(
            prompt(mm_features=[feature(item(pixels=torch.ones(2)), offset=at, length=300 - at)])
        )
        for at in (50, 60)
    )
    assert isinstance(early, RequestExtra)
    assert isinstance(late, RequestExtra)
    assert early.of_chunks(100, 12)[2] != late.of_chunks(100, 12)[2]
    assert early.of_chunks(100, 12)[3] == late.of_chunks(100, 12)[3] == b""


def test_two_items_are_told_from_their_exchange() -> None:
    """The order of images in a chunk counts."""
    one, other = item(pixels=torch.ones(2)), item(pixels=torch.zeros(2))
    chains = [
        hashes(
            Requests().identify(
                prompt(
                    mm_features=[
                        feature(first, offset=0, length=5, name="1"),
                        feature(second, offset=9, length=5, name="2"),
                    ]
                )
            )
        )
        for first, second in ((one, other), (other, one))
    ]
    assert not set(chains[0]) & set(chains[1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora_request": lora(Path("org/name"))}, "lora"),
        ({"mm_features": [feature(None)]}, "multimodal"),
        ({"prompt_embeds": object()}, "prompt_embeds"),
        ({"prompt_token_ids": None}, "prompt_embeds"),
        ({"prompt_is_token_ids": [True]}, "prompt_embeds"),
        ({"resumable": True}, "streaming_input"),
    ],
)
def test_what_cannot_be_identified_says_why(changes: dict[str, Any], reason: str) -> None:
    """The reason is the counter's name."""
    assert Requests(later()).identify(prompt(**changes)) == reason


IDENTITY = {
    "connector": "c",
    "connector_format": 1,
    "model": "m",
    "revision": None,
    "weights": {"digest": "0"},
    "config": {"k": 1},
    "kv_dtype": [],
    "quantization": None,
    "max_model_len": None,
    "parallel": {},
}


def key(model: str, salt: str | None) -> bytes:
    """The key of the first chunk in a store."""
    named = fingerprint({**IDENTITY, "model": model}, [], [{}])
    return bytes.fromhex(named) + hashes(Requests().identify(prompt(cache_salt=salt)))[0]


def test_keys_are_one_to_one() -> None:
    """B6: separators, spellings, NUL and long names make different keys of 64 bytes."""
    composed = unicodedata.normalize("NFC", "mod\u00e9le")
    pairs = [
        ("org/model-SEP-name", None),
        ("org/model/name", None),
        ("a@b", "c"),
        ("a", "b@c"),
        (composed, None),
        (unicodedata.normalize("NFD", composed), None),
        ("a", composed),
        ("a", unicodedata.normalize("NFD", composed)),
        ("a\0b", None),
        ("a", "\0"),
        ("a", "\0\0"),
        ("a", "b\0c"),
        ("m" * 300, "s" * 300),
        ("m" * 300, "s" * 299),
        ("m" * 299, "s" * 300),
        ("a", "\ud800"),
    ]
    keys = [key(*pair) for pair in pairs]
    assert len(set(keys)) == len(pairs)
    assert {len(one) for one in keys} == {64}


def test_kinds_of_extra_do_not_mix(tmp_path: Path) -> None:
    """A salt with the bytes of an adapter's key, or of all of its extra, stays a salt."""
    found = Requests(later()).identify(prompt(lora_request=lora(write_adapter(tmp_path / "a"))))
    assert isinstance(found, RequestExtra)
    assert found.adapter is not None
    key = found.adapter.key
    assert found.common == encode_extra([ExtraKey(ExtraKind.LORA, key)])
    for salt in (key, found.common):
        forged = RequestExtra(encode_extra([ExtraKey(ExtraKind.SALT, salt)]))
        assert not set(hashes(forged)) & set(hashes(found))
