"""Loading: the slots that a lookup has reserved are filled from the disk, every digest checked.

One object is read once, however many lookups wait for it.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from lmcache_persist.server.lookup import Lookup, Phase, Wanted
from lmcache_persist.server.reading import Read, read_objects
from lmcache_persist.server.state import ServerState
from lmcache_persist.store.base import ChunkKey, ChunkRecord, Place
from lmcache_persist.store.slots import Entry
from lmcache_persist.store.throttle import Throttle

log = logging.getLogger(__name__)


class Loading:
    """The loads of all lookups.

    Threads: the loop; reads run on the readers.
    """

    def __init__(
        self, state: ServerState, loaded: Callable[[Lookup], None], room: Callable[[], None]
    ) -> None:
        """Set up; nothing is read yet.

        Args:
            state: of the server.
            loaded: told of each lookup that waits for nothing more.
            room: told when something may have let go of room in the pool.
        """
        self._state = state
        self._on_loaded = loaded
        self._on_room = room
        self._waiting: dict[Wanted, list[Lookup]] = {}
        self._reads = itertools.count(1)
        self._corrupt, self._unreadable = Throttle(log), Throttle(log)

    def load(
        self,
        lookup: Lookup,
        needs: Mapping[ChunkKey, list[Place]],
        to_read: Mapping[ChunkKey, list[Place]],
    ) -> None:
        """Read ``to_read``, and wait for what of ``needs`` is not ready."""
        memory = self._state.memory
        lookup.phase = Phase.LOADING
        for key, places in needs.items():
            entry = memory.get(key)
            for place in places:
                if entry is not None and not entry.slots[place].ready:
                    lookup.pending.add((key, place))
                    self._waiting.setdefault((key, place), []).append(lookup)
        for key, places in to_read.items():
            lookup.from_disk.add(key)
            self._read(key, places, lookup.records[key])
        if not lookup.pending:
            self._on_loaded(lookup)

    def _read(self, key: ChunkKey, places: list[Place], record: ChunkRecord) -> None:
        state = self._state
        entry = state.memory.get(key)
        if entry is None:
            raise RuntimeError("a chunk without an entry is being read")
        state.memory.pin(entry)
        number = next(self._reads)
        state.reading[number] = time.monotonic()
        views = {
            place: state.pool.view(entry.slots[place].offset, entry.slots[place].nbytes)
            for place in places
        }
        state.run(
            state.readers,
            lambda: read_objects(state.disk.read_into, record, views),
            lambda done: self._read_done(number, entry, places, record.serial, done),
        )

    def _read_done(
        self, number: int, entry: Entry, places: list[Place], serial: int, done: Future[Read]
    ) -> None:
        state = self._state
        del state.reading[number]
        outcome = done.result()
        state.histograms.disk_read_seconds.observe(outcome.seconds)
        bad = [place for place in places if place not in outcome.good]
        for place in outcome.good:
            entry.slots[place].ready = True
            state.counters.disk_read_bytes += entry.slots[place].nbytes
        if outcome.corrupt:
            state.counters.corrupt_chunks += 1
            self._corrupt.warning(f"chunk is corrupt and dropped: {outcome.error}")
            state.writer.drop({entry.key: serial})
        elif outcome.error:
            state.counters.read_failures += 1
            self._unreadable.warning(f"chunk {entry.key.hex()} cannot be read: {outcome.error}")
        state.memory.load_failed(entry, bad)
        waiting: dict[int, Lookup] = {}
        for place in places:
            for lookup in self._waiting.pop((entry.key, place), []):
                lookup.pending.discard((entry.key, place))
                if place in bad:
                    lookup.failed.add(entry.key)
                waiting[id(lookup)] = lookup
        state.memory.unpin(entry)
        for lookup in waiting.values():
            if not lookup.pending and not lookup.cancelled:
                self._on_loaded(lookup)
        self._on_room()
