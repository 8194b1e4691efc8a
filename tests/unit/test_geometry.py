"""Geometry: alignment, planned chunk size, refusals, and which prefix can be restored."""

from __future__ import annotations

import pytest

from lmcache_persist import geometry
from lmcache_persist.errors import (
    AlignmentTooLarge,
    IncompatibleAlignment,
    InvalidTokensPerBlock,
    NoCacheableGroup,
    UnsupportedGroup,
)
from lmcache_persist.geometry import ChunkRange, Group, GroupKind

FULL, SLIDING = GroupKind.FULL, GroupKind.SLIDING
RECURRENT, SCRATCH = GroupKind.RECURRENT, GroupKind.SCRATCH


def groups(*sizes: object) -> tuple[Group, ...]:
    """Full groups of these tokens_per_block."""
    return geometry.groups_from_sizes(sizes)


@pytest.mark.parametrize(
    ("sizes", "base", "alignment", "chunk_size"),
    [
        ((544, 64), 1024, 1088, 1088),
        ((640, 0, 640, 640, 640, 640), 256, 640, 640),
        ((400,), 256, 400, 400),
        ((400,), 1024, 400, 1200),
        ((32,), 256, 32, 256),
        ((544,), 256, 544, 544),
        ((128, 128, 128, 128, 128, 128), 256, 128, 256),
        ((16,), 1, 16, 16),
        ((1,), 256, 1, 256),
    ],
)
def test_plan(sizes: tuple[int, ...], base: int, alignment: int, chunk_size: int) -> None:
    """The chunk size is the base rounded up to a multiple of the lcm."""
    found = geometry.plan(groups(*sizes), base)
    assert (found.required_alignment, found.chunk_size) == (alignment, chunk_size)
    assert found.base_chunk_size == base


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ((0, 0), NoCacheableGroup),
        ((), NoCacheableGroup),
        ((-16,), InvalidTokensPerBlock),
        ((16.5,), InvalidTokensPerBlock),
        (("16",), InvalidTokensPerBlock),
        ((True,), InvalidTokensPerBlock),
        ((None,), InvalidTokensPerBlock),
        ((2**31,), InvalidTokensPerBlock),
        ((640, -16), InvalidTokensPerBlock),
        ((1000003, 1000033, 1000037, 1000039), AlignmentTooLarge),
    ],
)
def test_plan_refuses(sizes: tuple[object, ...], error: type[Exception]) -> None:
    """Each impossible geometry is refused with its own error."""
    with pytest.raises(error) as caught:
        geometry.plan(groups(*sizes))
    assert type(caught.value) is error


@pytest.mark.timeout(20)
def test_refusing_huge_alignments_needs_no_search() -> None:
    """64 near-coprime numbers are refused at once: a search would meet the time limit."""
    with pytest.raises(AlignmentTooLarge):
        geometry.plan(groups(*(2**31 - 1 - 2 * index for index in range(geometry.MAX_GROUPS))))


@pytest.mark.parametrize("base", [0, -1, 1.5, "256", True, 2**31])
def test_bad_base(base: object) -> None:
    """A base that is no positive integer is refused."""
    with pytest.raises(InvalidTokensPerBlock, match="base chunk size"):
        geometry.plan(groups(32), base)  # type: ignore[arg-type]


def test_max_chunk_size_is_inclusive() -> None:
    """A chunk size equal to the maximum is taken, one alignment more is not."""
    assert geometry.plan(groups(64), 1024, 1024).chunk_size == 1024
    with pytest.raises(AlignmentTooLarge) as caught:
        geometry.plan(groups(64), 1025, 1024)
    assert caught.value.fields == {"required_alignment": 64, "chunk_size": 1088}
    assert "1024" in str(caught.value)


def test_warning_for_coarse_alignment() -> None:
    """An alignment above four times the largest group warns, exactly four times does not."""
    assert geometry.plan(groups(64, 80)).warnings == ()  # lcm 320 = 4 x 80
    (warning,) = geometry.plan(groups(80, 96)).warnings  # lcm 480 = 5 x 96
    assert "480" in warning


