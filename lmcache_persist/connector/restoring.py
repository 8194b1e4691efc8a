"""What a client has bound and registered, and saying it again to a server just greeted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from lmcache_persist.connector import replies
from lmcache_persist.connector.link import BindWish, Link, RegisterWish
from lmcache_persist.connector.transport import Transport
from lmcache_persist.errors import PersistError, UnexpectedChunkSize
from lmcache_persist.protocol import Bind, BindReply, Register, Reply, encode

Restored = Callable[[Link | PersistError], None]
_Step = tuple[BindWish | RegisterWish, bool]
"""A wish, and whether it is only asked what would come of it."""


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
            steps: list[_Step] = []
            if self._bind is not None:
                if self._bind.expect is not None:
                    # As in bind(): only asked, lest an unbound server is bound to another size.
                    steps.append((self._bind, True))
                steps.append((self._bind, False))
            steps.extend((wish, False) for wish in self._registrations.values())
        _say(transport, link, steps, timeout_s, restored)


def _say(
    transport: Transport,
    link: Link,
    steps: Sequence[_Step],
    timeout_s: float,
    restored: Restored,
) -> None:
    bind_refusal = link.refusal(None)
    if bind_refusal is not None:
        # Registrations are made for a chunk size: none of them is there either.
        for wish, _ in steps:
            if wish.key is not None:
                link = link.refused(wish.key, bind_refusal)
        steps = ()
    if not steps:
        restored(link)
        return
    wish, dry = steps[0]

    def answered(reply: Reply | PersistError) -> None:
        outcome, lost = replies.judge(link.boot, reply)
        if lost is not None:
            restored(lost)
            return
        try:
            now = _after(link, wish, outcome, dry=dry)
        except PersistError as error:
            restored(error)
            return
        _say(transport, now, steps[1:], timeout_s, restored)

    transport.request(encode(_message(wish, link, dry=dry)), timeout_s, answered)


def _message(wish: BindWish | RegisterWish, link: Link, *, dry: bool) -> Bind | Register:
    return wish.message(link, dry_run=dry) if isinstance(wish, BindWish) else wish.message(link)


def _after(
    link: Link, wish: BindWish | RegisterWish, outcome: Reply | PersistError, *, dry: bool
) -> Link:
    """The link after one answer; raises what speaks against the connection itself."""
    if isinstance(outcome, PersistError):
        if outcome.retryable:
            raise outcome
        return link.refused(wish.key, outcome)
    if isinstance(wish, BindWish) and isinstance(outcome, BindReply):
        binding = replies.decode_binding(outcome.binding)
        # What a dry run would have bound does not exist.
        now = link if dry and outcome.outcome == "bound" else replace(link, binding=binding)
        try:
            wish.check(binding.chunk_size if binding is not None else 0)
        except UnexpectedChunkSize as error:
            return now.refused(wish.key, error)
        return now
    return link
