"""What is still to be said to a server that does not answer: releases and give-backs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from lmcache_persist.connector.link import Link
from lmcache_persist.errors import PersistError
from lmcache_persist.protocol import Reply, Request, encode

Make = Callable[[Link], Request]
SendNow = Callable[[Link, bytes, Callable[[Reply | PersistError], None]], None]

_MAX_OWED = 8192
"""Beyond it the oldest are forgotten; they end with this process's client lock."""


class Debts:
    """Messages that belong to one session, said when that session is up, else never.

    Args:
        send: sends an encoded message of a link and calls back.

    Threads: the I/O thread.
    """

    def __init__(self, send: SendNow) -> None:
        self._send = send
        self._owed: deque[tuple[str, Make]] = deque(maxlen=_MAX_OWED)

    def add(self, link: Link | None, session_id: str, make: Make) -> None:
        """Say it now, or keep it; a session that has ended is owed nothing."""
        if link is None:
            self._owed.append((session_id, make))
        elif link.session == session_id:

            def answered(reply: Reply | PersistError) -> None:
                # All of them are repeatable, so what may not have arrived is said again.
                if isinstance(reply, PersistError) and reply.retryable:
                    self._owed.append((session_id, make))

            self._send(link, encode(make(link)), answered)

    def settle(self, link: Link) -> None:
        """A session is up: say what is owed to it, forget what was owed to others."""
        owed, self._owed = self._owed, deque(maxlen=_MAX_OWED)
        for session_id, make in owed:
            self.add(link, session_id, make)
