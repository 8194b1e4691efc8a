"""Judging what a server sent: another boot id, refusals, slots outside of the pool. Pure.

A server is not trusted further than its replies can be checked: a wrong one is a
:class:`~lmcache_persist.errors.MalformedMessage`, never an exception of another kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from lmcache_persist.binding import Binding
from lmcache_persist.connector.results import LookupResult
from lmcache_persist.errors import MalformedMessage, PersistError, Stale, from_code
from lmcache_persist.geometry import MAX_GROUPS, MAX_TOKENS_PER_BLOCK
from lmcache_persist.protocol import MAX_RANKS, ErrorReply, Found, Reply, Reserved, SlotRun

_ID = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NOT_FIELDS = frozenset({"self", "message", "hint", "code"})


def is_id(value: str) -> bool:
    """Whether it is a boot or session id."""
    return _ID.fullmatch(value) is not None


def judge(
    boot: str, reply: Reply | PersistError
) -> tuple[Reply | PersistError, PersistError | None]:
    """What a reply means to the request, and to the connection.

    Args:
        boot: the server's that was greeted, empty while it is not yet known.
        reply: what came.

    Returns:
        The reply, or the error it stands for; and why to start over, else None.
    """
    if isinstance(reply, PersistError):
        return reply, None
    if isinstance(reply, ErrorReply):
        if boot and reply.boot and reply.boot != boot:
            stale = Stale(f"boot {reply.boot[:40]} answered, expected {boot}")
            return stale, stale
        error = to_error(reply)
        return error, error if isinstance(error, Stale) else None
    if boot and reply.boot != boot:
        stale = Stale(f"boot {reply.boot[:40]!r} answered, expected {boot}")
        return stale, stale
    return reply, None


def to_error(reply: ErrorReply) -> PersistError:
    """The typed error that an error reply stands for."""
    try:
        fields = json.loads(reply.fields)
    except (ValueError, RecursionError):
        fields = {}
    known: dict[str, Any] = {}
    if isinstance(fields, dict):
        known = {key: value for key, value in fields.items() if key not in _NOT_FIELDS}
    return from_code(reply.code, reply.message, hint=reply.hint or None, **known)


_TEXT_FIELDS = (
    "mode",
    "hash_algorithm",
    "boundary_id",
    "binding_id",
    "bound_at",
    "winner",
    "backend",
    "store_uuid",
)
_NUMBER_FIELDS = (
    "chunk_size",
    "required_alignment",
    "base_chunk_size",
    "hash_version",
    "store_format_version",
)


def decode_binding(data: bytes) -> Binding | None:
    """A binding as it travels: its stamped form as JSON, empty for none.

    Raises:
        MalformedMessage: it is anything else.
    """
    if not data:
        return None
    try:
        value = json.loads(data)
        if not isinstance(value, dict):
            raise TypeError("no object")
        binding = Binding.from_json(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise MalformedMessage(f"binding cannot be decoded: {error}") from error
    for name in _TEXT_FIELDS:
        if not isinstance(value[name], str):
            raise MalformedMessage(f"binding has {name} {value[name]!r:.80}, expected text")
    for name in _NUMBER_FIELDS:
        number = value[name]
        is_int = isinstance(number, int) and not isinstance(number, bool)
        if not is_int or not 0 < number <= MAX_TOKENS_PER_BLOCK:
            raise MalformedMessage(
                f"binding has {name} {number!r:.80}, expected a positive number up to"
                f" {MAX_TOKENS_PER_BLOCK}"
            )
    if not _DIGEST.fullmatch(binding.binding_id):
        raise MalformedMessage(f"binding has id {binding.binding_id!r:.80}, expected 64 hex digits")
    return binding


def check_found(reply: Found, *, chunk_size: int, num_tokens: int, pool_bytes: int) -> LookupResult:
    """A lookup's answer, once all of it lies inside the prompt and the pool.

    Raises:
        MalformedMessage: something does not.
    """
    tokens = reply.tokens
    if not 0 <= tokens < max(1, num_tokens) or tokens % chunk_size:
        raise MalformedMessage(
            f"lookup found {tokens} of {num_tokens} tokens, expected fewer, and a multiple of"
            f" {chunk_size}"
        )
    for run in reply.runs:
        _check_run(run, tokens // chunk_size, pool_bytes)
    return LookupResult(
        tokens=tokens,
        boot_id=reply.boot,
        runs=tuple(reply.runs),
        memory_chunks=reply.memory_chunks,
        disk_chunks=reply.disk_chunks,
    )


def _check_run(run: SlotRun, num_chunks: int, pool_bytes: int) -> None:
    fits = (
        0 <= run.rank < MAX_RANKS
        and 0 <= run.group < MAX_GROUPS
        and run.first_chunk >= 0
        and run.first_chunk + len(run.offsets) <= num_chunks
        and 0 < run.object_bytes <= pool_bytes
        and (
            not run.offsets
            or (min(run.offsets) >= 0 and max(run.offsets) <= pool_bytes - run.object_bytes)
        )
    )
    if not fits:
        raise MalformedMessage(
            f"lookup found a run of rank {run.rank}, group {run.group}, chunks"
            f" {run.first_chunk} + {len(run.offsets)}, objects of {run.object_bytes} bytes that"
            f" is not inside {num_chunks} chunks and a pool of {pool_bytes} bytes"
        )


def check_grants(
    reply: Reserved,
    masks: Sequence[int],
    object_bytes: Sequence[int] | None,
    pool_bytes: int,
) -> Reserved:
    """A reservation's answer, once every slot is one that was asked for and in the pool.

    Args:
        reply: the answer.
        masks: per key, the groups that were asked for.
        object_bytes: per group, the registered sizes; None if they are not known here.
        pool_bytes: size of the pool.

    Raises:
        MalformedMessage: something is wrong.
    """
    seen: set[int] = set()
    for grant in reply.grants:
        fits = 0 <= grant.index < len(masks) and grant.index not in seen
        if fits:
            seen.add(grant.index)
            sizes = _sizes_of(masks[grant.index], object_bytes)
            fits = len(sizes) == len(grant.offsets) and all(
                0 <= offset <= pool_bytes - size
                for offset, size in zip(grant.offsets, sizes, strict=True)
            )
        if not fits:
            raise MalformedMessage(
                f"grant {grant.reservation} for key {grant.index} of {len(masks)} with"
                f" {len(grant.offsets)} slots does not fit what was asked for and a pool of"
                f" {pool_bytes} bytes"
            )
    if any(not 0 <= index < len(masks) for index in reply.stored):
        raise MalformedMessage(f"stored keys go beyond the {len(masks)} that were asked for")
    return reply


def _sizes_of(mask: int, object_bytes: Sequence[int] | None) -> list[int]:
    groups = [index for index in range(mask.bit_length()) if mask >> index & 1]
    if object_bytes is None:
        return [0] * len(groups)
    return [object_bytes[index] if index < len(object_bytes) else 0 for index in groups]
