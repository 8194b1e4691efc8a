"""What a verb throws away, in words: one rule for all that ask, or tell. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lmcache_persist.store.base import Usage
from lmcache_persist.units import approximate_size, counted

MAX_MODELS = 20
"""Models that are named, the largest first."""


class Loss(NamedTuple):
    """What one model loses.

    Attributes:
        fingerprint: the model's.
        chunks: how many.
        objects: in them.
        nbytes: of the objects.
        stale: whether nobody could find them anyway.
    """

    fingerprint: str
    chunks: int
    objects: int
    nbytes: int
    stale: bool = False


def amount(chunks: int, objects: int, nbytes: int) -> str:
    """Chunks, objects and their size."""
    return f"{counted(chunks, 'chunk')}, {objects_amount(objects, nbytes)}"


def objects_amount(objects: int, nbytes: int) -> str:
    """Objects and their size, where chunks are not counted."""
    return f"{counted(objects, 'object')} ({approximate_size(nbytes)})"


def amount_of(losses: Iterable[Loss]) -> str:
    """What they add up to."""
    rows = list(losses)
    return amount(
        sum(row.chunks for row in rows),
        sum(row.objects for row in rows),
        sum(row.nbytes for row in rows),
    )


def losses_of(usage: Usage) -> list[Loss]:
    """All that each model has in a store, stale objects left out."""
    return [
        Loss(name, used.chunks, used.objects, used.bytes)
        for name, used in usage.by_fingerprint.items()
    ]


def per_model(losses: Iterable[Loss], names: Mapping[str, str] | None = None) -> list[str]:
    """A line for each model that loses something.

    Args:
        losses: in any order.
        names: of models, by fingerprint.
    """
    found = sorted((row for row in losses if row.objects), key=lambda row: (-row.nbytes, row))
    lines = [
        f"  {(names or {}).get(row.fingerprint, 'unknown model')} {row.fingerprint[:12]}"
        f"{', stale' if row.stale else ''}: {amount_of([row])}"
        for row in found[:MAX_MODELS]
    ]
    if len(found) > MAX_MODELS:
        rest = found[MAX_MODELS:]
        lines.append(f"  {len(rest)} more models: {amount_of(rest)}")
    return lines
