"""What goes into and comes out of a client's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_persist.binding import Binding
from lmcache_persist.errors import PersistError
from lmcache_persist.geometry import Group
from lmcache_persist.protocol import SlotRun


@dataclass(frozen=True, slots=True)
class Registration:
    """What one worker runs.

    Attributes:
        engine: the engine's id, the same on all of its ranks.
        rank: from 0.
        world_size: ranks of the engine.
        identity: as :func:`lmcache_persist.identity.check_identity` wants it.
        layout: this rank's, a plain JSON object.
        groups: the geometry that was bound.
        object_bytes: per group, bytes of one chunk's object on this rank; 0 for scratch.
    """

    engine: str
    rank: int
    world_size: int
    identity: Mapping[str, Any]
    layout: Mapping[str, Any]
    groups: Sequence[Group]
    object_bytes: Sequence[int]


@dataclass(frozen=True, slots=True)
class BindOutcome:
    """What a bind came to: ``bound`` (it won) or ``compatible``; a refusal is raised."""

    outcome: str
    binding: Binding
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What a lookup came to.

    Attributes:
        tokens: P, the prefix that is leased in slots; 0 is a miss.
        boot_id: of the server whose pool the offsets point into.
        runs: the slots, checked against the pool's size.
        memory_chunks: of P, chunks that were in the memory tier.
        disk_chunks: of P, chunks that came from disk.
        error: why it is a miss although the server did not say so, else None.
    """

    tokens: int = 0
    boot_id: str = ""
    runs: tuple[SlotRun, ...] = ()
    memory_chunks: int = 0
    disk_chunks: int = 0
    error: PersistError | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """What a client found after it connected, the first time or again.

    Attributes:
        generation: counts connections, from 1.
        boot_id: the server's.
        binding: the server's, None while it is unbound. Another one than before: whatever
            depends on the chunk size has to be made anew.
        cold: why this server does not serve the remembered bind or registrations, else None.
    """

    generation: int
    boot_id: str
    binding: Binding | None
    cold: PersistError | None = field(default=None)
