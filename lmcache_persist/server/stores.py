"""Reserve, commit, give back, flush: the way of an object into the pool and to the disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from lmcache_persist import protocol
from lmcache_persist.errors import (
    LeaseError,
    MalformedMessage,
    RegistrationError,
    SlotNotWritten,
    Unbound,
)
from lmcache_persist.geometry import cacheable_mask
from lmcache_persist.hashing import ChunkHash
from lmcache_persist.server.registration import Engine, Registry
from lmcache_persist.server.sessions import Session, Sessions
from lmcache_persist.server.state import ServerState
from lmcache_persist.server.wire import Answer
from lmcache_persist.store.allocator import slot_bytes
from lmcache_persist.store.base import ChunkKey, DropReason, chunk_key
from lmcache_persist.store.slots import Reservation, Writeable
from lmcache_persist.store.writer import Outcome, WriteJob

MAX_FLUSHES_PER_SESSION = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Flush:
    """A flush that waits for ``seq``."""

    session: str
    seq: int
    answer: Answer


class Stores:
    """The storing half of a server.

    Args:
        state: the server's.
        registry: for what the engines are.
        sessions: for what their processes hold.
        on_room: called when slots may have become free.

    Threads: the loop.
    """

    def __init__(
        self,
        state: ServerState,
        registry: Registry,
        sessions: Sessions,
        on_room: Callable[[], None],
    ) -> None:
        self._state = state
        self._registry = registry
        self._sessions = sessions
        self._on_room = on_room
        self._flushes: list[_Flush] = []

    def reserve(self, session: Session, message: protocol.Reserve) -> protocol.Reserved:
        """Slots for as many keys as there is room for, in order.

        Raises:
            LeaseError: the session has no client lock.
            RegistrationError: the engine's rank is not registered, or a mask is wrong.
        """
        engine = self._engine(session, message)
        session.traffics = engine.traffics
        hashes = protocol.split_hashes(message.hashes)
        if len(hashes) != len(message.masks):
            raise MalformedMessage(f"{len(hashes)} hashes and {len(message.masks)} masks")
        if engine.fingerprint is None:
            return protocol.Reserved()
        known, grants, stored = cacheable_mask(engine.groups), [], []
        # All before the first slot is taken: a refusal grants nothing.
        for mask in message.masks:
            if mask & ~known or not mask:
                raise RegistrationError(f"mask {mask:#x} names groups beyond {known:#x}")
        for index, (chunk_hash, mask) in enumerate(zip(hashes, message.masks, strict=True)):
            key = chunk_key(engine.fingerprint, ChunkHash(chunk_hash))
            members = [group for group in range(len(engine.groups)) if mask >> group & 1]
            if self._in_pool(key, message.rank, members):
                stored.append(index)
                continue
            nbytes = engine.ranks[message.rank].object_bytes
            sizes = {group: nbytes[group] for group in members}
            reservation = self._reserve(session, engine, message.rank, key, sizes)
            if reservation is None:
                self._state.counters.dropped(DropReason.NO_SLOT)
                continue
            offsets = [reservation.slots[group].offset for group in members]
            grants.append(protocol.Grant(index, reservation.number, offsets))
        return protocol.Reserved(grants=grants, stored=stored)

    def _engine(self, session: Session, message: protocol.Reserve) -> Engine:
        if not session.lock:
            raise LeaseError(
                "a session without a client lock cannot hold slots",
                hint="say hello with the client lock first",
            )
        if self._state.binding is None:
            raise Unbound("reserve before bind")
        engine = self._registry.get(message.engine)
        rank = engine.ranks.get(message.rank) if engine is not None else None
        if engine is None or rank is None or rank.session != session.token:
            raise RegistrationError(
                f"rank {message.rank} of engine {message.engine} is not registered by this session",
                hint="register first",
            )
        return engine

    def _in_pool(self, key: ChunkKey, rank: int, members: list[int]) -> bool:
        entry = self._state.memory.get(key)
        return entry is not None and all((rank, group) in entry.slots for group in members)

    def _reserve(
        self, session: Session, engine: Engine, rank: int, key: ChunkKey, sizes: dict[int, int]
    ) -> Reservation | None:
        memory = self._state.memory
        wanted = sum(slot_bytes(nbytes) for nbytes in sizes.values())
        if self._sessions.held_bytes(session) + wanted > memory.share_bytes:
            return None
        return memory.reserve(
            session.token,
            key,
            rank,
            sizes,
            engine.world_size,
            time.monotonic(),
        )

    def commit(self, session: Session, message: protocol.Commit) -> protocol.Committed:
        """Take over written slots; unknown and unwritten ones are named in ``refused``."""
        state, refused = self._state, []
        before = state.memory.committed_bytes
        seq = state.sequence.begin()
        for number in message.reservations:
            try:
                ready = state.memory.commit(session.token, number, seq, time.monotonic())
            except (LeaseError, SlotNotWritten) as error:
                refused.append(number)
                if isinstance(error, SlotNotWritten):
                    state.counters.dropped(DropReason.NOT_WRITTEN)
                continue
            state.counters.commits += 1
            if ready is not None:
                self._write(ready)
        nbytes = state.memory.committed_bytes - before
        state.counters.committed_bytes += nbytes
        for traffic in session.traffics:
            traffic.committed_bytes += nbytes
        return protocol.Committed(seq=seq, refused=refused)

    def _write(self, ready: Writeable) -> None:
        state = self._state
        objects = {
            place: state.pool.view(slot.offset, slot.nbytes)
            for place, slot in ready.entry.slots.items()
            if ready.mask >> place.group & 1
        }
        state.writer.submit(WriteJob(ready.entry.key, objects, ready, time.monotonic()))

    def give_back(self, session: Session, message: protocol.GiveBack) -> None:
        """End reservations that are not used."""
        for number in message.reservations:
            self._state.memory.give_back(session.token, number)
        self._on_room()

    def written(self, outcome: Outcome) -> None:
        """The writer finished a batch: unpin the slots, publish ``durable_seq``."""
        state, counters, now_s = self._state, self._state.counters, time.monotonic()
        for job, durable in outcome.jobs:
            if durable:
                counters.stored_chunks += 1
                counters.stored_bytes += job.nbytes
                state.histograms.durable_seconds.observe(now_s - job.committed_s)
            else:
                counters.dropped_chunks += 1
                counters.dropped(outcome.dropped.get(job.key, DropReason.DISK_ERROR))
            state.memory.written(job.token, durable=durable)  # type: ignore[arg-type]
        if outcome.seconds is not None:
            state.histograms.group_commit_seconds.observe(outcome.seconds)
        state.memory.evicted(outcome.evicted)
        counters.disk_evictions += len(outcome.evicted)
        counters.swept_objects += outcome.swept
        self._answer_flushes()
        self._on_room()

    def files_changed(self, gone: str) -> None:
        """Files of the data dir left their place, or are back: ``durable_seq`` stands, or goes on.

        A flush is refused as long: what was durable before is as lost as what was not.
        """
        if not gone:
            self._state.sequence.go_on()
            return
        self._state.sequence.hold()
        refused, self._flushes = self._flushes, []
        for flush in refused:
            flush.answer(self._state.files.error())

    def flush(self, session: Session, message: protocol.Flush, answer: Answer) -> None:
        """Answer when everything up to ``seq`` is settled, or NotYet after ``wait_ms``.

        Beyond :data:`MAX_FLUSHES_PER_SESSION` waiting ones the answer comes at once.

        Raises:
            StoreGone: the store's file, or the manifest's, is not in its place any more.
        """
        if self._state.files.gone:
            raise self._state.files.error()
        seq = self._state.sequence.last if message.seq is None else message.seq
        if seq <= self._state.sequence.durable_seq:
            answer(self._flushed())
            return
        waiting = sum(flush.session == session.token for flush in self._flushes)
        if message.wait_ms == 0 or waiting >= MAX_FLUSHES_PER_SESSION:
            answer(protocol.NotYet())
            return
        flush = _Flush(session.token, seq, answer)
        self._flushes.append(flush)
        self._state.timers.call_in(message.wait_ms / 1000, lambda: self._give_up(flush))

    def _flushed(self) -> protocol.Flushed:
        return protocol.Flushed(dropped_chunks=self._state.memory.dropped)

    @property
    def flushes_waiting(self) -> int:
        """Flushes that wait for the disk. Threads: any."""
        return len(self._flushes)

    def _answer_flushes(self) -> None:
        durable = self._state.sequence.durable_seq
        settled = [flush for flush in self._flushes if flush.seq <= durable]
        self._flushes = [flush for flush in self._flushes if flush.seq > durable]
        for flush in settled:
            flush.answer(self._flushed())

    def _give_up(self, flush: _Flush) -> None:
        if flush in self._flushes:
            self._flushes.remove(flush)
            flush.answer(protocol.NotYet())

    def forget_session(self, session: Session) -> None:
        """A session ended: its reservations rest, its flushes get no answer."""
        self._state.memory.forget_owner(session.token, time.monotonic())
        self._flushes = [flush for flush in self._flushes if flush.session != session.token]

    def tick(self) -> None:
        """Time passed: partial chunks may have been dropped, rested slots are free."""
        self._state.memory.tick(time.monotonic())
        self._answer_flushes()
        self._on_room()
