"""What a verb throws away, in words: one rule for all that ask. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lmcache_persist.store.base import Usage
from lmcache_persist.units import approximate_size, counted

MAX_MODELS = 20
"""Models that are named, the largest first."""


def amount(objects: int, nbytes: int) -> str:
    """Objects and their size."""
    return f"{counted(objects, 'object')} ({approximate_size(nbytes)})"


def rows_of(usage: Usage) -> list[tuple[str, int, int]]:
    """Fingerprint, objects and bytes of each model in a store."""
    return [(name, used.objects, used.bytes) for name, used in usage.by_fingerprint.items()]


def per_model(
    rows: Iterable[tuple[str, int, int]], names: Mapping[str, str] | None = None
) -> list[str]:
    """A line for each model that loses something.

    Args:
        rows: fingerprint, objects and bytes.
        names: of models, by fingerprint.
    """
    found = sorted((row for row in rows if row[1]), key=lambda row: (-row[2], row[0]))
    lines = [
        f"  {(names or {}).get(fingerprint, 'unknown model')} {fingerprint[:12]}:"
        f" {amount(objects, nbytes)}"
        for fingerprint, objects, nbytes in found[:MAX_MODELS]
    ]
    if len(found) > MAX_MODELS:
        rest = found[MAX_MODELS:]
        lost = amount(sum(row[1] for row in rest), sum(row[2] for row in rest))
        lines.append(f"  {len(rest)} more models: {lost}")
    return lines
