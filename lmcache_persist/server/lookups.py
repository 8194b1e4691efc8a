"""Lookups: decide the restorable prefix, lease it, bring it into slots.

A lookup goes through *finding* (``finding``: the disk's index is asked for chunks that are
not in the pool), *waiting* (for room in the pool, holding none), *loading* (slots are
reserved, all at once, and filled by ``loading``; every digest is checked on the way) and
*done*. Only what is verified, in the pool and leased is answered, so that a load has
nothing left to fail at.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

from lmcache_persist import geometry, protocol
from lmcache_persist.errors import LeaseError
from lmcache_persist.hashing import ChunkHash
from lmcache_persist.server import needs
from lmcache_persist.server.finding import Finding
from lmcache_persist.server.loading import Loading
from lmcache_persist.server.lookup import Lookup, Phase
from lmcache_persist.server.registration import Engine, Registry
from lmcache_persist.server.sessions import Session, Sessions
from lmcache_persist.server.state import ServerState
from lmcache_persist.server.tally import Tally
from lmcache_persist.server.wire import Answer
from lmcache_persist.store.base import ChunkKey, Place, chunk_key
from lmcache_persist.store.slots import Slot

MAX_LOOKUPS_PER_SESSION = 4096


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
        self._finding = Finding(state, self._claim)
        self._loading = Loading(state, self._loaded, self.retry_waiting)
        self._tally = Tally(state)

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
        memory, everything = self._state.memory, geometry.cacheable_mask(lookup.engine.groups)
        unknown = [key for key in lookup.keys if needs.mask_in_pool(memory, key) != everything]
        self._finding.find(lookup, unknown)

    # -- claiming ----------------------------------------------------------------------

    def _claim(self, lookup: Lookup) -> None:
        """Lease what the longest prefix that fits needs, and start what has to be read."""
        binding, session = self._state.binding, lookup.session
        if binding is None or not lookup.keys:
            self._finish(lookup, 0)
            return
        size, groups = binding.chunk_size, lookup.engine.groups
        memory = self._state.memory
        lookup.present = [needs.usable_mask(memory, lookup, key) for key in lookup.keys]
        room_bytes = memory.share_bytes - self._sessions.held_bytes(session)
        # What its process holds already costs nothing more.
        shared_bytes = sum(session.leased.get(key, (0, 0))[1] for key in lookup.keys)
        limit = min(
            needs.most_chunks(lookup, room_bytes + shared_bytes, size),
            lookup.held_chunks + needs.chunks_per_message(lookup.engine),
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
        if wanted_any > lookup.held_chunks * size and memory.in_use():
            # Something holds the room and will let go of it; wait, holding nothing.
            lookup.phase = Phase.WAITING
            self._waiting.append(lookup)
            return
        self._finish(lookup, 0)

    def _hold(self, lookup: Lookup, prefix: int, room_bytes: int) -> bool:
        """Lease the chunks of a prefix and allocate what is not in the pool; all or nothing.

        ``room_bytes``: what is left of the share of its process.
        """
        memory, engine = self._state.memory, lookup.engine
        needed = needs.of_prefix(lookup, prefix, self._chunk_size)
        if needs.cost_bytes(lookup, needed) > room_bytes:
            return False
        entries = {key: memory.get(key) for key in needed}
        for entry in entries.values():
            if entry is not None:
                memory.lease(entry)
        absent: list[tuple[ChunkKey, Place, int]] = [
            (key, place, engine.ranks[place.rank].object_bytes[place.group])
            for key, places in needed.items()
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
                needs.mask_on_disk(lookup, key),
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
        self._loading.load(lookup, needed, to_read)
        return True

    def _loaded(self, lookup: Lookup) -> None:
        if lookup.failed.intersection(lookup.keys[: self._chunks(lookup)]):
            # Something that was found could not be read: what is left decides anew.
            self._let_go(lookup)
            self._claim(lookup)
            return
        self._finish(lookup, lookup.prefix_tokens)

    @property
    def _chunk_size(self) -> int:
        binding = self._state.binding
        return binding.chunk_size if binding else 1

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
        size = self._chunk_size
        needed = needs.of_prefix(lookup, prefix, size) if prefix else {}
        disk_chunks = len(lookup.from_disk.intersection(needed))
        lookup.result = protocol.Found(
            tokens=prefix,
            runs=needs.slot_runs(self._state.memory, lookup, prefix, size) if prefix else [],
            memory_chunks=len(needed) - disk_chunks,
            disk_chunks=disk_chunks,
        )
        self._tally.decided(lookup, lookup.result)
        if needed:
            self._state.writer.touch(lookup.keys[: self._chunks(lookup)])
        # What it took to decide is not needed any more, and a client may keep many.
        lookup.keys, lookup.present, lookup.records = [], [], {}
        if lookup.answer is not None:
            answer, lookup.answer = lookup.answer, None
            answer(lookup.result)

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
