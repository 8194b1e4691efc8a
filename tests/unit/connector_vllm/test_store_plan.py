"""What a step leaves to be stored: chunks that are complete, states at chunk ends."""

from __future__ import annotations

import pytest

from lmcache_persist.connector.vllm.store_plan import boundary_states, plan_stores
from lmcache_persist.geometry import Group, GroupKind

NULL = 0
RECURRENT = Group(GroupKind.RECURRENT, 8, 1)
FULL = Group(GroupKind.FULL, 4, 4)
SLIDING = Group(GroupKind.SLIDING, 2, 2, 5)
SCRATCH = Group(GroupKind.SCRATCH, 0)
GROUPS = (RECURRENT, SCRATCH, FULL, SLIDING)
HASHES = [bytes([number]) * 32 for number in range(4)]


@pytest.mark.parametrize(
    ("offers", "computed", "expected"),
    [
        ([(0, 21, 16)], 16, {1: {0: 21}}),
        ([(0, 21, 16)], 20, {}),
        ([(0, 31, 8), (0, 32, 16)], 20, {0: {0: 31}}),
        ([], 16, {1: {0: 12}}),
        ([], 8, {}),
        ([], 15, {}),
        ([], 17, {}),
        ([(0, 21, 12)], 12, {}),
        ([(0, 21, 24)], 16, {1: {0: 12}}),
        ([(0, NULL, 16)], 17, {}),
        ([(2, 21, 16)], 17, {}),
        ([(0, 21, 0)], 17, {}),
        ([], 0, {}),
        ([], 24, {}),
    ],
)
def test_states_at_chunk_ends(
    offers: list[tuple[int, int, int]], computed: int, expected: dict[int, dict[int, int]]
) -> None:
    """The engine's own offers, or the table where the step ends; never an earlier block, and
    no offer for a boundary that the step passes, unless it is a checkpoint.
    """
    tables = ([NULL, 12], [], [1, 2, 3, 4], [5])

    def is_checkpoint(group: int, steps: range, boundary: int) -> bool:
        assert (group, steps) == (0, range(4, computed))
        return boundary == 8

    found = boundary_states(GROUPS, tables, offers, range(4, computed), 8, NULL, is_checkpoint)
    assert found == expected


@pytest.mark.parametrize(
    ("steps", "admitted", "expected"),
    [
        (range(8, 13), True, {0: {0: 11}}),
        (range(8, 13), False, {}),
        (range(8, 16), True, {0: {0: 11}, 1: {0: 12}}),
        (range(9, 13), True, {}),
        (range(13), True, {}),
        (range(24, 28), True, {}),
    ],
)
def test_state_that_a_request_begins_with(
    steps: range, admitted: bool, expected: dict[int, dict[int, int]]
) -> None:
    """In its first step, and in no other, where the engine's own prefix cache ended."""
    tables = ([11, 12, NULL], [], [1, 2, 3, 4], [5])
    found = boundary_states(GROUPS, tables, [], steps, 8, NULL, lambda *_: False, admitted=admitted)
    assert found == expected


def test_objects_of_a_chunk() -> None:
    """Full groups give all blocks, a small window its last ones, scratch groups none."""
    tables = ([NULL, 12], [7], [1, 2, 3, 4], [NULL, NULL, 31, 32, 33, 34, 35, 36])
    jobs = plan_stores(GROUPS, tables, HASHES, range(2), {1: {0: 12}}, 8, NULL)
    assert [(job.chunk_hash, job.mask, job.block_ids) for job in jobs] == [
        (HASHES[0], 0b1100, ((), (), (1, 2), (31, 32))),
        (HASHES[1], 0b1101, ((12,), (), (3, 4), (35, 36))),
    ]


def test_late_state_is_stored_alone() -> None:
    """The rest of its chunk was stored in an earlier step."""
    (job,) = plan_stores(GROUPS, ([9],) * 4, HASHES, range(3, 3), {1: {0: 12}}, 8, NULL)
    assert (job.chunk_hash, job.mask) == (HASHES[1], 0b1)
    assert job.block_ids == ((12,), (), (), ())


def test_group_without_all_of_its_blocks_is_left_out() -> None:
    """A null block, or a table that ends too early."""
    tables = ([], [], [1, NULL], [5, 6, 7])
    assert plan_stores(GROUPS, tables, HASHES, range(1), {}, 8, NULL) == []
