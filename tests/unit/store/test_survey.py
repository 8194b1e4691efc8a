"""The survey: exact for a small store, a fair estimate of a large one, bounded for any."""

from __future__ import annotations

import random
from bisect import bisect_right

import pytest

from lmcache_persist.hashing import ChunkHash
from lmcache_persist.identity import Fingerprint
from lmcache_persist.store import survey as surveying
from lmcache_persist.store.base import (
    ChunkKey,
    ChunkRecord,
    FingerprintUsage,
    Page,
    Place,
    StoredObject,
    StoredObjects,
    Usage,
    chunk_key,
)
from lmcache_persist.store.survey import AGE_LIMITS_S, MAX_SAMPLED, RUN, Survey, survey

NOW = 2_000_000_000
BINDING = "b" * 64
SMALL = {Place(0, 0): StoredObject(100, (b"d" * 16,))}
LARGE = {**SMALL, Place(0, 1): StoredObject(900, (b"e" * 16,))}
SHAPES = [StoredObjects.of(SMALL), StoredObjects.of(LARGE)]


def name_of(model: int) -> str:
    """The fingerprint of a numbered model."""
    return ((model + 1).to_bytes(2, "big") * 16).hex()


class FakeStore:
    """Records in a sorted list; counts how many were handed out."""

    def __init__(self, records: list[ChunkRecord]) -> None:
        self.records = sorted(records, key=lambda record: record.key)
        self.keys = [record.key for record in self.records]
        self.handed_out = 0

    def usage(self) -> Usage:
        by_fingerprint: dict[str, FingerprintUsage] = {}
        live = [record for record in self.records if record.binding_id == BINDING]
        for record in live:
            name = record.key[:32].hex()
            used = by_fingerprint.get(name, FingerprintUsage(0, 0, 0))
            by_fingerprint[name] = FingerprintUsage(
                used.chunks + 1,
                used.objects + len(record.objects),
                used.bytes + record.objects.table.nbytes,
            )
        total = sum(record.objects.table.nbytes for record in live)
        objects = sum(len(record.objects) for record in live)
        return Usage(len(live), objects, total, 0, 0, 0, 0, by_fingerprint)

    def page(self, after: bytes, limit: int, fingerprint: bytes = b"") -> Page:
        start = bisect_right(self.keys, max(after, fingerprint))
        found = [
            one for one in self.records[start : start + limit] if one.key.startswith(fingerprint)
        ]
        self.handed_out += len(found)
        more = start + limit < len(self.keys) and self.keys[start + limit].startswith(fingerprint)
        return Page(found, found[-1].key if found and more else None)


def store_of(counts: list[int], rng: random.Random, *, stale: int = 0) -> FakeStore:
    """Models with so many chunks; older ones were used longer ago; every third one has hits."""
    records = []
    for model, count in enumerate(counts):
        name = Fingerprint(name_of(model))
        for number in range(count):
            key = chunk_key(name, ChunkHash(rng.randbytes(32)))
            records.append(record(key, number, count))
        for number in range(stale):
            key = chunk_key(name, ChunkHash(rng.randbytes(32)))
            records.append(record(key, number, count, binding="c" * 64))
    return FakeStore(records)


def record(key: ChunkKey, number: int, count: int, binding: str = BINDING) -> ChunkRecord:
    """A chunk; the later, the younger, over two weeks."""
    age = (count - number) * 14 * 86400 // count
    hits = 6 if number % 3 == 0 else 0
    return ChunkRecord(key, binding, SHAPES[number % 2], number, number, hits, NOW - age)


def check_sums(found: Survey, store: FakeStore, tolerance: float) -> None:
    """Every histogram adds up to what is there, about."""
    usage = store.usage()
    for parts in (found.ages, found.order):
        assert sum(part.chunks for part in parts) == pytest.approx(usage.chunks, rel=tolerance)
        assert sum(part.bytes for part in parts) == pytest.approx(usage.bytes, rel=tolerance)
    for name, used in usage.by_fingerprint.items():
        groups = found.models[name].groups
        assert groups[0].objects == pytest.approx(used.chunks, rel=tolerance)
        assert groups[1].objects == pytest.approx(used.chunks / 2, rel=max(tolerance, 0.1) * 2)
        hits = found.models[name].hits
        assert hits == pytest.approx(2 * used.chunks, rel=max(tolerance, 0.1) * 3)


@pytest.mark.parametrize("counts", [[1], [10, 7], [MAX_SAMPLED - 8, 8]])
def test_a_small_store_is_told_exactly(counts: list[int], seed: int) -> None:
    """Up to the bound every chunk counts once, whatever lies between that is stale."""
    store = store_of(counts, random.Random(seed), stale=20)
    found = survey(store, BINDING, now_s=NOW)
    assert (found.seen_chunks, found.of_chunks) == (sum(counts), sum(counts))
    usage = store.usage()
    for parts in (found.ages, found.order):
        assert sum(part.chunks for part in parts) == usage.chunks
        assert sum(part.bytes for part in parts) == usage.bytes
    for name, used in usage.by_fingerprint.items():
        groups = found.models[name].groups.values()
        assert sum(group.objects for group in groups) == used.objects
        assert sum(group.bytes for group in groups) == used.bytes
        assert found.models[name].hits == 6 * -(-used.chunks // 3)


def test_a_large_store_costs_no_more_and_is_told_about_right(seed: int) -> None:
    """Of 40000 chunks no more than the bound are read; sums, ages, order and groups fit."""
    store = store_of([30_000, 9_900, 100], random.Random(seed))
    found = survey(store, BINDING, now_s=NOW)
    assert store.handed_out <= MAX_SAMPLED
    assert MAX_SAMPLED // 2 < found.seen_chunks < found.of_chunks == 40_000
    check_sums(found, store, 0.05)
    by_age = {bucket.from_s: bucket.chunks for bucket in found.ages}
    assert by_age[7 * 86400] == pytest.approx(20_000, rel=0.1)
    assert [part.chunks for part in found.order] == pytest.approx([4000] * 10, rel=0.05)
    ages = [part.oldest_at for part in found.order]
    assert ages == sorted(ages)


def test_many_models_take_turns(seed: int) -> None:
    """With more models than places to look at, the bound still holds, the large ones count."""
    store = store_of([5000] + [20] * 400, random.Random(seed))
    found = survey(store, BINDING, now_s=NOW)
    assert store.handed_out <= MAX_SAMPLED + RUN
    assert name_of(0) in found.models
    assert len(found.models) < 401


def test_a_slow_disk_is_asked_no_more(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the time is up, what was seen has to do."""
    monkeypatch.setattr(surveying, "BUDGET_S", 0.0)
    found = survey(store_of([5000], random.Random(seed)), BINDING, now_s=NOW)
    assert (found.seen_chunks, found.of_chunks, found.models) == (0, 5000, {})
    assert sum(bucket.chunks for bucket in found.ages) == 0
    assert found.order == []


def test_a_clock_that_was_set_back_makes_no_negative_age(seed: int) -> None:
    """Chunks from the future are young."""
    found = survey(store_of([5], random.Random(seed)), BINDING, now_s=NOW - 100 * 86400)
    assert found.ages[0].chunks == 5
    assert [bucket.to_s for bucket in found.ages] == [*AGE_LIMITS_S, None]
