"""What the chunks of a store are like, from a few of them: ages, order of use, groups.

Totals are exact and kept by the store. What they do not hold is estimated here from a
bounded number of records, so that a million of them cost no more than a few thousand.
Chunk hashes are as good as random, so records that lie beside each other in the order of
keys are a fair sample of their model. A small store is read whole, and exact.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lmcache_persist.hashing import CHUNK_HASH_BYTES
from lmcache_persist.store.base import ChunkRecord, Page, Usage

MAX_SAMPLED = 4096
"""Chunks that are looked at."""
RUN = 16
"""Chunks read at one place; a place costs a seek or two on a cold disk."""
BUDGET_S = 0.5
"""Seconds after which a slow disk gets no more questions."""

AGE_LIMITS_S = (60, 600, 3600, 6 * 3600, 86400, 7 * 86400, 28 * 86400)
"""Bounds of the histogram of ages; one bucket more lies above the last."""
ORDER_PARTS = 10
"""Parts of equal size that the order of use is cut into."""


class Readable(Protocol):
    """What a survey needs of a store."""

    def usage(self) -> Usage:
        """What is in it."""
        ...

    def page(self, after: bytes, limit: int, fingerprint: bytes = b"") -> Page:
        """See :meth:`.base.DiskTier.page`."""
        ...


@dataclass(frozen=True, slots=True)
class AgeBucket:
    """Chunks that were first written so long ago; ``to_s`` is None for the oldest."""

    from_s: int
    to_s: int | None
    chunks: int
    objects: int
    bytes: int
    hit_chunks: int


@dataclass(frozen=True, slots=True)
class OrderPart:
    """One part of the order of use; the first part is evicted first.

    Attributes:
        chunks, bytes: in it.
        hit_chunks: of those, how many were ever used again.
        hits: of all of them.
        oldest_at, newest_at: when they were first written, seconds since 1970.
    """

    chunks: int
    bytes: int
    hit_chunks: int
    hits: int
    oldest_at: int
    newest_at: int


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """What one group has in the store, over all ranks."""

    objects: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ModelSurvey:
    """What the totals do not hold of one model."""

    hits: int
    groups: dict[int, GroupUsage]


@dataclass(frozen=True, slots=True)
class Survey:
    """Numbers that are exact if ``seen_chunks`` is ``of_chunks``, else estimates.

    Attributes:
        seen_chunks: chunks of the current binding that were looked at.
        of_chunks: that there are.
        ages: by time since the first write.
        order: by last use, what goes first.
        models: by fingerprint; a model none of whose chunks were looked at is absent.
    """

    seen_chunks: int
    of_chunks: int
    ages: list[AgeBucket]
    order: list[OrderPart]
    models: dict[str, ModelSurvey]


def survey(store: Readable, binding_id: str, *, now_s: float | None = None) -> Survey:
    """Look at a bounded number of chunks, for a bounded time.

    Args:
        store: a disk tier or an offline store.
        binding_id: chunks of other ones are stale and left out.
        now_s: seconds since 1970, for ages; the wall clock's by default.

    Raises:
        StoreIOError, StoreDamaged: as reading does.
    """
    usage = store.usage()
    until = time.monotonic() + BUDGET_S
    samples = {
        name: [record for record in records if record.binding_id == binding_id]
        for name, records in _sample(store, usage, until).items()
    }
    return summarize(samples, usage, time.time() if now_s is None else now_s)


def _sample(store: Readable, usage: Usage, until: float) -> dict[str, list[ChunkRecord]]:
    if usage.chunks <= MAX_SAMPLED:
        return {name: _whole(store, bytes.fromhex(name)) for name in usage.by_fingerprint}
    seen: dict[str, dict[bytes, ChunkRecord]] = {name: {} for name in usage.by_fingerprint}
    for name, start in _starts(usage):
        if time.monotonic() >= until:
            break
        prefix = bytes.fromhex(name)
        page = store.page(prefix + start, RUN, prefix)
        seen[name].update((record.key, record) for record in page.records)
    return {name: list(records.values()) for name, records in seen.items()}


def _whole(store: Readable, fingerprint: bytes) -> list[ChunkRecord]:
    records: list[ChunkRecord] = []
    after: bytes | None = b""
    # Stale chunks of the same model may lie between; not more of them than is bearable.
    while after is not None and len(records) < 2 * MAX_SAMPLED:
        page = store.page(after, MAX_SAMPLED, fingerprint)
        records += page.records
        after = page.next
    return records


def _starts(usage: Usage) -> Iterator[tuple[str, bytes]]:
    """Models and places in them, evenly spread wherever one stops."""
    runs = MAX_SAMPLED // RUN
    shares = {
        name: max(1, runs * used.chunks // usage.chunks)
        for name, used in sorted(
            usage.by_fingerprint.items(), key=lambda item: item[1].chunks, reverse=True
        )
    }
    for number in range(max(shares.values(), default=0)):
        # The bits of the number, mirrored: halves, quarters, eighths.
        place = int(f"{number:064b}"[::-1], 2).to_bytes(8, "big")
        for name, share in shares.items():
            if number < share and runs > 0:
                runs -= 1
                yield name, place + bytes(CHUNK_HASH_BYTES - len(place))


def summarize(samples: dict[str, list[ChunkRecord]], usage: Usage, now_s: float) -> Survey:
    """What samples of models say of the whole. Pure."""
    weighed: list[tuple[ChunkRecord, float]] = []
    models = {}
    for name, records in samples.items():
        if not records:
            continue
        weight = usage.by_fingerprint[name].chunks / len(records)
        weighed += [(record, weight) for record in records]
        models[name] = _model(records, weight)
    return Survey(
        seen_chunks=min(len(weighed), usage.chunks),
        of_chunks=usage.chunks,
        ages=_ages(weighed, now_s),
        order=_order(weighed),
        models=models,
    )


def _model(records: Sequence[ChunkRecord], weight: float) -> ModelSurvey:
    objects: dict[int, int] = {}
    nbytes: dict[int, int] = {}
    for record in records:
        for place, entry in record.objects.table.entries.items():
            objects[place.group] = objects.get(place.group, 0) + 1
            nbytes[place.group] = nbytes.get(place.group, 0) + entry.nbytes
    return ModelSurvey(
        hits=round(weight * sum(record.hits for record in records)),
        groups={
            group: GroupUsage(round(weight * objects[group]), round(weight * nbytes[group]))
            for group in sorted(objects)
        },
    )


def _ages(weighed: Sequence[tuple[ChunkRecord, float]], now_s: float) -> list[AgeBucket]:
    bounds = [0, *AGE_LIMITS_S]
    sums = [[0.0] * 4 for _ in bounds]
    for record, weight in weighed:
        age = now_s - record.stored_at  # below zero if the clock was set back
        at = max((at for at, start in enumerate(bounds) if age >= start), default=0)
        values = (1, len(record.objects), record.objects.table.nbytes, record.hits > 0)
        for column, value in enumerate(values):
            sums[at][column] += weight * value
    ends: list[int | None] = [*AGE_LIMITS_S, None]
    return [
        AgeBucket(start, end, *(round(value) for value in row))
        for start, end, row in zip(bounds, ends, sums, strict=True)
    ]


def _order(weighed: Sequence[tuple[ChunkRecord, float]]) -> list[OrderPart]:
    ordered = sorted(weighed, key=lambda pair: pair[0].order)
    whole = sum(weight for _, weight in ordered)
    parts: list[list[tuple[ChunkRecord, float]]] = [[] for _ in range(ORDER_PARTS)]
    before = 0.0
    for record, weight in ordered:
        middle = before + weight / 2
        parts[min(ORDER_PARTS - 1, int(ORDER_PARTS * middle / whole))].append((record, weight))
        before += weight
    return [_part(part) for part in parts if part]


def _part(part: Sequence[tuple[ChunkRecord, float]]) -> OrderPart:
    def total(values: Iterator[float]) -> int:
        return round(sum(values))

    return OrderPart(
        chunks=total(weight for _, weight in part),
        bytes=total(weight * record.objects.table.nbytes for record, weight in part),
        hit_chunks=total(weight for record, weight in part if record.hits),
        hits=total(weight * record.hits for record, weight in part),
        oldest_at=min(record.stored_at for record, _ in part),
        newest_at=max(record.stored_at for record, _ in part),
    )


def survey_from_json(value: dict[str, Any]) -> Survey:
    """The inverse of ``dataclasses.asdict``, after a trip through JSON."""
    return Survey(
        seen_chunks=value["seen_chunks"],
        of_chunks=value["of_chunks"],
        ages=[AgeBucket(**one) for one in value["ages"]],
        order=[OrderPart(**one) for one in value["order"]],
        models={
            name: ModelSurvey(
                one["hits"],
                {int(group): GroupUsage(**used) for group, used in one["groups"].items()},
            )
            for name, one in value["models"].items()
        },
    )
