"""How far all commits are settled."""

from __future__ import annotations

import pytest

from lmcache_persist.store.sequence import CommitSequence


def test_durable_stops_before_the_first_open_commit() -> None:
    """A later commit that is settled does not hide an earlier one that is open."""
    sequence = CommitSequence()
    first = sequence.begin()
    sequence.add(first)
    sequence.add(first)
    second = sequence.begin()
    sequence.add(second)
    assert sequence.durable_seq == 0
    sequence.settle(second)
    sequence.settle(first)
    assert sequence.durable_seq == 0
    sequence.settle(first)
    assert sequence.durable_seq == second


def test_an_empty_commit_is_settled_at_once() -> None:
    """A commit of nothing holds nothing up."""
    sequence = CommitSequence()
    assert sequence.durable_seq == 0
    assert sequence.begin() == sequence.durable_seq == 1


def test_a_closed_commit_takes_nothing_more() -> None:
    """What durable_seq may have passed cannot be opened again."""
    sequence = CommitSequence()
    first = sequence.begin()
    sequence.begin()
    with pytest.raises(ValueError, match="closed"):
        sequence.add(first)


def test_a_held_sequence_stands_still() -> None:
    """What is settled meanwhile shows only afterwards."""
    sequence = CommitSequence()
    assert sequence.begin() == 1
    sequence.hold()
    second = sequence.begin()
    sequence.add(second)
    sequence.settle(second)
    assert sequence.durable_seq == 1
    sequence.go_on()
    assert sequence.durable_seq == second