@pytest.mark.parametrize(
    "bad",
    [
        Group(SCRATCH, 16),
        Group(FULL, 0),
        Group(SLIDING, 16, window=0),
        Group(SLIDING, 16, window=-1),
        Group(FULL, 16, slots_per_block=-1),
        Group(FULL, 16, window=-5),
    ],
)
def test_contradictory_groups(bad: Group) -> None:
    """A group whose kind and numbers disagree is refused."""
    with pytest.raises(UnsupportedGroup, match="group 1"):
        geometry.check_groups([Group(FULL, 16), bad])


def test_number_of_groups() -> None:
    """64 groups fit a mask, 65 are refused."""
    geometry.check_groups([Group(FULL, 16)] * 64)
    with pytest.raises(UnsupportedGroup, match="65 groups"):
        geometry.check_groups([Group(FULL, 16)] * 65)


def test_group_json_round_trip() -> None:
    """A group is equal after a round trip through JSON values."""
    group = Group(SLIDING, 128, 100, 512)
    assert Group.from_json(group.to_json()) == group
    assert group.to_json()["kind"] == "sliding"


def test_compatible() -> None:
    """A model is compatible iff its alignment divides the bound size."""
    assert geometry.check_compatible(1088, groups(544, 0, 64)) == 1088
    assert geometry.check_compatible(1088, groups(32)) == 32


def test_incompatible_names_everything() -> None:
    """The refusal has the bound size, the alignment, the group in conflict, and a way out."""
    with pytest.raises(IncompatibleAlignment) as caught:
        geometry.check_compatible(256, groups(32, 544))
    text = str(caught.value)
    assert "256" in text
    assert "544" in text
    assert "group 1 (full, tokens_per_block 544)" in text
    assert "group 0" not in text
    assert caught.value.fields == {"chunk_size": 256, "required_alignment": 544}


@pytest.mark.parametrize(("bound", "size", "base"), [(544, 256, 256), (256, 640, 1024)])
def test_incompatible_says_what_another_server_would_be_bound_to(
    bound: int, size: int, base: int
) -> None:
    """The number in the hint is the one that plan gives for the same base."""
    with pytest.raises(IncompatibleAlignment) as caught:
        geometry.check_compatible(bound, groups(size), base)
    planned = geometry.plan(groups(size), base).chunk_size
    hint = str(caught.value.hint)
    assert f"--chunk-size auto would bind it to {planned})" in hint
    assert hint.endswith(f": lmcache-persist rebind DIR --chunk-size {planned}")


def test_incompatible_only_together() -> None:
    """A size that each group divides is a multiple of their lcm: no false conflict."""
    assert geometry.check_compatible(48, groups(16, 24)) == 48
    with pytest.raises(IncompatibleAlignment, match="group 1"):
        geometry.check_compatible(32, groups(16, 24))


@pytest.mark.parametrize(
    ("group", "prefix", "expected"),
    [
        (Group(FULL, 64), 0, (0, 0)),
        (Group(FULL, 64), 256, (0, 4)),
        (Group(RECURRENT, 64), 256, (3, 4)),
        (Group(SCRATCH, 0), 256, (4, 4)),
        (Group(SLIDING, 64, window=1), 256, (4, 4)),  # the window holds the next token only
        (Group(SLIDING, 64, window=2), 256, (3, 4)),
        (Group(SLIDING, 64, window=65), 256, (3, 4)),
        (Group(SLIDING, 64, window=66), 256, (2, 4)),
        (Group(SLIDING, 64, window=4096), 256, (0, 4)),
    ],
)
def test_chunks_needed(group: Group, prefix: int, expected: tuple[int, int]) -> None:
    """Full needs all, recurrent the last, sliding those that cover [P - w + 1, P)."""
    found = geometry.chunks_needed(group, prefix, 64)
    assert len(found) == expected[1] - expected[0]
    assert list(found) == list(range(*expected))


