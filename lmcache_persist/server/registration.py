"""Registered engines: what each rank runs, and the fingerprint once all ranks are there.

Until then, and after a rank died, lookups of the engine miss. Ranks must agree on
everything but their layout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from lmcache_persist import geometry, identity, protocol
from lmcache_persist.errors import (
    ChunkTooLarge,
    IdentityMismatch,
    ManifestError,
    PersistError,
    RegistrationError,
    StoreError,
    Unbound,
)
from lmcache_persist.geometry import Group
from lmcache_persist.identity import Fingerprint
from lmcache_persist.printable import short
from lmcache_persist.server.metrics import MAX_NAME_CHARS, Traffic
from lmcache_persist.server.refusals import Refusals
from lmcache_persist.server.sessions import Session, Sessions
from lmcache_persist.server.state import ServerState, utc_now
from lmcache_persist.server.wire import Answer, sendable
from lmcache_persist.store import capacity
from lmcache_persist.store.allocator import slot_bytes
from lmcache_persist.store.base import Place
from lmcache_persist.store.throttle import Throttle
from lmcache_persist.units import exact_size, format_size

log = logging.getLogger(__name__)

MAX_ENGINES = 1024
ENGINES_SAID = 64
"""Log lines for engines that register, per 30 s."""

RECORD_AGAIN_S = 30.0
"""Seconds after which the manifest is told again of models that it could not take."""


@dataclass(slots=True)
class Rank:
    """What one worker registered."""

    session: str
    lock: str
    layout: dict[str, Any]
    object_bytes: list[int]


@dataclass(slots=True)
class Engine:
    """One engine: common facts, and the ranks that are there.

    Attributes:
        fingerprint: empty until all ranks are there.
        traffic: what it did since it registered.
        model_traffic: what all engines of its model did; None before it is complete.
    """

    name: str
    world_size: int
    identity: dict[str, Any]
    groups: tuple[Group, ...]
    ranks: dict[int, Rank] = field(default_factory=dict)
    fingerprint: Fingerprint | None = None
    traffic: Traffic = field(default_factory=Traffic)
    model_traffic: Traffic | None = None

    @property
    def traffics(self) -> tuple[Traffic, ...]:
        """Where all that it asks for and moves is counted: its own, and its model's."""
        if self.model_traffic is None:
            return (self.traffic,)
        return self.traffic, self.model_traffic

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks that have not registered."""
        return [rank for rank in range(self.world_size) if rank not in self.ranks]


class Registry:
    """The engines of a server.

    Threads: the loop.
    """

    def __init__(self, state: ServerState, refusals: Refusals, sessions: Sessions) -> None:
        self._state = state
        self._refusals = refusals
        self._sessions = sessions
        self._engines: dict[str, Engine] = {}
        self._unrecorded: dict[Fingerprint, Callable[[], None]] = {}
        self._failures = Throttle(log)
        self._registered = Throttle(log, burst=ENGINES_SAID)

    def all(self) -> list[Engine]:
        """The engines, for reports."""
        return list(self._engines.values())

    def get(self, name: str) -> Engine | None:
        """An engine by its id, complete or not."""
        return self._engines.get(name)

    def register(self, session: Session, message: protocol.Register, answer: Answer) -> None:
        """Take in one rank; answers with the fingerprint if it was the last one."""
        try:
            engine = self._admit(session, message)
        except PersistError as error:
            answer(error)
            self._refusals.note(error, message.engine)
            return
        answer(
            protocol.Registered(
                fingerprint=engine.fingerprint or "", missing_ranks=engine.missing_ranks
            )
        )

    def _admit(self, session: Session, message: protocol.Register) -> Engine:
        binding = self._state.binding
        if binding is None:
            raise Unbound("register before bind", hint="send a bind with the groups first")
        groups = tuple(spec.group() for spec in message.groups)
        geometry.check_compatible(binding.chunk_size, groups)
        _check_numbers(message, groups)
        claimed = identity.parse_object(message.identity, "identity")
        identity.check_identity(claimed)
        rank = Rank(
            session.token,
            session.lock,
            identity.parse_object(message.layout, "layout"),
            list(message.object_bytes),
        )
        self._check_free(session, message)
        engine = self._engine_for(message, claimed, groups)
        ranks = {**engine.ranks, message.rank: rank}
        self._check_size(engine, ranks)
        self._check_capacity(engine, rank)
        engine.ranks = ranks
        self._engines[engine.name] = engine
        if not engine.missing_ranks:
            self._complete(engine)
        return engine

    def _check_free(self, session: Session, message: protocol.Register) -> None:
        """A rank belongs to the living process that registered it.

        Two engines under one name would otherwise look up each other's objects.
        """
        known = self._engines.get(message.engine)
        rank = known.ranks.get(message.rank) if known is not None else None
        if rank is None or rank.session == session.token or rank.lock in ("", session.lock):
            return
        if self._sessions.is_alive(rank.session):
            raise RegistrationError(
                f"rank {message.rank} of engine {message.engine} is registered by another living"
                " process",
                hint="give each engine an id of its own, or stop the other one",
            )

    def _engine_for(
        self, message: protocol.Register, claimed: dict[str, Any], groups: tuple[Group, ...]
    ) -> Engine:
        known = self._engines.get(message.engine)
        if known is not None:
            differs = identity.differing_fields(
                {"identity": known.identity, "world_size": known.world_size},
                {"identity": claimed, "world_size": message.world_size},
            )
            if known.groups != groups:
                differs.append("groups")
            if not differs:
                return known
            if set(known.ranks) - {message.rank}:
                raise IdentityMismatch(
                    f"rank {message.rank} of engine {message.engine} differs from the other"
                    f" ranks in {', '.join(differs[:8])}",
                    hint="all ranks of an engine run one model with one configuration",
                )
        elif len(self._engines) >= MAX_ENGINES:
            raise RegistrationError(f"there are {MAX_ENGINES} engines already")
        return Engine(message.engine, message.world_size, claimed, groups)

    def _check_size(self, engine: Engine, ranks: dict[int, Rank]) -> None:
        known = sum(slot_bytes(n) for rank in ranks.values() for n in rank.object_bytes)
        # Ranks still to come will hardly be smaller: better refused now than by the last.
        expected = known * engine.world_size // len(ranks)
        if expected > self._state.memory.share_bytes:
            raise ChunkTooLarge(
                f"one chunk over all groups and ranks takes {exact_size(expected)}, more than half"
                f" of the pool of {exact_size(self._state.pool.size_bytes)}",
                hint=f"start the server with --pool-size {format_size(2 * expected)} or more",
                chunk_bytes=expected,
                pool_bytes=self._state.pool.size_bytes,
            )

    def _check_capacity(self, engine: Engine, rank: Rank) -> None:
        """Refuse chunks that the disk tier can never take, were all ranks like this one."""
        disk_bytes = self._state.disk.capacity_bytes
        budget = capacity.PageBudget.of(disk_bytes)
        sizes = {
            Place(0, group): nbytes for group, nbytes in enumerate(rank.object_bytes) if nbytes
        }
        expected = capacity.chunk_pages(sizes) * engine.world_size * budget.page_bytes
        allowed = budget.largest_chunk * budget.page_bytes
        if expected > allowed:
            raise ChunkTooLarge(
                f"one chunk over all groups and ranks takes {exact_size(expected)} on disk, more"
                f" than the {exact_size(allowed)} that a capacity of {format_size(disk_bytes)}"
                " allows",
                hint=f"give the server more than its --capacity of {format_size(disk_bytes)}",
                chunk_bytes=expected,
                capacity_bytes=disk_bytes,
            )

    def _complete(self, engine: Engine) -> None:
        # With the sizes: whoever shares objects agrees on how long they are.
        layouts = [
            {**rank.layout, "object_bytes": rank.object_bytes}
            for rank in (engine.ranks[number] for number in range(engine.world_size))
        ]
        groups = [group.to_json() for group in engine.groups]
        engine.fingerprint = identity.fingerprint(engine.identity, groups, layouts)
        engine.model_traffic = self._state.counters.of_model(engine.identity["model"])
        self._registered.info(
            f"engine {short(engine.name, MAX_NAME_CHARS)} registered: model"
            f" {short(engine.identity['model'], MAX_NAME_CHARS)}, fingerprint"
            f" {engine.fingerprint[:12]}, {engine.world_size} rank(s)"
        )
        state, at, fingerprint = self._state, utc_now(), engine.fingerprint
        alignment = geometry.required_alignment(engine.groups)
        self._record(
            fingerprint,
            lambda: state.manifest.record_model(
                fingerprint=fingerprint,
                name=sendable(str(engine.identity["model"])),
                identity=engine.identity,
                groups=groups,
                layouts=layouts,
                required_alignment=alignment,
                at=at,
                used=self._used(),
            ),
        )

    def _used(self) -> set[str] | None:
        """Models with objects or engines, None if the store cannot tell. Threads: any."""
        served = {engine.fingerprint for engine in self.all() if engine.fingerprint}
        try:
            return served | set(self._state.disk.usage().by_fingerprint)
        except StoreError:
            return None

    def _record(self, fingerprint: Fingerprint, record: Callable[[], None]) -> None:
        """Tell the manifest; as long as that fails (a full disk), the engine is served anyway."""

        def then(done: Future[None]) -> None:
            error = done.exception()
            if error is None:
                return
            self._failures.warning(f"model {fingerprint[:12]} is not recorded: {error}")
            if isinstance(error, ManifestError) and len(self._unrecorded) < MAX_ENGINES:
                if not self._unrecorded:
                    self._state.timers.call_in(RECORD_AGAIN_S, self._record_again)
                self._unrecorded[fingerprint] = record

        self._state.run(self._state.clerk, record, then)

    def _record_again(self) -> None:
        waiting, self._unrecorded = self._unrecorded, {}
        for fingerprint, record in waiting.items():
            self._record(fingerprint, record)

    def forget_session(self, token: str) -> None:
        """A worker's session ended: its rank is gone, and the engine incomplete."""
        for engine in self.all():
            for number in [n for n, rank in engine.ranks.items() if rank.session == token]:
                del engine.ranks[number]
                engine.fingerprint = None
            if not engine.ranks:
                del self._engines[engine.name]


def _check_numbers(message: protocol.Register, groups: tuple[Group, ...]) -> None:
    if message.rank >= message.world_size:
        raise RegistrationError(
            f"rank is {message.rank}, expected less than the world size {message.world_size}"
        )
    if len(message.object_bytes) != len(groups):
        raise RegistrationError(
            f"object_bytes has {len(message.object_bytes)} entries, expected one for each of"
            f" {len(groups)} groups"
        )
    for index, (group, nbytes) in enumerate(zip(groups, message.object_bytes, strict=True)):
        if group.cacheable != (nbytes > 0):
            raise RegistrationError(
                f"group {index} ({group.kind.value}) has objects of {nbytes} bytes, expected"
                f" {'a positive number' if group.cacheable else '0'}"
            )
