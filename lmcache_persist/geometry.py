"""KV geometry: alignment, chunk size, and which prefix can be restored. Pure.

A *group* is one KV cache group of the engine: layers that share a block table. Its
``tokens_per_block`` is the number of logical tokens that one block id covers. A chunk
has to end where a block of every cacheable group ends, so its size must be a multiple
of their least common multiple, the *required alignment*.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lmcache_persist.errors import (
    AlignmentTooLarge,
    IncompatibleAlignment,
    InvalidTokensPerBlock,
    NoCacheableGroup,
    UnsupportedGroup,
)
from lmcache_persist.printable import command

DEFAULT_BASE_CHUNK_SIZE = 256
"""Tokens. What is wished for when nobody wished for anything."""

DEFAULT_MAX_CHUNK_SIZE = 16384
"""Tokens. A chunk is restored as a whole, so a larger one hardly ever hits."""

ALIGNMENT_WARNING_FACTOR = 4
"""An alignment above this many times the largest group is worth a warning."""

MAX_TOKENS_PER_BLOCK = 2**31 - 1
"""Tokens. The largest tokens_per_block that is taken for a number at all."""

MAX_GROUPS = 64
"""Groups. A chunk's groups fit a 64-bit mask."""


class GroupKind(StrEnum):
    """What a group keeps, which decides what a prefix needs of it."""

    FULL = "full"
    """Full attention: every token of the prefix."""
    SLIDING = "sliding"
    """Attention over a window: the last ``window`` tokens."""
    RECURRENT = "recurrent"
    """A state (Mamba, linear attention): the one at the end of the prefix."""
    SCRATCH = "scratch"
    """Not prefix-cacheable: takes no part in anything."""


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group.

    Attributes:
        kind: what the group keeps.
        tokens_per_block: logical tokens one block id covers; 0 for scratch only.
        slots_per_block: physical token slots one block id occupies; 0 means the same.
        window: tokens that a sliding group attends to, the effective one; 0 otherwise.
    """

    kind: GroupKind
    tokens_per_block: int
    slots_per_block: int = 0
    window: int = 0

    @property
    def cacheable(self) -> bool:
        """Whether the group takes part in alignment, storing and loading."""
        return self.tokens_per_block > 0

    def to_json(self) -> dict[str, Any]:
        """Plain values, the form in manifest, wire and ``inspect``."""
        return {
            "kind": self.kind.value,
            "tokens_per_block": self.tokens_per_block,
            "slots_per_block": self.slots_per_block,
            "window": self.window,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Group:
        """The inverse of :meth:`to_json`."""
        return cls(
            GroupKind(value["kind"]),
            value["tokens_per_block"],
            value["slots_per_block"],
            value["window"],
        )


def groups_from_sizes(sizes: Sequence[object]) -> tuple[Group, ...]:
    """Groups for bare tokens_per_block numbers: full attention, 0 is scratch.

    Raises:
        InvalidTokensPerBlock: an entry is not a non-negative integer.
    """
    checked = [_check_tokens_per_block(size, index) for index, size in enumerate(sizes)]
    return tuple(
        Group(GroupKind.FULL if size else GroupKind.SCRATCH, size, size) for size in checked
    )


def _check_tokens_per_block(value: object, index: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTokensPerBlock(
            f"group {index} has tokens_per_block {value!r}, expected an integer",
            hint="give the number of tokens that one block covers, 0 for a scratch group",
            group=index,
        )
    if not 0 <= value <= MAX_TOKENS_PER_BLOCK:
        raise InvalidTokensPerBlock(
            f"group {index} has tokens_per_block {value}, expected 0 to {MAX_TOKENS_PER_BLOCK}",
            hint="give the number of tokens that one block covers, 0 for a scratch group",
            group=index,
        )
    return value


def check_groups(groups: Sequence[Group]) -> None:
    """Refuse groups that contradict themselves.

    Raises:
        InvalidTokensPerBlock: a number is out of range.
        NoCacheableGroup: no group has a positive tokens_per_block.
        UnsupportedGroup: too many groups, or kind and numbers disagree.
    """
    if len(groups) > MAX_GROUPS:
        raise UnsupportedGroup(f"found {len(groups)} groups, expected at most {MAX_GROUPS}")
    for index, group in enumerate(groups):
        size = _check_tokens_per_block(group.tokens_per_block, index)
        if (size == 0) != (group.kind is GroupKind.SCRATCH):
            raise UnsupportedGroup(
                f"group {index} is {group.kind.value} with tokens_per_block {size},"
                " expected 0 for scratch groups and for no other",
                group=index,
            )
        if group.kind is GroupKind.SLIDING and group.window <= 0:
            raise UnsupportedGroup(
                f"group {index} is sliding with window {group.window}, expected at least 1",
                group=index,
            )
        if group.slots_per_block < 0 or group.window < 0:
            raise UnsupportedGroup(
                f"group {index} has slots_per_block {group.slots_per_block} and window"
                f" {group.window}, expected no negative number",
                group=index,
            )
    if not any(group.cacheable for group in groups):
        raise NoCacheableGroup(
            f"none of {len(groups)} groups has a positive tokens_per_block",
            hint="a model without prefix-cacheable groups has nothing to store",
        )


def required_alignment(groups: Sequence[Group]) -> int:
    """Tokens: the least common multiple of all positive tokens_per_block.

    Raises:
        GeometryError: as :func:`check_groups`.
    """
    check_groups(groups)
    return math.lcm(*(group.tokens_per_block for group in groups if group.cacheable))


def round_up(value: int, multiple: int) -> int:
    """``value`` rounded up to a multiple of ``multiple``; both positive."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Plan:
    """What a geometry asks for.

    Attributes:
        required_alignment: tokens.
        chunk_size: tokens, the base rounded up to a multiple of the alignment.
        base_chunk_size: tokens, what was wished for.
        warnings: sentences for the operator.
    """

    required_alignment: int
    chunk_size: int
    base_chunk_size: int
    warnings: tuple[str, ...]


