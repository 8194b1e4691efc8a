"""Laws of geometry, against oracles that are written another way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_persist import geometry
from lmcache_persist.errors import AlignmentTooLarge, IncompatibleAlignment
from lmcache_persist.geometry import Group, GroupKind

CHUNK = 8
sizes = st.lists(st.integers(0, 96), min_size=1, max_size=6).filter(any)


@st.composite
def any_group(draw: st.DrawFn) -> Group:
    """A group of any kind whose blocks end where chunks of 8 end."""
    kind = draw(st.sampled_from(GroupKind))
    if kind is GroupKind.SCRATCH:
        return Group(kind, 0)
    window = draw(st.integers(1, 40)) if kind is GroupKind.SLIDING else 0
    return Group(kind, draw(st.sampled_from([1, 2, 4, 8])), window=window)


models = st.lists(any_group(), max_size=5)


def tokens_needed(group: Group, prefix: int) -> set[int] | None:
    """The token positions whose chunk must be there, by the definition's own words."""
    if group.kind is GroupKind.SCRATCH:
        return set()
    if group.kind is GroupKind.FULL:
        return set(range(prefix))
    if group.kind is GroupKind.RECURRENT:
        return {prefix - 1}
    # The token at position `prefix` sees itself and the window - 1 tokens before it.
    return {token for token in range(prefix) if prefix - token < group.window}


def longest_by_search(
    groups: list[Group], num_tokens: int, present: list[int], max_chunks: int | None
) -> int:
    """The longest restorable prefix, each candidate tried token by token."""
    if all(group.kind is GroupKind.SCRATCH for group in groups):
        return 0
    for prefix in range(num_tokens - 1, 0, -1):
        if prefix % CHUNK or (max_chunks is not None and prefix > max_chunks * CHUNK):
            continue
        if prefix > len(present) * CHUNK:
            continue
        if all(
            present[token // CHUNK] & (1 << index)
            for index, group in enumerate(groups)
            for token in tokens_needed(group, prefix)
        ):
            return prefix
    return 0


@given(
    groups=models,
    num_tokens=st.integers(0, 90),
    present=st.lists(st.integers(0, 31), max_size=12),
    max_chunks=st.none() | st.integers(0, 12),
)
def test_restorable_prefix_equals_search(
    groups: list[Group], num_tokens: int, present: list[int], max_chunks: int | None
) -> None:
    """The linear pass finds what a search over all prefixes and all tokens finds."""
    found = geometry.restorable_prefix(groups, CHUNK, num_tokens, present, max_chunks)
    assert found == longest_by_search(groups, num_tokens, present, max_chunks)


@given(groups=models, num_tokens=st.integers(0, 90), chunks=st.integers(0, 12), hole=st.data())
def test_almost_everything_present(
    groups: list[Group], num_tokens: int, chunks: int, hole: st.DataObject
) -> None:
    """The same with everything stored but one object: the case that random masks miss."""
    present = [31] * chunks
    if chunks and groups:
        at = hole.draw(st.integers(0, chunks - 1))
        present[at] &= ~(1 << hole.draw(st.integers(0, len(groups) - 1)))
    found = geometry.restorable_prefix(groups, CHUNK, num_tokens, present)
    assert found == longest_by_search(groups, num_tokens, present, None)


@given(groups=models, chunks=st.integers(0, 12))
def test_needed_chunks_cover_needed_tokens(groups: list[Group], chunks: int) -> None:
    """The chunks that a load reads are those that hold a needed token, and no other."""
    prefix = chunks * CHUNK
    for group in groups:
        expected = {token // CHUNK for token in tokens_needed(group, prefix) if token >= 0}
        assert set(geometry.chunks_needed(group, prefix, CHUNK)) == expected


@given(values=sizes, base=st.integers(1, 4096))
def test_plan_laws(values: list[int], base: int) -> None:
    """The chunk size is the smallest common multiple of all groups that reaches the base."""
    groups = geometry.groups_from_sizes(values)
    positive = [value for value in values if value]
    found = geometry.plan(groups, base, max_chunk_size=2**63)
    if found.chunk_size > geometry.DEFAULT_MAX_CHUNK_SIZE:
        with pytest.raises(AlignmentTooLarge):
            geometry.plan(groups, base)
    assert found.chunk_size >= base
    assert all(found.chunk_size % value == 0 for value in positive)
    assert all(found.required_alignment % value == 0 for value in positive)
    below = found.chunk_size - found.required_alignment
    assert below < base
    smaller = range(max(positive), min(found.required_alignment, 100_000), max(positive))
    assert not any(all(size % value == 0 for value in positive) for size in smaller)


@given(values=sizes, order=st.randoms(use_true_random=False))
def test_alignment_knows_no_order(values: list[int], order: object) -> None:
    """Neither order, nor repetition, nor scratch groups change the alignment."""
    shuffled = [*values, *values, 0]
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert geometry.required_alignment(
        geometry.groups_from_sizes(shuffled)
    ) == geometry.required_alignment(geometry.groups_from_sizes(values))


@given(values=sizes, chunk_size=st.integers(1, 4096))
def test_compatible_iff_every_group_divides(values: list[int], chunk_size: int) -> None:
    """A bound size is compatible exactly if every group's block divides it."""
    groups = geometry.groups_from_sizes(values)
    if all(chunk_size % value == 0 for value in values if value):
        geometry.check_compatible(chunk_size, groups)
    else:
        with pytest.raises(IncompatibleAlignment):
            geometry.check_compatible(chunk_size, groups)
