"""What a running server counts and measures, in plain Python.

Everything here is cheap enough for the loop: integers, dicts of a fixed or bounded set of
keys, histograms with fixed buckets. How it is shown is :mod:`lmcache_persist.server.exposition`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_args

from lmcache_persist import protocol
from lmcache_persist.errors import ERRORS_BY_CODE, BindingError, GeometryError, RegistrationError
from lmcache_persist.printable import short
from lmcache_persist.store.base import DropReason

REQUEST_TYPES = tuple(str(kind.__struct_config__.tag) for kind in get_args(protocol.Request))
REJECTION_CODES = tuple(
    code
    for code, kind in ERRORS_BY_CODE.items()
    if issubclass(kind, GeometryError | BindingError | RegistrationError)
)
"""Why binds and registrations are refused; shown as zeros from the start."""

LOOKUP_RESULTS = ("full", "partial", "miss")
"""Full: all that this prompt's whole chunks could give, one token being left to compute."""

MAX_MODELS = 32
"""Models with numbers of their own; whatever else comes counts as :data:`OTHER_MODELS`."""
OTHER_MODELS = "other"
MAX_NAME_CHARS = 200


class Histogram:
    """Observations in fixed buckets.

    Args:
        bounds: upper bounds of the buckets, rising; one more holds what is above.

    Threads: one observes; any reads.
    """

    __slots__ = ("_counts", "_sum", "bounds")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> dict[str, Any]:
        """``buckets`` (cumulative counts per bound), ``count`` and ``sum``."""
        counts, total = list(self._counts), 0
        buckets: list[tuple[float, int]] = []
        for bound, count in zip(self.bounds, counts, strict=False):
            total += count
            buckets.append((bound, total))
        return {"buckets": buckets, "count": total + counts[-1], "sum": self._sum}


# From what the pool answers in to what a sick disk takes.
_LATENCIES_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip


@dataclass(slots=True)
class Histograms:
    """Times in seconds.

    Attributes:
        lookup_seconds: from a lookup's arrival until it is decided, disk reads included.
        disk_read_seconds: one chunk's objects read from disk and verified.
        group_commit_seconds: one write of a batch to the disk tier, its sync included.
        durable_seconds: from a chunk's last commit until it is durable.
    """

    lookup_seconds: Histogram = field(default_factory=lambda: Histogram(_LATENCIES_S))
    disk_read_seconds: Histogram = field(default_factory=lambda: Histogram(_LATENCIES_S))
    group_commit_seconds: Histogram = field(default_factory=lambda: Histogram(_LATENCIES_S))
    durable_seconds: Histogram = field(default_factory=lambda: Histogram(_LATENCIES_S))

    def snapshot(self) -> dict[str, Any]:
        """Every histogram by name."""
        return {one.name: getattr(self, one.name).snapshot() for one in fields(self)}


@dataclass(slots=True)
class Traffic:
    """What one engine, or one model, asked for and moved. Only grows."""

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    loaded_bytes: int = 0
    committed_bytes: int = 0

    def to_json(self) -> dict[str, int]:
        """Plain numbers by name."""
        return asdict(self)


@dataclass(slots=True)
class Counters:
    """Numbers that only grow while the server lives.

    Attributes:
        requests: messages understood, by type.
        rejections_by_code: binds and registrations refused, by error code.
        lookup_results: lookups decided, by :data:`LOOKUP_RESULTS`.
        drops: stores that did not become durable, by :class:`DropReason`.
        models: by model, see :meth:`of_model`.

    Threads: written on the loop (plain adds), read anywhere.
    """

    binds: int = 0
    lookups: int = 0
    lookups_repeated: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    memory_hit_chunks: int = 0
    disk_hit_chunks: int = 0
    loads: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    disk_read_bytes: int = 0
    commits: int = 0
    committed_bytes: int = 0
    stored_chunks: int = 0
    stored_bytes: int = 0
    dropped_chunks: int = 0
    disk_evictions: int = 0
    pruned_chunks: int = 0
    swept_objects: int = 0
    corrupt_chunks: int = 0
    read_failures: int = 0
    rejections: int = 0
    stale_messages: int = 0
    bad_messages: int = 0
    defects: int = 0
    undeliverable: int = 0
    dead_clients: int = 0
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REQUEST_TYPES, 0))
    rejections_by_code: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(REJECTION_CODES, 0)
    )
    lookup_results: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LOOKUP_RESULTS, 0))
    drops: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys((reason.value for reason in DropReason), 0)
    )
    models: dict[str, Traffic] = field(default_factory=dict)

    def numbers(self) -> dict[str, int]:
        """The plain ones by name."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, int)}

    def rejected(self, code: str) -> None:
        """Count a refused bind or registration. Codes are ours, so they are few."""
        self.rejections += 1
        self.rejections_by_code[code] = self.rejections_by_code.get(code, 0) + 1

    def dropped(self, reason: DropReason, count: int = 1) -> None:
        """Count stores that did not become durable."""
        self.drops[reason.value] += count

    def of_model(self, name: object) -> Traffic:
        """The numbers of a model; names come from outside, so only so many get their own."""
        label = short(name, MAX_NAME_CHARS)
        found = self.models.get(label)
        if found is None:
            if len(self.models) >= MAX_MODELS:
                label = OTHER_MODELS
            found = self.models.setdefault(label, Traffic())
        return found
