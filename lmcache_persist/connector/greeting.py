"""The opening of a session: hello, client lock, pool, hello again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lmcache_persist.connector import replies
from lmcache_persist.connector.link import Link
from lmcache_persist.connector.options import ClientOptions
from lmcache_persist.connector.pool_map import PoolMaps
from lmcache_persist.connector.transport import Transport
from lmcache_persist.errors import MalformedMessage, PersistError, Stale, UnsupportedVersion
from lmcache_persist.protocol import (
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Hello,
    Reply,
    Welcome,
    encode,
)
from lmcache_persist.shm import ClientLock, PoolPaths

Greeted = Callable[[Link | PersistError], None]

_KINDS_WITH_LOCK = ("scheduler", "worker", "client")
_KINDS_WITH_POOL = ("worker", "client")


class Greeting:
    """Opens sessions on one transport. Threads: the I/O thread only."""

    def __init__(
        self,
        transport: Transport,
        kind: str,
        label: str,
        pools: PoolMaps,
        options: ClientOptions,
    ) -> None:
        self._transport, self._kind, self._label = transport, kind, label
        self._pools, self._options = pools, options

    def begin(self, session_id: str, greeted: Greeted) -> None:
        """Say hello; ``greeted`` gets the link or why there is none.

        ``session_id`` is the session to renew: its leases live on if the server does.
        """
        self._hello("", session_id, partial(self._welcomed, greeted))

    def _hello(
        self, lock: str, session_id: str, done: Callable[[Reply | PersistError], None]
    ) -> None:
        message = Hello(
            proto_min=MIN_PROTOCOL_VERSION,
            proto_max=PROTOCOL_VERSION,
            kind=self._kind,
            label=self._label,
            lock=lock,
            session=session_id,
        )
        self._transport.request(encode(message), self._options.request_timeout_s, done)

    def _welcomed(self, greeted: Greeted, reply: Reply | PersistError) -> None:
        try:
            link = self._link(reply)
            if link.pool is None or self._kind not in _KINDS_WITH_LOCK:
                greeted(link)
                return
            token = ClientLock.of_process(PoolPaths.said(link.pool.path)).token
            if self._kind in _KINDS_WITH_POOL:
                self._pools.attach(link.boot, link.pool)
        except PersistError as error:
            greeted(error)
            return
        # The second hello also proves that the pool just mapped is this server's: had it
        # been replaced by a later server's, this one would be dead.
        self._hello(token, link.session, partial(self._welcomed_again, greeted, link))

    def _welcomed_again(self, greeted: Greeted, first: Link, reply: Reply | PersistError) -> None:
        try:
            link = self._link(reply)
            if (link.boot, link.pool) != (first.boot, first.pool):
                raise Stale("the server was replaced while it was greeted")
        except PersistError as error:
            greeted(error)
            return
        greeted(link)

    def _link(self, reply: Reply | PersistError) -> Link:
        if isinstance(reply, Welcome):
            for name, value in (("boot", reply.boot), ("session", reply.session)):
                if not replies.is_id(value):
                    raise MalformedMessage(f"welcome has {name} {value!r:.80}, expected an id")
            if not MIN_PROTOCOL_VERSION <= reply.proto <= PROTOCOL_VERSION:
                raise UnsupportedVersion(
                    f"server {reply.version!r:.80} speaks protocol {reply.proto}, this client"
                    f" {MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}",
                    hint="upgrade the older of the two",
                )
            return Link(
                boot=reply.boot,
                session=reply.session,
                version=reply.version,
                pool=reply.pool,
                binding=replies.decode_binding(reply.binding),
            )
        outcome, lost = replies.judge("", reply)
        if lost is not None:
            raise lost
        if isinstance(outcome, PersistError):
            raise outcome
        raise MalformedMessage(f"hello was answered with {type(reply).__name__}")
