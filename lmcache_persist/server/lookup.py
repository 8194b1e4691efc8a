"""One lookup: where it is, what it found and what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from lmcache_persist import protocol
from lmcache_persist.server.registration import Engine
from lmcache_persist.server.sessions import Session
from lmcache_persist.server.wire import Answer
from lmcache_persist.store.base import ChunkKey, ChunkRecord, Place
from lmcache_persist.store.slots import Entry

Wanted = tuple[ChunkKey, Place]


class Phase(Enum):
    """Where a lookup is."""

    FINDING = "searching the disk tier"
    WAITING = "waiting for room in the pool"
    LOADING = "loading"
    DONE = "decided"


@dataclass(slots=True, eq=False)
class Lookup:
    """One lookup of one session."""

    session: Session
    number: int
    engine: Engine
    keys: list[ChunkKey]
    num_tokens: int
    held_chunks: int
    started_s: float
    counted: bool
    phase: Phase = Phase.FINDING
    cancelled: bool = False
    present: list[int] = field(default_factory=list)
    records: dict[ChunkKey, ChunkRecord] = field(default_factory=dict)
    leased: list[Entry] = field(default_factory=list)
    pending: set[Wanted] = field(default_factory=set)
    failed: set[ChunkKey] = field(default_factory=set)
    from_disk: set[ChunkKey] = field(default_factory=set)
    prefix_tokens: int = 0
    result: protocol.Found | None = None
    answer: Answer | None = None
    answer_by_s: float = 0.0
    timed: bool = False

    def not_yet(self) -> protocol.NotYet:
        """What to say while it is undecided."""
        left = f" {len(self.pending)} objects" if self.phase is Phase.LOADING else ""
        return protocol.NotYet(doing=f"{self.phase.value}{left}")