def check_base_chunk_size(base: int) -> int:
    """Refuse a base chunk size that is no positive int in range; returns it.

    Raises:
        InvalidTokensPerBlock: as said.
    """
    if isinstance(base, bool) or not isinstance(base, int) or not 0 < base <= MAX_TOKENS_PER_BLOCK:
        raise InvalidTokensPerBlock(
            f"base chunk size is {base!r}, expected an integer from 1 to {MAX_TOKENS_PER_BLOCK}"
        )
    return base


def plan(
    groups: Sequence[Group],
    base_chunk_size: int = DEFAULT_BASE_CHUNK_SIZE,
    max_chunk_size: int = DEFAULT_MAX_CHUNK_SIZE,
) -> Plan:
    """Alignment and recommended chunk size for a geometry.

    Raises:
        GeometryError: the geometry is refused; the class says why.
    """
    check_base_chunk_size(base_chunk_size)
    alignment = required_alignment(groups)
    chunk_size = round_up(base_chunk_size, alignment)
    sizes = [group.tokens_per_block for group in groups if group.cacheable]
    if chunk_size > max_chunk_size:
        raise AlignmentTooLarge(
            f"tokens_per_block {sizes} require an alignment of {alignment} and, from base"
            f" {base_chunk_size}, a chunk size of {chunk_size}, above the maximum of"
            f" {max_chunk_size}",
            hint="choose block sizes with a common multiple, or raise --max-chunk-size",
            required_alignment=alignment,
            chunk_size=chunk_size,
        )
    warnings = []
    if alignment > ALIGNMENT_WARNING_FACTOR * max(sizes):
        warnings.append(
            f"tokens_per_block {sizes} have little in common: the alignment of {alignment}"
            f" is more than {ALIGNMENT_WARNING_FACTOR} times the largest; hits will be coarse"
        )
    return Plan(alignment, chunk_size, base_chunk_size, tuple(warnings))


def check_compatible(
    chunk_size: int, groups: Sequence[Group], base_chunk_size: int = DEFAULT_BASE_CHUNK_SIZE
) -> int:
    """Refuse a geometry whose blocks do not end where chunks of ``chunk_size`` end.

    Args:
        chunk_size: tokens, the bound size.
        groups: the geometry.
        base_chunk_size: tokens, for the size that another server would be bound to.

    Returns:
        The required alignment.

    Raises:
        GeometryError: the geometry itself is refused.
        IncompatibleAlignment: names the size, the alignment, the groups that conflict.
    """
    alignment = required_alignment(groups)
    if chunk_size % alignment == 0:
        return alignment
    conflicting = [
        f"group {index} ({group.kind.value}, tokens_per_block {group.tokens_per_block})"
        for index, group in enumerate(groups)
        if group.cacheable and chunk_size % group.tokens_per_block
    ]
    fits = round_up(base_chunk_size, alignment)
    raise IncompatibleAlignment(
        f"this server is bound to a chunk size of {chunk_size}, but the model requires a"
        f" multiple of {alignment}: conflict with {', '.join(conflicting)}",
        hint=f"start the engine with block sizes that divide {chunk_size}, point it at a server"
        f" with a data dir of its own (--chunk-size auto would bind it to"
        f" {fits}), or stop this server and give up what"
        f" is stored with: {command('rebind', 'DIR', '--chunk-size', fits)}",
        chunk_size=chunk_size,
        required_alignment=alignment,
    )


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """Chunks ``[first, end)`` of a prompt."""

    first: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.first)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.end))