def test_chunk_range_length() -> None:
    """A range that ends before it starts is empty."""
    assert len(ChunkRange(3, 1)) == 0
    assert list(ChunkRange(1, 3)) == [1, 2]


def test_masks() -> None:
    """Scratch groups are in no mask."""
    mixed = [Group(FULL, 64), Group(SCRATCH, 0), Group(RECURRENT, 64), Group(SLIDING, 64, 0, 8)]
    assert geometry.cacheable_mask(mixed) == 0b1101


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (Group(FULL, 64), 4),
        (Group(RECURRENT, 64), 1),
        (Group(RECURRENT, 256), 1),
        (Group(SLIDING, 64, 0, 1000), 4),
        (Group(SLIDING, 64, 0, 257), 4),
        (Group(SLIDING, 64, 0, 256), 4),
        (Group(SLIDING, 64, 0, 193), 3),
        (Group(SLIDING, 64, 0, 194), 4),
        (Group(SLIDING, 64, 0, 2), 1),
        (Group(SLIDING, 64, 0, 1), 1),
    ],
)
def test_object_blocks(group: Group, expected: int) -> None:
    """An object holds the blocks that some prefix may need: [P - w + 1, P), or the state."""
    assert geometry.object_blocks(group, 256) == expected


@pytest.mark.parametrize(
    ("room", "held", "expected"),
    [(99, 0, 0), (100, 0, 1), (110, 0, 2), (129, 0, 3), (25, 5, 5), (109, 5, 6)],
)
def test_most_chunks(room: int, held: int, expected: int) -> None:
    """A state costs once however long the prefix; full groups cost what is not held."""
    model = [Group(RECURRENT, 64), Group(FULL, 64), Group(SCRATCH, 0)]
    assert geometry.most_chunks(model, 64, [90, 10, 0], room, range(held, 21)) == expected


def test_one_token_is_left_to_compute() -> None:
    """Exactly two chunks restore one, two chunks and a token restore both."""
    model = groups(544)
    assert geometry.restorable_prefix(model, 544, 1088, [1, 1]) == 544
    assert geometry.restorable_prefix(model, 544, 1089, [1, 1]) == 1088
    assert geometry.restorable_prefix(model, 544, 1500, [1, 1]) == 1088


def test_hybrid_state_only_at_the_end() -> None:
    """A recurrent state at the second boundary alone restores both chunks, and never one."""
    model = [Group(RECURRENT, 640), Group(FULL, 640)]
    assert geometry.restorable_prefix(model, 640, 1500, [0b10, 0b11]) == 1280
    assert geometry.restorable_prefix(model, 640, 1280, [0b10, 0b11]) == 0
    assert geometry.restorable_prefix(model, 640, 1500, [0b11, 0b10]) == 640
    assert geometry.restorable_prefix(model, 640, 1500, [0b01, 0b11]) == 0


def test_sliding_hole_behind_the_window() -> None:
    """A hole that the window has passed does not matter, one inside it does."""
    model = [Group(SLIDING, 64, window=65)]
    assert geometry.restorable_prefix(model, 64, 1000, [0, 0, 1]) == 192
    assert geometry.restorable_prefix(model, 64, 1000, [0, 1, 0]) == 128
    assert geometry.restorable_prefix([Group(SLIDING, 64, window=66)], 64, 1000, [0, 0, 1]) == 0


def test_limits_of_the_prefix() -> None:
    """An empty prompt, no groups, and a small pool each shorten the prefix."""
    model = groups(64)
    assert geometry.restorable_prefix(model, 64, 0, [1, 1]) == 0
    assert geometry.restorable_prefix(model, 64, 1000, []) == 0
    assert geometry.restorable_prefix(model, 64, 1000, [1, 1, 1], max_chunks=2) == 128
    assert geometry.restorable_prefix([Group(SCRATCH, 0)], 64, 1000, [0, 0]) == 0
