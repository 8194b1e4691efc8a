"""What each lookup adds to the numbers: once per prompt, however often it is polled."""

from __future__ import annotations

import time

from lmcache_persist import protocol
from lmcache_persist.server.lookup import Lookup
from lmcache_persist.server.state import ServerState


class Tally:
    """Counts lookups.

    A prompt counts when it is first looked up, hit or miss, so that the hit rate has every
    prompt in it. One that its engine looks up again after a preemption counts once; what is
    *found* is a promise and counts as a hit, what engines report as *loaded* is counted
    apart.

    Threads: the loop.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def started(self, lookup: Lookup) -> None:
        """A lookup arrived."""
        counters = self._state.counters
        if not lookup.counted:
            counters.lookups_repeated += 1
            return
        counters.lookups += 1
        counters.lookup_tokens += lookup.num_tokens
        for traffic in lookup.engine.traffics:
            traffic.lookups += 1
            traffic.lookup_tokens += lookup.num_tokens

    def decided(self, lookup: Lookup, found: protocol.Found) -> None:
        """It is known what can be restored; ``lookup.keys`` are still there."""
        state, counters = self._state, self._state.counters
        state.histograms.lookup_seconds.observe(time.monotonic() - lookup.started_s)
        counters.memory_hit_chunks += found.memory_chunks
        counters.disk_hit_chunks += found.disk_chunks
        if not lookup.counted:
            return
        counters.hit_tokens += found.tokens
        for traffic in lookup.engine.traffics:
            traffic.hit_tokens += found.tokens
        size = state.binding.chunk_size if state.binding else 1
        result = "miss"
        if found.tokens:
            result = "full" if found.tokens == len(lookup.keys) * size else "partial"
        counters.lookup_results[result] += 1

    def loaded(self, lookup: Lookup, tokens: int) -> None:
        """The engine has loaded so many of the tokens that were found."""
        result, counters = lookup.result, self._state.counters
        if result is None or not result.tokens:
            return
        nbytes = sum(run.object_bytes * len(run.offsets) for run in result.runs)
        counters.loads += 1
        # Never more than was promised, whatever a client says.
        counters.loaded_tokens += min(tokens, result.tokens)
        counters.loaded_bytes += nbytes
        for traffic in lookup.engine.traffics:
            traffic.loaded_bytes += nbytes