def chunks_needed(group: Group, prefix_tokens: int, chunk_size: int) -> ChunkRange:
    """The chunks that restoring ``prefix_tokens`` takes of one group.

    Args:
        group: the group.
        prefix_tokens: P, a multiple of ``chunk_size``.
        chunk_size: tokens.
    """
    end = prefix_tokens // chunk_size
    if not group.cacheable or end == 0:
        return ChunkRange(end, end)
    if group.kind is GroupKind.FULL:
        return ChunkRange(0, end)
    if group.kind is GroupKind.RECURRENT:
        return ChunkRange(end - 1, end)
    first_token = max(0, prefix_tokens - group.window + 1)
    return ChunkRange(min(first_token // chunk_size, end), end)


def most_chunks(
    groups: Sequence[Group],
    chunk_size: int,
    costs: Sequence[int],
    room: int,
    candidates: range,
) -> int:
    """The most chunks, of ``candidates``, whose restoration takes no more than ``room``.

    Args:
        groups: the geometry.
        chunk_size: tokens.
        costs: of one object of each group, over all ranks.
        room: what there is, in the same unit.
        candidates: numbers of chunks, ascending; those below its start cost nothing.

    Returns:
        One of the candidates, or the number before the first if none fits.
    """
    held = candidates.start

    # Of a window or a state a long prefix takes no more than a short one, so that this
    # never falls.
    def cost(chunks: int) -> int:
        needed = [chunks_needed(group, chunks * chunk_size, chunk_size) for group in groups]
        return sum(
            max(0, part.end - max(part.first, held)) * each
            for part, each in zip(needed, costs, strict=True)
        )

    return held + bisect_right(candidates, room, key=cost) - 1


def cacheable_mask(groups: Sequence[Group]) -> int:
    """Bit mask of the groups that take part; bit i is group i."""
    return sum(1 << index for index, group in enumerate(groups) if group.cacheable)


def object_blocks(group: Group, chunk_size: int) -> int:
    """How many blocks, the last ones of a chunk, the chunk's object of a group holds.

    All of them for full attention, and for a window that reaches beyond a chunk. Of a
    smaller window no prefix ever needs the blocks before it, which the engine may have
    dropped when the chunk is complete. Of a recurrent group the state at the chunk's end.

    Args:
        group: a cacheable one.
        chunk_size: tokens, a multiple of the group's.
    """
    blocks = chunk_size // group.tokens_per_block
    if group.kind is GroupKind.RECURRENT:
        return 1
    if group.kind is GroupKind.SLIDING:
        window_blocks = round_up(group.window - 1, group.tokens_per_block)
        return max(1, min(blocks, window_blocks // group.tokens_per_block))
    return blocks


def restorable_prefix(
    groups: Sequence[Group],
    chunk_size: int,
    num_tokens: int,
    present: Sequence[int],
    max_chunks: int | None = None,
) -> int:
    """The longest prefix, in tokens, that can be restored (design section 6).

    Args:
        groups: the geometry.
        chunk_size: tokens.
        num_tokens: length of the prompt; at least one token is left to compute.
        present: per chunk from the first, a bit mask of the groups whose object exists
            on every rank. Chunks beyond its length are absent.
        max_chunks: no more than so many chunks (what the pool can hold), or None.

    Returns:
        P, a multiple of ``chunk_size``, 0 if nothing can be restored.
    """
    limit = min(len(present), max(0, num_tokens - 1) // chunk_size)
    if max_chunks is not None:
        limit = min(limit, max_chunks)
    # Per group the length of the run of present chunks that ends at each chunk: a range
    # that ends there is covered iff the run is at least as long.
    active = [(index, group) for index, group in enumerate(groups) if group.cacheable]
    runs = [0] * len(groups)
    best = 0
    for chunk in range(limit):
        mask = present[chunk]
        for index, _ in active:
            runs[index] = runs[index] + 1 if mask >> index & 1 else 0
        prefix = (chunk + 1) * chunk_size
        if all(
            runs[index] >= len(chunks_needed(group, prefix, chunk_size)) for index, group in active
        ):
            best = prefix
    return best if active else 0
