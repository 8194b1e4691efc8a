"""The server's numbers as one plain JSON document: what ``stats`` answers and metrics show."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from lmcache_persist import __version__
from lmcache_persist.printable import short
from lmcache_persist.server.converge import Converger
from lmcache_persist.server.health import Probe, Problem
from lmcache_persist.server.lookups import Lookups
from lmcache_persist.server.metrics import MAX_NAME_CHARS
from lmcache_persist.server.registration import Engine, Registry
from lmcache_persist.server.sessions import Sessions
from lmcache_persist.server.state import ServerState
from lmcache_persist.server.stores import Stores

MAX_ENGINES_SHOWN, MAX_RANKS_SHOWN = 256, 64
"""Bounds of what is said of engines: whatever registers, the numbers fit a message."""


class StatsReport:
    """Makes the document.

    Threads: any; every number is read by itself, so two of them may be an instant apart.
    """

    def __init__(
        self,
        state: ServerState,
        sessions: Sessions,
        registry: Registry,
        lookups: Lookups,
        stores: Stores,
        probe: Probe,
    ) -> None:
        self._state, self._sessions, self._registry = state, sessions, registry
        self._lookups, self._stores, self._probe = lookups, stores, probe

    def make(self, converger: Converger | None, problems: list[Problem]) -> dict[str, Any]:
        """The numbers; names are those of docs/metrics.md."""
        state, memory, sessions = self._state, self._state.memory, self._sessions.all()
        return {
            "boot_id": state.boot_id,
            "version": __version__,
            "endpoint": state.endpoint,
            "started_at": state.started_at,
            "uptime_s": round(time.monotonic() - state.started_s, 3),
            "problems": [{"reason": one.reason, "detail": one.detail} for one in problems],
            "chunk_size": state.binding.chunk_size if state.binding else None,
            "boundary_id": state.binding.boundary_id if state.binding else None,
            "chunk_size_from": converger.stats() if converger else None,
            "counters": state.counters.numbers(),
            "requests": dict(state.counters.requests),
            "rejections": dict(state.counters.rejections_by_code),
            "lookup_results": dict(state.counters.lookup_results),
            "dropped_stores": {**state.counters.drops, "incomplete": memory.incomplete},
            "models": {
                name: traffic.to_json() for name, traffic in list(state.counters.models.items())
            },
            "histograms": state.histograms.snapshot(),
            "committed_seq": state.sequence.last,
            "durable_seq": state.sequence.durable_seq,
            "pool": self._pool(),
            "disk": self._disk(),
            "sessions": len(sessions),
            "sessions_by_kind": Counter(session.kind for session in sessions),
            "clients": self._sessions.clients,
            "engines": [_engine(one) for one in self._registry.all()[:MAX_ENGINES_SHOWN]],
            "longest_turn_s": state.longest_turn_s,
            "lookups_open": len(self._lookups),
            "lookups_by_phase": self._lookups.phases(),
            "flushes_waiting": self._stores.flushes_waiting,
            "reads_pending": len(state.reading),
            "leased_bytes": sum(session.held_bytes for session in sessions),
            "writer": {
                "alive": state.writer.alive,
                "backlog": state.writer.backlog,
                "failures": state.writer.failures,
                "failing": state.writer.failing,
                "last_error": state.writer.last_error,
            },
        }

    def _pool(self) -> dict[str, int]:
        memory = self._state.memory
        return {
            "size_bytes": self._state.pool.size_bytes,
            "free_bytes": memory.allocator.free_bytes,
            "largest_free_bytes": memory.allocator.largest_free_bytes,
            "reserved_bytes": memory.all_reserved_bytes,
            "chunks": len(memory),
            "evictions": memory.evictions,
            "reservations": memory.reservations,
        }

    def _disk(self) -> dict[str, Any]:
        state, usage = self._state, self._probe.usage
        return {
            "backend": state.disk.backend,
            "capacity_bytes": state.disk.capacity_bytes,
            "used_bytes": usage.used_bytes if usage else None,
            "chunks": usage.chunks if usage else None,
            "objects": usage.objects if usage else None,
            "object_bytes": usage.bytes if usage else None,
            "stale_objects": usage.stale_objects if usage else None,
            "stale_bytes": usage.stale_bytes if usage else None,
            "corrupt_found": state.disk.corrupt_found,
        }


def _engine(engine: Engine) -> dict[str, Any]:
    return {
        "engine": short(engine.name, MAX_NAME_CHARS),
        "model": short(engine.identity.get("model", ""), MAX_NAME_CHARS),
        "fingerprint": engine.fingerprint,
        "world_size": engine.world_size,
        "missing_ranks": engine.missing_ranks[:MAX_RANKS_SHOWN],
        "traffic": engine.traffic.to_json(),
    }
