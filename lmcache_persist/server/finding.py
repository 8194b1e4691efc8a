"""Finding: the disk's index is asked for a lookup's chunks that are not in the pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from lmcache_persist.errors import StoreError
from lmcache_persist.server.lookup import Lookup
from lmcache_persist.server.state import ServerState
from lmcache_persist.store.base import ChunkKey, ChunkRecord
from lmcache_persist.store.throttle import Throttle

log = logging.getLogger(__name__)

MAX_KEYS_SEARCHED = 1 << 18
"""Keys in searches that wait or run; while the disk hangs, more are looked for in the pool only."""


class Finding:
    """The searches of all lookups.

    Threads: the loop; searches run on the finder.
    """

    def __init__(self, state: ServerState, found: Callable[[Lookup], None]) -> None:
        """``found`` is told of each lookup that has the records there are."""
        self._state = state
        self._on_found = found
        self._keys_searched = 0
        self._unsearchable = Throttle(log)

    def find(self, lookup: Lookup, unknown: Sequence[ChunkKey]) -> None:
        """Search for ``unknown``; goes on at once if there are none, or too many wait."""
        waiting = self._keys_searched
        if not unknown or (waiting and waiting + len(unknown) > MAX_KEYS_SEARCHED):
            self._found(lookup, [], [])
            return
        disk = self._state.disk
        self._keys_searched += len(unknown)

        def search() -> list[ChunkRecord | None]:
            # After a hang those that gave up meanwhile are not in the way of others.
            return [] if lookup.cancelled else disk.find(unknown)

        def then(done: Future[list[ChunkRecord | None]]) -> None:
            self._keys_searched -= len(unknown)
            if lookup.cancelled:
                return
            try:
                self._found(lookup, unknown, done.result())
            except (StoreError, OSError) as error:
                self._state.counters.read_failures += 1
                self._unsearchable.warning(f"disk tier cannot be searched: {error}")
                self._found(lookup, [], [])

        self._state.run(self._state.finder, search, then)

    def _found(
        self, lookup: Lookup, keys: Sequence[ChunkKey], records: Sequence[ChunkRecord | None]
    ) -> None:
        for key, record in zip(keys, records, strict=True):
            if record is not None:
                lookup.records[key] = record
        self._on_found(lookup)
