"""What identifies a request's tokens, and whether anything does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_persist.connector import LookupHandle, LookupResult
from lmcache_persist.connector.vllm.adapters import Adapter, Adapters
from lmcache_persist.connector.vllm.media import Item, Items
from lmcache_persist.hashing import ChunkHash, ExtraKey, ExtraKind, encode_extra


@dataclass(frozen=True, slots=True)
class RequestExtra:
    """What besides the tokens decides a request's KV.

    Attributes:
        common: of every chunk, encoded: salt and adapter.
        items: multimodal items, in the order of the request.
        adapter: None for the base model.
    """

    common: bytes = b""
    items: tuple[Item, ...] = ()
    adapter: Adapter | None = None

    def of_chunks(self, chunk_size: int, num_chunks: int) -> Sequence[bytes] | bytes:
        """Encoded extra of the first ``num_chunks`` chunks: one for all, or one for each."""
        if not self.items:
            return self.common
        return [
            self._of_chunk(chunk * chunk_size, (chunk + 1) * chunk_size)
            for chunk in range(num_chunks)
        ]

    def _of_chunk(self, start: int, end: int) -> bytes:
        return self.common + encode_extra(
            ExtraKey(ExtraKind.MULTIMODAL, item.key(start))
            for item in self.items
            if item.overlaps(start, end)
        )

    def still_holds(self) -> bool:
        """Whether what identified the request's adapter is as it was."""
        return self.adapter is None or self.adapter.is_unchanged()


class Requests:
    """Identifies the requests of one engine.

    Args:
        adapters: its LoRA adapters.
        items: its multimodal items.

    Threads: vLLM's scheduler thread only.
    """

    def __init__(self, adapters: Adapters | None = None, items: Items | None = None) -> None:
        self._adapters = adapters or Adapters()
        self._items = items or Items()

    def identify(self, request: Any) -> RequestExtra | str:
        """What goes into the request's chunk hashes, or why its KV cannot be named."""
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return "prompt_embeds"  # Their token ids are all 0.
        if request.prompt_is_token_ids is not None:
            return "prompt_embeds"
        if request.resumable:
            return "streaming_input"  # Its tokens are rewritten while it runs.
        common, adapter = [], None
        if request.cache_salt:
            salt = request.cache_salt.encode("utf-8", "surrogatepass")
            common.append(ExtraKey(ExtraKind.SALT, salt))
        if request.lora_request is not None:
            adapter = self._adapters.identify(request.lora_request)
            if adapter is None:
                return "lora"
            common.append(ExtraKey(ExtraKind.LORA, adapter.key))
        items = self._items.identify(request.mm_features)
        if items is None:
            return "multimodal"
        return RequestExtra(encode_extra(common), items, adapter)


@dataclass(slots=True)
class TrackedRequest:
    """What the scheduler side knows about a live request.

    Attributes:
        request: vLLM's; its token list and counts move on while it runs.
        extra: what goes into its chunks' hashes beside the tokens.
        hashes: of its complete chunks, from the first, as far as they were needed.
        next_store: chunks below it were stored, loaded, or offered.
        states: chunks whose recurrent state was stored, loaded, or offered.
        lookup: undecided or leased; None before, and after the lease was handed on.
        result: of ``lookup`` once decided.
        local_tokens: the engine's own hit when it last asked.
        asked: whether there was a lookup since the request was last admitted from zero.
        preemptions: of the request when that lookup started.
        may_load: False once a load failed, lest it loop for ever.
        counted: whether metrics have this prompt as looked up.
        hit_tokens: of the prompt that they have as found.
    """

    request: Any
    extra: RequestExtra
    hashes: list[ChunkHash] = field(default_factory=list)
    next_store: int = 0
    states: set[int] = field(default_factory=set)
    lookup: LookupHandle | None = None
    result: LookupResult | None = None
    local_tokens: int = 0
    asked: bool = False
    preemptions: int = 0
    may_load: bool = True
    counted: bool = False
    hit_tokens: int = 0

    def drop_lookup(self) -> None:
        """Release the lookup, decided or not."""
        if self.lookup is not None:
            self.lookup.release()
        self.lookup = self.result = None
