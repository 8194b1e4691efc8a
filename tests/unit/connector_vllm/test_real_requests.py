"""The same rules with vLLM's own requests, as its engine core makes them of messages."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.cache.lru import LruKeyReplicatedReceiverCache
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from lmcache_persist.connector.vllm.requests import Requests
from support.identities import later, write_adapter
from support.scheduler_sides import CHUNK, Side

CHUNKS = 4
TOKENS = list(range(100, 100 + CHUNKS * CHUNK + 1))


def picture(seed: int, offset: int, length: int, name: str = "") -> MultiModalFeatureSpec:
    """An image of its own content, large enough to travel as a buffer of its own."""
    pixels = torch.full((3, 16, 16), float(seed))
    item = MultiModalKwargsItem(
        {"pixel_values": MultiModalFieldElem(data=pixels, field=MultiModalBatchedField())}
    )
    return MultiModalFeatureSpec(
        data=item,
        modality="image",
        identifier=name or f"hash{seed}",
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def arrived(cache: Any = None, **changes: Any) -> Request:
    """A request after its way through vLLM's encoder, decoder and item cache."""
    fields = {
        "request_id": "r",
        "prompt_token_ids": TOKENS,
        "mm_features": None,
        "sampling_params": SamplingParams(max_tokens=1),
        "pooling_params": None,
        "arrival_time": 0.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
        **changes,
    }
    sent = MsgpackEncoder().encode(EngineCoreRequest(**fields))
    message = MsgpackDecoder(EngineCoreRequest).decode(sent)
    if cache is not None:
        message.mm_features = cache.get_and_update_features(message.mm_features)
    return Request.from_engine_core_request(message, None)


def chain(*features: MultiModalFeatureSpec, **changes: Any) -> list[bytes] | None:
    """What a fresh engine's scheduler looks such a request up by; None if it is not cached."""
    side = Side(requests=Requests(later()))
    one = arrived(mm_features=list(features) or None, **changes)
    side.side.on_new_request(one)
    if not side.client.handles:
        # Nor is it stored, whatever the engine computes of it.
        assert side.side.matched_tokens(one, 0) == 0
        assert side.stores(one, len(TOKENS)) == []
        return None
    found = side.client.handles[0].hashes
    side.decide(0)
    side.admit(one)
    assert side.stores(one, len(TOKENS)) == found
    return found


def first_difference(one: list[bytes] | None, other: list[bytes] | None) -> int | None:
    """The chunk from which on two prompts share nothing; None if they share all."""
    assert one is not None
    assert other is not None
    pairs = list(zip(one, other, strict=True))
    equal = [a == b for a, b in pairs]
    assert equal == sorted(equal, reverse=True)
    return equal.index(False) if False in equal else None


@pytest.mark.parametrize(
    ("one", "other", "chunk"),
    [
        # An image over the border of chunks 0 and 1: either of them is its content's.
        (picture(1, 6, 4), picture(2, 6, 4), 0),
        (picture(1, 6, 4), picture(1, 6, 4, name="other id"), None),
        # It begins in chunk 0 and ends in chunk 2; from there its start is at -11 or -10.
        (picture(1, 5, 12), picture(1, 6, 11), 0),
        (picture(1, 9, 4), picture(1, 10, 4), 1),
        (picture(1, 9, 4), picture(1, 9, 5), 1),
        (picture(1, 16, 4), picture(2, 16, 4), 2),
        (picture(1, 24, 8), picture(2, 24, 8), 3),
    ],
    ids=["border", "id", "start", "position", "length", "first token", "last chunk"],
)
def test_items_decide_from_their_chunk_on(
    one: MultiModalFeatureSpec, other: MultiModalFeatureSpec, chunk: int | None
) -> None:
    """Content and place of an image count in the chunks that it touches, its id does not."""
    assert first_difference(chain(one), chain(other)) == chunk


def test_item_over_a_border_is_in_both_chunks_by_itself() -> None:
    """Not only by the chain: the second chunk has its own key of the item, with its offset."""
    extra = Requests().identify(arrived(mm_features=[picture(1, 6, 4)]))
    other = Requests().identify(arrived(mm_features=[picture(2, 6, 4)]))
    assert not isinstance(extra, str)
    assert not isinstance(other, str)
    chunks = extra.of_chunks(CHUNK, CHUNKS), other.of_chunks(CHUNK, CHUNKS)
    assert [one == two for one, two in zip(*chunks, strict=True)] == [False, False, True, True]
    assert chunks[0][0] != chunks[0][1]


def test_text_without_items_is_the_plain_prompt() -> None:
    """An empty list of items is none, and a salt is what it is in a prompt of text."""
    plain = chain()
    assert first_difference(plain, chain(cache_salt="")) is None
    assert first_difference(plain, chain(cache_salt="t1")) == 0


def test_item_that_the_engine_holds_is_identified_as_before() -> None:
    """VLLM sends an item's content once; later requests name it, its cache fills them in."""
    config = SimpleNamespace(
        get_multimodal_config=lambda: SimpleNamespace(
            mm_processor_cache_gb=1, mm_processor_cache_type="lru"
        )
    )
    cache = LruKeyReplicatedReceiverCache(config)
    side = Side(requests=Requests(later()))
    image = picture(1, 6, 4)
    image.mm_hash = image.identifier
    again = copy.copy(image)
    again.data = None
    for feature in (image, again):
        side.side.on_new_request(arrived(cache, mm_features=[feature]))
    first, second = side.client.handles
    assert first.hashes == second.hashes


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": None, "prompt_embeds": torch.zeros(len(TOKENS), 8)},
        {
            "prompt_embeds": torch.zeros(len(TOKENS), 8),
            "prompt_is_token_ids": [True] * 8 + [False] * (len(TOKENS) - 8),
        },
        {"prompt_token_ids": [2**32, *TOKENS[1:]]},
        {"prompt_token_ids": [-1, *TOKENS[1:]]},
        {"resumable": True},
        {"lora_request": LoRARequest("hub", 1, "org/adapter")},
    ],
    ids=["embeds", "mixed", "token", "negative token", "streamed", "adapter of a hub"],
)
def test_what_vllm_cannot_name_is_not_cached(changes: dict[str, Any]) -> None:
    """Embeddings, tokens outside of 32 bits, streamed input, adapters without files."""
    assert chain(**changes) is None


def test_caller_s_id_without_content_is_not_cached() -> None:
    """An item that only has a name, be it the caller's, beside one that has its content."""
    nameless = picture(1, 6, 4, name="caller's")
    nameless.data = None
    assert chain(picture(2, 0, 2), nameless) is None


def test_adapter_of_a_folder_is_a_world_of_its_own(tmp_path: Any) -> None:
    """VLLM's own LoRARequest is told by the files it names."""
    one, two = (
        chain(lora_request=LoRARequest(name, number, str(write_adapter(tmp_path / name, number))))
        for name, number in (("a", 1), ("b", 2))
    )
    assert first_difference(one, two) == 0
    assert first_difference(chain(), one) == 0
