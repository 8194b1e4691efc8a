"""Sessions: who talks to the server, and who is dead.

A session belongs to one client object; several sessions of one process share its client
lock. A client is attached, then perhaps silent, and dead only when the kernel dropped its
lock: a quiet or stopped one keeps what it holds. Sessions without a lock (command line
verbs) can hold nothing and are forgotten after a while.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lmcache_persist import protocol
from lmcache_persist.errors import LeaseError, ProtocolError, Stale, UnsupportedVersion
from lmcache_persist.server.metrics import Traffic
from lmcache_persist.server.state import ServerState
from lmcache_persist.shm import client_is_dead
from lmcache_persist.store.base import ChunkKey
from lmcache_persist.store.pool import remove_dead_clients
from lmcache_persist.store.throttle import Throttle

log = logging.getLogger(__name__)

MAX_SESSIONS = 4096
MAX_SESSIONS_PER_LOCK = 256
LOCKLESS_SILENCE_S = 120.0
DEAD_SAID = 64
"""Log lines for clients that died, per 30 s."""
SWEEP_EVERY_S = 30.0
"""Seconds between looks for lock files whose processes ended after saying bye, or unheard of."""


@dataclass(slots=True)
class Session:
    """One client.

    Attributes:
        token: 32 hex digits, named by every message.
        kind: scheduler, worker, client or cli.
        label: for people.
        lock: the client lock's token, empty if it has none.
        last_seen_s: monotonic.
        held_bytes: pool bytes of its leases (reservations are counted by the memory tier).
        leased: chunks that its lookups lease: by how many, and bytes of the pool.
        traffics: of the engine that it stored for last, and of its model.
    """

    token: str
    kind: str
    label: str
    lock: str
    last_seen_s: float
    held_bytes: int = 0
    leased: dict[ChunkKey, tuple[int, int]] = field(default_factory=dict)
    lookups: set[int] = field(default_factory=set)
    traffics: tuple[Traffic, ...] = ()

    def lease(self, key: ChunkKey, nbytes: int) -> None:
        """One more lookup leases a chunk; what several share counts once."""
        count, known = self.leased.get(key, (0, 0))
        self.leased[key] = count + 1, max(known, nbytes)
        self.held_bytes += max(0, nbytes - known)

    def unlease(self, key: ChunkKey) -> None:
        """The inverse of :meth:`lease`."""
        count, nbytes = self.leased.pop(key)
        if count > 1:
            self.leased[key] = count - 1, nbytes
        else:
            self.held_bytes -= nbytes


class Sessions:
    """All sessions of a server.

    Args:
        state: the server's.
        on_end: called with each session that ended, to take back what it held.

    Threads: the loop.
    """

    def __init__(self, state: ServerState, on_end: Callable[[Session], None]) -> None:
        self._state = state
        self._on_end = on_end
        self._sessions: dict[str, Session] = {}
        self._by_lock: dict[str, dict[str, Session]] = {}
        self._swept_s = time.monotonic()
        self._unseen, self._gone = Throttle(log), Throttle(log, burst=DEAD_SAID)

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def clients(self) -> int:
        """Processes that hold a client lock."""
        return len(self._by_lock)

    def all(self) -> list[Session]:
        """The sessions, for reports."""
        return list(self._sessions.values())

    def hello(self, message: protocol.Hello) -> protocol.Welcome:
        """Open or renew a session.

        Raises:
            UnsupportedVersion: no common protocol version; names both sides'.
            LeaseError: the client lock it names is not held by a living process.
            ProtocolError: too many sessions.
        """
        version = min(message.proto_max, protocol.PROTOCOL_VERSION)
        if version < max(message.proto_min, protocol.MIN_PROTOCOL_VERSION):
            raise UnsupportedVersion(
                f"client speaks protocol {message.proto_min} to {message.proto_max}, this"
                f" server {protocol.MIN_PROTOCOL_VERSION} to {protocol.PROTOCOL_VERSION}",
                hint="upgrade the older of the two",
            )
        if message.lock:
            self._check_lock(message.lock)
        session = self._sessions.get(message.session)
        if session is None:
            self._make_room()
            session = Session(secrets.token_hex(16), message.kind, message.label, "", 0.0)
            self._sessions[session.token] = session
        session.last_seen_s = time.monotonic()
        if message.lock and message.lock != session.lock:
            self._take_lock(session, message.lock)
        return self._welcome(session, version)

    def _make_room(self) -> None:
        """With too many sessions, the lockless one that was silent the longest has to go."""
        if len(self._sessions) < MAX_SESSIONS:
            return
        lockless = [session for session in self.all() if not session.lock]
        if not lockless:
            raise ProtocolError(f"there are {MAX_SESSIONS} sessions already")
        self.end(min(lockless, key=lambda session: session.last_seen_s))

    def _take_lock(self, session: Session, lock: str) -> None:
        mine = self._by_lock.setdefault(lock, {})
        if len(mine) >= MAX_SESSIONS_PER_LOCK:
            raise ProtocolError(f"this process has {MAX_SESSIONS_PER_LOCK} sessions already")
        self._leave_lock(session)
        session.lock = lock
        mine[session.token] = session

    def _leave_lock(self, session: Session) -> None:
        mine = self._by_lock.get(session.lock)
        if mine is not None and mine.pop(session.token, None) is not None and not mine:
            del self._by_lock[session.lock]

    def held_bytes(self, session: Session) -> int:
        """Pool bytes that a session's process holds: leases and reservations of all its sessions.

        A scheduler and a worker in one process have one share between them, as they stop
        and die together.
        """
        sessions = self._by_lock.get(session.lock) or {session.token: session}
        reserved = self._state.memory.reserved_bytes
        return sum(one.held_bytes + reserved(one.token) for one in sessions.values())

    def is_alive(self, token: str) -> bool:
        """Whether a session is there and its process has not ended."""
        session = self._sessions.get(token)
        return session is not None and not (session.lock and self._is_dead(session.lock))

    def _check_lock(self, lock: str) -> None:
        """Take no lock that the server could not watch. Raises ``LeaseError``."""
        try:
            dead = client_is_dead(self._state.pool.paths.client_lock(lock))
        except OSError as error:
            raise LeaseError(
                f"client lock {lock} cannot be looked at by the server: {error.strerror}",
                hint="run the engine as the server's user, or as a member of the --group that"
                " the server was started with",
            ) from error
        if dead:
            raise LeaseError(
                f"client lock {lock} is held by no living process",
                hint="take the lock in the pool's .clients folder before saying hello with it",
            )

    def _is_dead(self, lock: str) -> bool:
        """Whether a client lock is free; not, if that cannot be told."""
        try:
            return client_is_dead(self._state.pool.paths.client_lock(lock))
        except OSError as error:
            self._unseen.warning(f"client lock {lock} cannot be looked at: {error.strerror}")
            return False

    def _welcome(self, session: Session, version: int) -> protocol.Welcome:
        from lmcache_persist import __version__
        from lmcache_persist.server.wire import binding_bytes

        return protocol.Welcome(
            proto=version,
            session=session.token,
            version=__version__,
            pool=protocol.PoolInfo(
                path=str(self._state.pool.paths.pool), size_bytes=self._state.pool.size_bytes
            ),
            binding=binding_bytes(self._state.binding),
        )

    def require(self, message: protocol.Request, *, check_binding: bool) -> Session:
        """The session of a message.

        Raises:
            Stale: boot id, session or binding is not the current one.
        """
        if isinstance(message, protocol.Hello):
            raise TypeError("hello opens a session, it has none")
        session = self._sessions.get(message.session)
        if message.boot != self._state.boot_id or session is None:
            self._state.counters.stale_messages += 1
            raise Stale("message of another boot or session", hint="start over with hello")
        if check_binding and message.binding != self._state.binding_id:
            self._state.counters.stale_messages += 1
            raise Stale(
                f"message for binding {message.binding or 'none'},"
                f" this server has {self._state.binding_id or 'none'}",
                hint="start over with hello",
            )
        session.last_seen_s = time.monotonic()
        return session

    def end(self, session: Session) -> None:
        """Forget a session and take back what it held."""
        if self._sessions.pop(session.token, None) is not None:
            self._leave_lock(session)
            self._on_end(session)

    def tick(self) -> None:
        """End the sessions of dead clients, and lockless ones that fell silent."""
        now = time.monotonic()
        dead_locks: dict[str, bool] = {}
        for session in self.all():
            if not session.lock:
                if now - session.last_seen_s > LOCKLESS_SILENCE_S:
                    self.end(session)
                continue
            if session.lock not in dead_locks:
                dead_locks[session.lock] = self._is_dead(session.lock)
            if dead_locks[session.lock]:
                name = session.label or session.token
                self._gone.info(f"client {name} ({session.kind}) is gone")
                self._state.counters.dead_clients += 1
                self.end(session)
        for lock, dead in dead_locks.items():
            if dead:
                self._state.pool.paths.client_lock(lock).unlink(missing_ok=True)
        if now - self._swept_s >= SWEEP_EVERY_S:
            self._swept_s = now
            remove_dead_clients(self._state.pool.paths, spare=self._by_lock)
