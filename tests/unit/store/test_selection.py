"""What prune means: selectors combine, and the order of use tells more than the records."""

from __future__ import annotations

import pytest

from lmcache_persist.identity import Fingerprint
from lmcache_persist.store.base import ChunkRecord, Place, StoredObject, StoredObjects
from lmcache_persist.store.selection import Chooser, Picked, Selection, bytes_in_scope
from store_support import binding, key

NOW = 10_000.0
BOUND = binding().binding_id
OLD = binding(1280).binding_id
ONE, TWO = (Fingerprint(key(0, model)[:32].hex()) for model in (1, 2))


def record(
    order: int, *, model: int = 1, stored_at: int = 0, binding_id: str = BOUND, nbytes: int = 100
) -> ChunkRecord:
    """A chunk with one object."""
    objects = StoredObjects.of({Place(0, 0): StoredObject(nbytes, (bytes(16),))})
    return ChunkRecord(key(order, model), binding_id, objects, order, order, 0, stored_at)


def chosen(
    selection: Selection, records: list[ChunkRecord], *, held_bytes: int = 10**6
) -> list[int]:
    """The orders of those that are meant."""
    chooser = Chooser(selection, BOUND, held_bytes=held_bytes, now=NOW)
    found = []
    for one in records:
        if chooser.done:
            break
        if chooser.needs(one.key) and chooser.judge(one):
            found.append(one.order)
    assert [k for one in records if one.order in found for k in [one.key]] == chooser.picked.keys
    return found


def test_all_selectors_have_to_mean_a_chunk() -> None:
    """Model, staleness and age each take some away."""
    records = [
        record(1, model=1, stored_at=100),
        record(2, model=2, stored_at=100),
        record(3, model=1, stored_at=100, binding_id=OLD),
        record(4, model=1, stored_at=5000),
    ]
    only_one = frozenset({ONE})
    assert chosen(Selection(only_one), records) == [1, 3, 4]
    assert chosen(Selection(frozenset({ONE, TWO})), records) == [1, 2, 3, 4]
    assert chosen(Selection(stale=True), records) == [3]
    assert chosen(Selection(stored_before=200), records) == [1, 2, 3]
    assert chosen(Selection(only_one, stored_before=200), records) == [1, 3]
    assert chosen(Selection(only_one, stale=True, stored_before=200), records) == [3]


def test_what_was_used_after_a_late_store_is_not_old() -> None:
    """An old chunk behind a young one in the order of use was used later than that was stored."""
    records = [record(1, stored_at=100), record(2, stored_at=5000), record(3, stored_at=100)]
    assert chosen(Selection(stored_before=1000), records) == [1]


def test_a_time_of_a_wrong_clock_says_nothing() -> None:
    """A chunk stored in the future ends no walk, and is not old either way it is read."""
    future = int(NOW) + 50
    records = [record(1, stored_at=future), record(2, stored_at=100)]
    assert chosen(Selection(stored_before=1000), records) == [2]


def test_down_to_a_size_stops_at_it() -> None:
    """The least recently used go until what is in scope takes no more than the size."""
    records = [record(order) for order in range(1, 11)]
    assert chosen(Selection(down_to_bytes=1000), records, held_bytes=1000) == []
    assert chosen(Selection(down_to_bytes=999), records, held_bytes=1000) == [1]
    assert chosen(Selection(down_to_bytes=750), records, held_bytes=1000) == [1, 2, 3]
    assert chosen(Selection(down_to_bytes=800), records, held_bytes=1000) == [1, 2]
    assert chosen(Selection(down_to_bytes=0), records, held_bytes=1000) == list(range(1, 11))


def test_a_size_is_about_what_is_in_scope() -> None:
    """Of a model, its objects count; with stale, the stale ones."""
    held = [(BOUND, ONE, 10), (BOUND, TWO, 200), (OLD, ONE, 3000)]
    assert bytes_in_scope(Selection(), held, BOUND) == 3210
    assert bytes_in_scope(Selection(frozenset({ONE})), held, BOUND) == 3010
    assert bytes_in_scope(Selection(stale=True), held, BOUND) == 3000
    assert bytes_in_scope(Selection(frozenset({TWO}), stale=True), held, BOUND) == 0


@pytest.mark.parametrize(
    ("selection", "everything"),
    [
        (Selection(), True),
        (Selection(frozenset()), False),
        (Selection(stale=True), False),
        (Selection(stored_before=0), False),
        (Selection(down_to_bytes=0), False),
    ],
)
def test_a_selection_without_a_limit_says_so(selection: Selection, everything: bool) -> None:
    """Only one without any selector means everything; no model is not every model."""
    assert selection.is_everything is everything
    assert selection.in_scope(ONE, stale=True) is (selection.fingerprints is None)


def test_steps_add_up_by_model() -> None:
    """The sum has a row per model and staleness, and the last step's cursor."""
    total, step = Picked(), Picked(cursor=b"x")
    step.add(record(1, nbytes=10), stale=False)
    step.add(record(2, model=2, nbytes=5), stale=True)
    for _ in range(2):
        total.add_all(step)
    assert {place: amount.bytes for place, amount in total.amounts.items()} == {
        (ONE, False): 20,
        (TWO, True): 10,
    }
    assert (total.bytes, total.cursor, total.keys) == (30, b"x", [])
