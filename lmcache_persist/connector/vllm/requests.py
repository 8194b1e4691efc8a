"""What identifies a request's tokens, and whether anything does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lmcache_persist.connector import LookupHandle, LookupResult
from lmcache_persist.hashing import ChunkHash, ExtraKey, ExtraKind, encode_extra


def unidentified(request: Any) -> str | None:
    """Why a request's KV cannot be named by its tokens and salt; None if it can."""
    if request.lora_request is not None:
        return "lora"  # Its name says nothing about its weights.
    if request.mm_features:
        return "multimodal"
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "prompt_embeds"  # Their token ids are all 0.
    if request.prompt_is_token_ids is not None:
        return "prompt_embeds"
    if request.resumable:
        return "streaming_input"  # Its tokens are rewritten while it runs.
    return None


def extra_of(request: Any) -> bytes:
    """What besides the tokens goes into every chunk's hash; an empty salt is none."""
    if not request.cache_salt:
        return b""
    return encode_extra([ExtraKey(ExtraKind.SALT, request.cache_salt.encode())])


@dataclass(slots=True)
class TrackedRequest:
    """What the scheduler side knows about a live request.

    Attributes:
        request: vLLM's; its token list and counts move on while it runs.
        extra: of every chunk.
        hashes: of its complete chunks, from the first, as far as they were needed.
        next_store: chunks below it were stored, loaded, or offered.
        lookup: undecided or leased; None before, and after the lease was handed on.
        result: of ``lookup`` once decided.
        local_tokens: the engine's own hit when it last asked.
        asked: whether there was a lookup since the request was last admitted from zero.
        preemptions: of the request when that lookup started.
        may_load: False once a load failed, lest it loop for ever.
    """

    request: Any
    extra: bytes
    hashes: list[ChunkHash] = field(default_factory=list)
    next_store: int = 0
    lookup: LookupHandle | None = None
    result: LookupResult | None = None
    local_tokens: int = 0
    asked: bool = False
    preemptions: int = 0
    may_load: bool = True

    def drop_lookup(self) -> None:
        """Release the lookup, decided or not."""
        if self.lookup is not None:
            self.lookup.release()
        self.lookup = self.result = None
