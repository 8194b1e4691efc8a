"""The engine-neutral client of a cache server.

One I/O thread per client owns the socket. Calls of the data path never wait for the
network: they hand a message to that thread and give back a future or a handle, which
always completes, within a bounded time, with a result or a typed error. Without a server
they fail at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self, TypeVar

from lmcache_persist.binding import Binding
from lmcache_persist.connector import calls, replies
from lmcache_persist.connector.link import Link
from lmcache_persist.connector.lookups import LookupHandle
from lmcache_persist.connector.options import ClientOptions
from lmcache_persist.connector.pool_map import PoolMap
from lmcache_persist.connector.results import Change
from lmcache_persist.connector.session import Session
from lmcache_persist.connector.waiting import WaitingCalls
from lmcache_persist.endpoint import parse_endpoint
from lmcache_persist.errors import PersistError, Unbound, UnexpectedChunkSize
from lmcache_persist.protocol import (
    Commit,
    Committed,
    GiveBack,
    Reply,
    Request,
    Reserve,
    Reserved,
)

_R = TypeVar("_R")
KINDS = ("scheduler", "worker", "client", "cli")
"""Who a client can be. All but ``cli`` take a client lock; ``worker`` and ``client`` also map
the pool."""


class CacheClient(WaitingCalls):
    """A connection to one cache server that looks after itself.

    It says hello, sends heartbeats, notices another server behind the same address, and
    then binds and registers again what it bound and registered before.

    Args:
        server: its endpoint, see :func:`lmcache_persist.endpoint.parse_endpoint`.
        kind: one of :data:`KINDS`.
        label: who this is, for people.
        options: times and bounds.

    Raises:
        ConfigError: the endpoint or an option cannot be.

    Threads: every method may be called by any thread of the process that made the
        client, except the waiting ones (those with ``timeout_s``) inside an
        :meth:`on_change` callback. A forked child must make its own: using its parent's
        is a ``RuntimeError``.
    """

    def __init__(
        self,
        server: str,
        *,
        kind: str,
        label: str = "",
        options: ClientOptions | None = None,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}")
        options = options or ClientOptions()
        self.endpoint = parse_endpoint(server, what="server")
        super().__init__(Session(self.endpoint, kind, label[:256], options), options)
        self._last_seq = 0
        self._seq_lock = threading.Lock()
        self._session.start()

    # -- state ---------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether a server answers (it may still have refused the bind: :attr:`cold`)."""
        return self._session.link is not None

    @property
    def breaker_open(self) -> bool:
        """Whether no server answers: every call fails at once until one does."""
        return self._session.link is None

    @property
    def connections(self) -> int:
        """How often a server was connected: one more than there were reconnects."""
        return self._session.connections

    @property
    def boot_id(self) -> str | None:
        """The server's, None without one."""
        link = self._session.link
        return link.boot if link else None

    @property
    def binding(self) -> Binding | None:
        """The server's binding; the last known one while there is no server."""
        return self._session.binding

    @property
    def cold(self) -> PersistError | None:
        """The refusal for which this server serves no lookups and stores, or None."""
        link = self._session.link
        return link.cold if link else None

    @property
    def durable_seq(self) -> int:
        """How far the present server's disk is, as far as heard."""
        return self._session.durable_seq

    @property
    def last_seq(self) -> int:
        """The highest sequence number that a commit of this client got; 0 for none."""
        return self._last_seq

    def check_agrees(self, other: CacheClient) -> None:
        """Refuse two servers that cut and hash prompts at other boundaries.

        Raises:
            UnexpectedChunkSize: names both.
            Unbound: one of them is not bound, or was never heard.
        """
        found = [(client.endpoint, client.binding) for client in (self, other)]
        for endpoint, binding in found:
            if binding is None:
                raise Unbound(f"server {endpoint} is not bound, expected one that is")
        said = [
            f"server {endpoint} is bound to chunk size {binding.chunk_size} (boundary"
            f" {binding.boundary_id[:12]})"
            for endpoint, binding in found
            if binding is not None
        ]
        if len({binding.boundary_id for _, binding in found if binding is not None}) > 1:
            raise UnexpectedChunkSize(
                f"{' and '.join(said)}, expected the same",
                hint="start one of them with --chunk-size-from the other, on an unbound data dir",
            )

    def on_change(self, callback: Callable[[Change], None]) -> None:
        """Have ``callback`` called after each connection; now too, if there is one already.

        Threads: it runs on the I/O thread, and must be quick and wait for nothing.
        """
        self._check_process()
        self._session.add_listener(callback)

    # -- the data path: never waits ------------------------------------------------------

    def lookup(
        self,
        *,
        engine: str,
        hashes: Sequence[bytes],
        num_tokens: int,
        held_tokens: int = 0,
        again: bool = False,
    ) -> LookupHandle:
        """Ask which prefix can be restored.

        Args:
            engine: the registered engine's id.
            hashes: the prompt's chunk hashes, from its first chunk.
            num_tokens: length of the prompt.
            held_tokens: what the engine holds itself.
            again: this prompt was looked up before; the server's metrics count it once.

        Returns:
            A handle; undecided at first. Without a server it is a miss at once.
        """
        self._check_process()
        handle = LookupHandle(
            self._session,
            engine=engine,
            hashes=hashes,
            num_tokens=num_tokens,
            held_tokens=held_tokens,
            again=again,
        )
        handle.start()
        return handle

    def reserve(
        self, *, engine: str, rank: int, hashes: Sequence[bytes], masks: Sequence[int]
    ) -> Future[Reserved]:
        """Ask for slots: per hash for the groups in its mask, on this rank.

        The grants' offsets point into ``pool(reply.boot)`` and are checked against it.
        """
        self._check_process()
        if len(hashes) != len(masks):
            raise ValueError(f"{len(hashes)} hashes and {len(masks)} masks, expected as many")
        packed, wanted = b"".join(hashes), list(masks)

        def judge(link: Link, reply: Reserved) -> Reserved:
            sizes = self._session.remembered.object_bytes(engine, rank)
            return replies.check_grants(reply, wanted, sizes, link.pool_bytes)

        return self._future(
            lambda link: Reserve(
                **link.header(), engine=engine, rank=rank, hashes=packed, masks=wanted
            ),
            Reserved,
            judge,
            late=self._give_back_late,
        )

    def commit(self, reservations: Sequence[int]) -> Future[Committed]:
        """The slots of these reservations are written.

        If nobody hears that, the slots are given back once the server is: it would keep
        them for as long as this process lives.

        Durable: nothing yet; what has a sequence number up to :attr:`durable_seq` is.
        """
        self._check_process()
        session_id, numbers = self._session_id(), list(reservations)
        future = self._future(
            lambda link: Commit(**link.header(), reservations=numbers), Committed, self._note_seq
        )

        def given_up(done: Future[Committed]) -> None:
            if done.exception() is not None:
                self._owe_back(session_id, numbers)

        future.add_done_callback(given_up)
        return future

    def give_back(self, reservations: Sequence[int]) -> None:
        """These reservations will not be used. Never fails; said later if need be."""
        self._check_process()
        self._owe_back(self._session_id(), list(reservations))

    def pool(self, boot_id: str) -> PoolMap | None:
        """The mapped pool of the server of that boot, None if it was never mapped or is let go."""
        self._check_process()
        return self._session.pools.get(boot_id)

    # -- the end -------------------------------------------------------------------------

    def close(self) -> None:
        """Say bye, end the I/O thread, let the pools go. Repeatable; bounded; quiet in a child."""
        if os.getpid() == self._pid:
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------

    def _future(
        self,
        make: Callable[[Link], Request],
        expected: type[_R],
        judge: Callable[[Link, _R], _R],
        late: Callable[[str, Reply], None] | None = None,
    ) -> Future[_R]:
        return calls.start(
            self._session, make, expected, judge, self.options.request_timeout_s, late
        )

    def _note_seq(self, link: Link, reply: Committed) -> Committed:
        with self._seq_lock:
            self._last_seq = max(self._last_seq, reply.seq)
        return reply

    def _give_back_late(self, session_id: str, reply: Reply) -> None:
        if isinstance(reply, Reserved):
            self._owe_back(session_id, [grant.reservation for grant in reply.grants])

    def _session_id(self) -> str:
        """The session's, or the last one's while there is no server."""
        link = self._session.link
        return link.session if link else self._session.last_session_id

    def _owe_back(self, session_id: str, numbers: list[int]) -> None:
        if numbers:
            self._session.owe(
                session_id, lambda now: GiveBack(**now.header(), reservations=numbers)
            )
