"""Lookups: decide the restorable prefix, lease it, bring it into slots.

A lookup goes through *finding* (the disk's index is asked for chunks that are not in the
pool), *waiting* (for room in the pool, holding none), *loading* (slots are reserved, all
at once, and filled; every digest is checked on the way) and *done*. Only what is verified,
in the pool and leased is answered, so that a load has nothing left to fail at.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from lmcache_persist import geometry, protocol
from lmcache_persist.errors import LeaseError, StoreError
from lmcache_persist.hashing import ChunkHash
from lmcache_persist.server.lookup import Lookup, Phase, Wanted
from lmcache_persist.server.reading import Read, read_objects
from lmcache_persist.server.registration import Engine, Registry
from lmcache_persist.server.sessions import Session, Sessions
from lmcache_persist.server.state import ServerState
from lmcache_persist.server.tally import Tally
from lmcache_persist.server.wire import Answer
from lmcache_persist.store.allocator import slot_bytes
from lmcache_persist.store.base import ChunkKey, ChunkRecord, Place, chunk_key
from lmcache_persist.store.memory import Entry, Slot
from lmcache_persist.store.throttle import Throttle

log = logging.getLogger(__name__)

MAX_LOOKUPS_PER_SESSION = 4096
MAX_KEYS_SEARCHED = 1 << 18
"""Keys in searches that wait or run; while the disk hangs, more are looked for in the pool only."""
MAX_SLOTS_PER_ANSWER = protocol.MAX_MESSAGE_BYTES // 9 - 1024
"""Nine bytes is the most that an offset takes in MessagePack."""
_SLOTS_PER_RUN = 5
"""What a run takes besides its offsets, in offsets."""


class Lookups:
    """All lookups of a server.

    Threads: the loop; reads run on the readers, searches on the finder.
    """

    def __init__(self, state: ServerState, registry: Registry, sessions: Sessions) -> None:
        self._state = state
        self._registry = registry
        self._sessions = sessions
        self._lookups: dict[tuple[str, int], Lookup] = {}
        self._waiting: deque[Lookup] = deque()
        self._retry_due = False
        self._loading: dict[Wanted, list[Lookup]] = {}
        self._reads = itertools.count(1)
        self._keys_searched = 0
        self._tally = Tally(state)
        self._unsearchable, self._corrupt, self._unreadable = (Throttle(log) for _ in range(3))

    def __len__(self) -> int:
        return len(self._lookups)

    def phases(self) -> dict[str, int]:
        """How many lookups are at what; ``leased`` are decided and hold slots. Threads: any."""
        found = dict.fromkeys(("finding", "waiting", "loading", "leased", "missed"), 0)
        for lookup in list(self._lookups.values()):
            done = "leased" if lookup.prefix_tokens else "missed"
            found[done if lookup.phase is Phase.DONE else lookup.phase.name.lower()] += 1
        return found

    # -- messages ----------------------------------------------------------------------

    def lookup(self, session: Session, message: protocol.Lookup, answer: Answer) -> None:
        """Start a lookup, or poll one; answers when decided or when ``wait_ms`` is over."""
        known = self._lookups.get((session.token, message.lookup))
        lookup = known or self._start(session, message)
        if lookup.result is not None:
            answer(lookup.result)
            return
        if message.wait_ms == 0:
            answer(lookup.not_yet())
            return
        if lookup.answer is not None:
            lookup.answer(lookup.not_yet())
        lookup.answer = answer
        lookup.answer_by_s = time.monotonic() + message.wait_ms / 1000
        if not lookup.timed:
            self._time(lookup)

    def _time(self, lookup: Lookup) -> None:
        """One timer per lookup, however often it is polled."""
        lookup.timed = True
        delay_s = max(0.0, lookup.answer_by_s - time.monotonic())
        self._state.timers.call_in(delay_s, lambda: self._waited(lookup))

    def _waited(self, lookup: Lookup) -> None:
        lookup.timed = False
        if lookup.answer is None:
            return
        if time.monotonic() < lookup.answer_by_s:
            self._time(lookup)
            return
        answer, lookup.answer = lookup.answer, None
        answer(lookup.not_yet())

    def release(self, session: Session, number: int, loaded_tokens: int = 0) -> None:
        """End a lookup, whatever it is at; ``loaded_tokens`` of it the engine has loaded."""
        lookup = self._lookups.pop((session.token, number), None)
        if lookup is None:
            return
        if loaded_tokens and lookup.result is not None:
            self._tally.loaded(lookup, loaded_tokens)
        session.lookups.discard(number)
        lookup.cancelled = True
        lookup.answer = None
        self._let_go(lookup)
        self.retry_waiting()

    def forget_session(self, session: Session) -> None:
        """A session ended: its leases too."""
        for number in list(session.lookups):
            self.release(session, number)

    # -- finding -----------------------------------------------------------------------

    def _start(self, session: Session, message: protocol.Lookup) -> Lookup:
        if not session.lock:
            raise LeaseError(
                "a session without a client lock cannot hold leases",
                hint="say hello with the client lock first",
            )
        if len(session.lookups) >= MAX_LOOKUPS_PER_SESSION:
            raise LeaseError(f"this session has {MAX_LOOKUPS_PER_SESSION} lookups open already")
        hashes = protocol.split_hashes(message.hashes)
        engine = self._registry.get(message.engine)
        binding = self._state.binding
        if engine is None or engine.fingerprint is None or binding is None:
            keys: list[ChunkKey] = []
            engine = engine or Engine(message.engine, 1, {}, ())
        else:
            limit = max(0, message.num_tokens - 1) // binding.chunk_size
            fingerprint = engine.fingerprint
            keys = [chunk_key(fingerprint, ChunkHash(h)) for h in hashes[:limit]]
        held = message.held_tokens // binding.chunk_size if binding else 0
        # As it is now: ranks may leave, or register something else, while this goes on.
        engine = replace(engine, ranks=dict(engine.ranks))
        lookup = Lookup(
            session,
            message.lookup,
            engine,
            keys,
            message.num_tokens,
            held,
            started_s=time.monotonic(),
            counted=not message.again,
        )
        self._tally.started(lookup)
        self._lookups[session.token, message.lookup] = lookup
        session.lookups.add(message.lookup)
        self._find(lookup)
        return lookup

    def _find(self, lookup: Lookup) -> None:
        everything = geometry.cacheable_mask(lookup.engine.groups)
        unknown = [key for key in lookup.keys if self._mask_in_pool(key) != everything]
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

    def _mask_in_pool(self, key: ChunkKey) -> int:
        entry = self._state.memory.get(key)
        return entry.mask() if entry is not None else 0

    def _found(
        self, lookup: Lookup, keys: Sequence[ChunkKey], records: Sequence[ChunkRecord | None]
    ) -> None:
        for key, record in zip(keys, records, strict=True):
            if record is not None:
                lookup.records[key] = record
        self._claim(lookup)

    # -- claiming ----------------------------------------------------------------------

    def _claim(self, lookup: Lookup) -> None:
        """Lease what the longest prefix that fits needs, and start what has to be read."""
        binding, session = self._state.binding, lookup.session
        if binding is None or not lookup.keys:
            self._finish(lookup, 0)
            return
        size, groups = binding.chunk_size, lookup.engine.groups
        lookup.present = [self._mask(lookup, key) for key in lookup.keys]
        room_bytes = self._state.memory.share_bytes - self._sessions.held_bytes(session)
        # What its process holds already costs nothing more.
        shared_bytes = sum(session.leased.get(key, (0, 0))[1] for key in lookup.keys)
        limit = min(
            self._most_chunks(lookup, room_bytes + shared_bytes),
            lookup.held_chunks + _chunks_per_message(lookup.engine),
        )
        prefix = geometry.restorable_prefix(
            groups, size, lookup.num_tokens, lookup.present, max_chunks=limit
        )
        wanted_any = prefix or geometry.restorable_prefix(
            groups, size, lookup.num_tokens, lookup.present
        )
        while prefix > lookup.held_chunks * size:
            if self._hold(lookup, prefix, room_bytes):
                return
            chunks = prefix // size
            shorter = chunks - max(1, chunks // 8)
            prefix = geometry.restorable_prefix(
                groups, size, lookup.num_tokens, lookup.present, max_chunks=shorter
            )
        if wanted_any > lookup.held_chunks * size and self._state.memory.in_use():
            # Something holds the room and will let go of it; wait, holding nothing.
            lookup.phase = Phase.WAITING
            self._waiting.append(lookup)
            return
        self._finish(lookup, 0)

    def _mask(self, lookup: Lookup, key: ChunkKey) -> int:
        if key in lookup.failed:
            return 0
        return self._mask_in_pool(key) | self._mask_on_disk(lookup, key)

    def _mask_on_disk(self, lookup: Lookup, key: ChunkKey) -> int:
        record = lookup.records.get(key)
        if record is None:
            return 0
        engine, mask = lookup.engine, 0
        for index, group in enumerate(engine.groups):
            # An object of another length than the geometry says is no object.
            if group.cacheable and all(
                (stored := record.objects.get(Place(number, index))) is not None
                and stored.nbytes == rank.object_bytes[index]
                for number, rank in engine.ranks.items()
            ):
                mask |= 1 << index
        return mask

    def _needs(self, lookup: Lookup, prefix: int) -> dict[ChunkKey, list[Place]]:
        binding = self._state.binding
        size = binding.chunk_size if binding else 1
        needs: dict[ChunkKey, list[Place]] = {}
        for index, group in enumerate(lookup.engine.groups):
            for chunk in geometry.chunks_needed(group, prefix, size):
                if chunk >= lookup.held_chunks:
                    places = needs.setdefault(lookup.keys[chunk], [])
                    places.extend(Place(rank, index) for rank in range(lookup.engine.world_size))
        return needs

    def _most_chunks(self, lookup: Lookup, room_bytes: int) -> int:
        """The longest prefix, in chunks, whose objects take no more of the pool than that."""
        binding, engine = self._state.binding, lookup.engine
        sizes = zip(*(rank.object_bytes for rank in engine.ranks.values()), strict=True)
        costs = [sum(map(slot_bytes, of_a_group)) for of_a_group in sizes]
        return geometry.most_chunks(
            engine.groups,
            binding.chunk_size if binding else 1,
            costs,
            room_bytes,
            range(lookup.held_chunks, len(lookup.keys) + 1),
        )

    def _cost(self, lookup: Lookup, needs: Mapping[ChunkKey, list[Place]]) -> int:
        """Bytes of the pool that a lease takes beside those that its session has."""
        ranks, leased = lookup.engine.ranks, lookup.session.leased
        return sum(
            slot_bytes(ranks[place.rank].object_bytes[place.group])
            for key, places in needs.items()
            if key not in leased
            for place in places
        )

    def _hold(self, lookup: Lookup, prefix: int, room_bytes: int) -> bool:
        """Lease the chunks of a prefix and allocate what is not in the pool; all or nothing.

        ``room_bytes``: what is left of the share of its process.
        """
        memory, engine = self._state.memory, lookup.engine
        needs = self._needs(lookup, prefix)
        if self._cost(lookup, needs) > room_bytes:
            return False
        entries = {key: memory.get(key) for key in needs}
        for entry in entries.values():
            if entry is not None:
                memory.lease(entry)
        absent: list[tuple[ChunkKey, Place, int]] = [
            (key, place, engine.ranks[place.rank].object_bytes[place.group])
            for key, places in needs.items()
            for place in places
            if (entry := entries[key]) is None or place not in entry.slots
        ]
        offsets = memory.allocate([nbytes for _, _, nbytes in absent])
        if offsets is None:
            for entry in entries.values():
                if entry is not None:
                    memory.unlease(entry)
            return False
        lookup.leased = [entry for entry in entries.values() if entry is not None]
        to_read: dict[ChunkKey, list[Place]] = {}
        for (key, place, nbytes), offset in zip(absent, offsets, strict=True):
            entry = memory.loading(
                key,
                engine.world_size,
                self._mask_on_disk(lookup, key),
                time.monotonic(),
            )
            if not entry.leases:
                memory.lease(entry)
                lookup.leased.append(entry)
            entry.slots[place] = Slot(offset, nbytes)
            to_read.setdefault(key, []).append(place)
        for entry in lookup.leased:
            lookup.session.lease(entry.key, entry.nbytes)
        lookup.prefix_tokens = prefix
        self._load(lookup, needs, to_read)
        return True

    # -- loading -----------------------------------------------------------------------

    def _load(
        self,
        lookup: Lookup,
        needs: Mapping[ChunkKey, list[Place]],
        to_read: Mapping[ChunkKey, list[Place]],
    ) -> None:
        memory = self._state.memory
        lookup.phase = Phase.LOADING
        for key, places in needs.items():
            entry = memory.get(key)
            for place in places:
                if entry is not None and not entry.slots[place].ready:
                    lookup.pending.add((key, place))
                    self._loading.setdefault((key, place), []).append(lookup)
        for key, places in to_read.items():
            lookup.from_disk.add(key)
            self._read(key, places, lookup.records[key])
        if not lookup.pending:
            self._loaded(lookup)

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
            for lookup in self._loading.pop((entry.key, place), []):
                lookup.pending.discard((entry.key, place))
                if place in bad:
                    lookup.failed.add(entry.key)
                waiting[id(lookup)] = lookup
        state.memory.unpin(entry)
        for lookup in waiting.values():
            if not lookup.pending and not lookup.cancelled:
                self._loaded(lookup)
        self.retry_waiting()

    def _loaded(self, lookup: Lookup) -> None:
        if lookup.failed.intersection(lookup.keys[: self._chunks(lookup)]):
            # Something that was found could not be read: what is left decides anew.
            self._let_go(lookup)
            self._claim(lookup)
            return
        self._finish(lookup, lookup.prefix_tokens)

    def _chunks(self, lookup: Lookup) -> int:
        binding = self._state.binding
        return lookup.prefix_tokens // binding.chunk_size if binding else 0

    def _let_go(self, lookup: Lookup) -> None:
        leased, lookup.leased = lookup.leased, []
        lookup.from_disk.clear()
        # From tail to head, so that the head is the most recently used.
        for entry in reversed(leased):
            lookup.session.unlease(entry.key)
            self._state.memory.unlease(entry)

    # -- answering ---------------------------------------------------------------------

    def _finish(self, lookup: Lookup, prefix: int) -> None:
        lookup.phase = Phase.DONE
        lookup.prefix_tokens = prefix
        needs = self._needs(lookup, prefix) if prefix else {}
        disk_chunks = len(lookup.from_disk.intersection(needs))
        lookup.result = protocol.Found(
            tokens=prefix,
            runs=self._runs(lookup, prefix) if prefix else [],
            memory_chunks=len(needs) - disk_chunks,
            disk_chunks=disk_chunks,
        )
        self._tally.decided(lookup, lookup.result)
        if needs:
            self._state.writer.touch(lookup.keys[: self._chunks(lookup)])
        # What it took to decide is not needed any more, and a client may keep many.
        lookup.keys, lookup.present, lookup.records = [], [], {}
        if lookup.answer is not None:
            answer, lookup.answer = lookup.answer, None
            answer(lookup.result)

    def _runs(self, lookup: Lookup, prefix: int) -> list[protocol.SlotRun]:
        binding, memory = self._state.binding, self._state.memory
        size = binding.chunk_size if binding else 1
        runs = []
        for index, group in enumerate(lookup.engine.groups):
            needed = geometry.chunks_needed(group, prefix, size)
            first = max(needed.first, lookup.held_chunks)
            entries = [memory.get(lookup.keys[chunk]) for chunk in range(first, needed.end)]
            if not entries:
                continue
            for number, rank in sorted(lookup.engine.ranks.items()):
                place = Place(number, index)
                offsets = [entry.slots[place].offset for entry in entries if entry is not None]
                runs.append(
                    protocol.SlotRun(number, index, first, rank.object_bytes[index], offsets)
                )
        return runs

    def retry_waiting(self) -> None:
        """Something let go of room: lookups that wait try again, once in a turn of the loop."""
        if self._waiting and not self._retry_due:
            self._retry_due = True
            self._state.timers.call_in(0.0, self._retry)

    def _retry(self) -> None:
        """In order of arrival; behind one that still waits, no other of its process tries."""
        self._retry_due = False
        full: set[str] = set()
        for _ in range(len(self._waiting)):
            lookup = self._waiting.popleft()
            if lookup.cancelled:
                continue
            if lookup.session.lock in full:
                self._waiting.append(lookup)
                continue
            self._claim(lookup)
            if lookup.phase is Phase.WAITING:
                full.add(lookup.session.lock)


def _chunks_per_message(engine: Engine) -> int:
    """How many chunks' slots the answer to a lookup can name."""
    runs = max(1, len(engine.ranks) * sum(group.cacheable for group in engine.groups))
    return max(0, (MAX_SLOTS_PER_ANSWER - _SLOTS_PER_RUN * runs) // runs)
