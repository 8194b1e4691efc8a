"""What a client has bound and registered, and saying it again to a server just greeted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from lmcache_persist.connector import replies
from lmcache_persist.connector.link import BindWish, Link, RegisterWish
from lmcache_persist.connector.transport import Transport
from lmcache_persist.errors import PersistError
from lmcache_persist.protocol import BindReply, Reply, encode

Restored = Callable[[Link | PersistError], None]


class Remembered:
    """The wishes of one client. Threads: any, but :meth:`restore` the I/O thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._bind: BindWish | None = None
        self._registrations: dict[tuple[str, int], RegisterWish] = {}

    def bind(self, wish: BindWish) -> None:
        """Bind this after every connection from now on."""
        with self._guard:
            self._bind = wish

    def register(self, wish: RegisterWish) -> None:
        """Register this after every connection from now on."""
        with self._guard:
            self._registrations[wish.key] = wish

    def object_bytes(self, engine: str, rank: int) -> tuple[int, ...] | None:
        """Per group the object sizes that were registered, None if nothing was."""
        with self._guard:
            wish = self._registrations.get((engine, rank))
        return tuple(wish.registration.object_bytes) if wish else None

    def restore(
        self, transport: Transport, link: Link, timeout_s: float, restored: Restored
    ) -> None:
        """Say all of it, in order.

        ``restored`` gets the link (cold, if something was refused), or the reason why
        this connection is of no use.
        """
        with self._guard:
            wishes: list[BindWish | RegisterWish] = [self._bind] if self._bind else []
            wishes.extend(self._registrations.values())
        _say(transport, link, wishes, timeout_s, restored)


def _say(
    transport: Transport,
    link: Link,
    wishes: Sequence[BindWish | RegisterWish],
    timeout_s: float,
    restored: Restored,
) -> None:
    if not wishes or link.cold is not None:
        restored(link)
        return

    def answered(reply: Reply | PersistError) -> None:
        outcome, lost = replies.judge(link.boot, reply)
        if lost is not None:
            restored(lost)
            return
        try:
            now = _after(link, outcome)
        except PersistError as error:
            restored(error)
            return
        _say(transport, now, wishes[1:], timeout_s, restored)

    transport.request(encode(wishes[0].message(link)), timeout_s, answered)


def _after(link: Link, outcome: Reply | PersistError) -> Link:
    """The link after one answer; raises what speaks against the connection itself."""
    if isinstance(outcome, PersistError):
        if outcome.retryable:
            raise outcome
        return replace(link, cold=outcome)
    if isinstance(outcome, BindReply):
        return replace(link, binding=replies.decode_binding(outcome.binding))
    return link
