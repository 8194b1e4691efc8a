"""Lookups: asked once, polled by the I/O thread, read in O(1) by a scheduler."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from lmcache_persist.connector import replies
from lmcache_persist.connector.link import Link
from lmcache_persist.connector.results import LookupResult
from lmcache_persist.errors import MalformedMessage, PersistError, RequestTimeout
from lmcache_persist.protocol import MAX_WAIT_MS, Found, Lookup, NotYet, Release, Reply, encode

if TYPE_CHECKING:
    from lmcache_persist.connector.session import Session

_ids = itertools.count(1)
"""Of this process: a lookup id is unique within every session that the process has."""

_WAIT_SHARE = 0.5
"""Of a request's time-out, how long the server may hold a poll back."""
_PAUSE_S = 0.005
"""Between a "not yet" and the next poll, for a server that does not hold polls back."""
_MAX_DOING_CHARS = 100


class LookupHandle:
    """One lookup.

    Threads: :meth:`poll`, :meth:`wait` and :meth:`release` any.
    """

    def __init__(
        self,
        session: Session,
        *,
        engine: str,
        hashes: Sequence[bytes],
        num_tokens: int,
        held_tokens: int,
        again: bool = False,
    ) -> None:
        self.id = next(_ids)
        self._session = session
        self._engine, self._num_tokens, self._held = engine, num_tokens, held_tokens
        self._repeated = again
        self._hashes = b"".join(hashes)
        self._deadline = time.monotonic() + session.options.lookup_timeout_s
        # Held again within itself: a message that cannot be sent fails at once.
        self._guard = threading.RLock()
        self._decided = threading.Event()
        self._result: LookupResult | None = None
        self._released = False
        self._session_id = ""

    def poll(self) -> LookupResult | None:
        """The result, None while undecided. Never raises, never waits.

        Whatever goes wrong is a miss whose ``error`` says so.
        """
        return self._result

    def wait(self, timeout_s: float) -> LookupResult | None:
        """:meth:`poll`, after at most ``timeout_s``."""
        self._decided.wait(timeout_s)
        return self._result

    def release(self, *, loaded_tokens: int = 0) -> None:
        """Give up the lease, or the wish for one. Repeatable; never waits, never fails.

        Args:
            loaded_tokens: how many of the tokens that were found have been loaded.
        """
        with self._guard:
            if self._released:
                return
            self._released = True
            session_id = self._session_id
        if self._result is None:
            self._decide(LookupResult())
        if session_id:
            self._session.owe(session_id, partial(self._release_message, loaded_tokens))

    # -- inside --------------------------------------------------------------------------

    def start(self) -> None:
        """Send the first message; a miss at once if there is nobody to send it to."""
        link = self._session.link
        if link is None or link.cold is not None or link.binding is None:
            error = link.cold if link is not None else self._session.unreachable()
            self._decide(LookupResult(error=error))
            return
        self._session_id = link.session
        self._ask(link, self._hashes)
        self._hashes = b""

    def _ask(self, link: Link, hashes: bytes) -> None:
        timeout_s = self._session.options.request_timeout_s
        left_s = max(0.0, self._deadline - time.monotonic())
        wait_ms = min(MAX_WAIT_MS, int(1000 * min(left_s, timeout_s * _WAIT_SHARE)))
        try:
            body = encode(
                Lookup(
                    **link.header(),
                    lookup=self.id,
                    engine=self._engine,
                    num_tokens=self._num_tokens,
                    held_tokens=self._held,
                    hashes=hashes,
                    wait_ms=wait_ms,
                    again=self._repeated,
                )
            )
        except PersistError as error:
            self._fail(error)
            return
        self._session.send(link, body, timeout_s, partial(self._answered, link))

    def _answered(self, link: Link, reply: Reply | PersistError) -> None:
        """On the I/O thread, or on the caller's if the request never left."""
        if isinstance(reply, PersistError):
            self._fail(reply)
        elif isinstance(reply, Found):
            self._found(link, reply)
        elif not isinstance(reply, NotYet):
            self._fail(MalformedMessage(f"lookup was answered with {type(reply).__name__}"))
        elif time.monotonic() >= self._deadline:
            waited = self._session.options.lookup_timeout_s
            doing = f"; the server was {reply.doing[:_MAX_DOING_CHARS]}" if reply.doing else ""
            self._fail(RequestTimeout(f"lookup was not decided within {waited:g} s{doing}"))
        else:
            self._session.later(_PAUSE_S, partial(self._again, link))

    def _again(self, link: Link) -> None:
        # Never after the release: the server has forgotten it, and would take it for a new one.
        with self._guard:
            if not self._released:
                self._ask(link, b"")

    def _found(self, link: Link, reply: Found) -> None:
        try:
            result = replies.check_found(
                reply,
                chunk_size=link.binding.chunk_size if link.binding else 1,
                num_tokens=self._num_tokens,
                pool_bytes=link.pool_bytes,
            )
        except PersistError as error:
            self._fail(error)
            return
        self._decide(result)
        if not result.tokens:
            # The server remembers even an empty answer until it is released.
            self.release()

    def _fail(self, error: PersistError) -> None:
        """A miss; and no lease is left behind, should the server have granted one."""
        self._decide(LookupResult(error=error))
        self.release()

    def _decide(self, result: LookupResult) -> None:
        with self._guard:
            if self._result is None:
                self._result = result
        self._decided.set()

    def _release_message(self, loaded_tokens: int, link: Link) -> Release:
        return Release(**link.header(), lookup=self.id, loaded_tokens=loaded_tokens)
