"""The calls of a client that wait for the server, each with its time-out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from lmcache_persist.binding import Binding
from lmcache_persist.connector import calls, replies
from lmcache_persist.connector.link import BindWish, RegisterWish
from lmcache_persist.connector.options import ClientOptions
from lmcache_persist.connector.results import BindOutcome, Registration
from lmcache_persist.connector.session import Session
from lmcache_persist.errors import MalformedMessage, PersistError, RequestTimeout
from lmcache_persist.geometry import Group
from lmcache_persist.protocol import (
    MAX_WAIT_MS,
    BindReply,
    Flush,
    Flushed,
    JsonReply,
    NotYet,
    Ping,
    Registered,
    Reply,
    Request,
    Stats,
)

_ANSWER_S = 1.0
"""For a flush to be answered, beyond what it waits: its time-out must not be two of them."""


class WaitingCalls:
    """The half of :class:`~lmcache_persist.connector.client.CacheClient` that waits.

    Threads: any of the process that made it, but not the I/O thread.
    """

    def __init__(self, session: Session, options: ClientOptions) -> None:
        self.options = options
        self._session = session
        self._pid = os.getpid()

    def wait_connected(self, timeout_s: float | None = None) -> None:
        """Wait until a server answers; ``timeout_s`` defaults to the option's.

        Raises:
            ServerUnreachable: none did; the hint has the command that starts one.
            ProtocolError, LeaseError: one did, and cannot be worked with.
        """
        self._check_caller()
        limit = self.options.connect_timeout_s if timeout_s is None else timeout_s
        self._session.wait_link(limit)

    def bind(
        self,
        groups: Sequence[Group],
        *,
        base: int | None = None,
        expect: int | None = None,
        dry_run: bool = False,
        who: str = "",
        timeout_s: float | None = None,
    ) -> BindOutcome:
        """Negotiate the chunk size.

        Unless ``dry_run``, the groups are remembered, whatever comes of it: after each new
        connection they are bound again, and until that succeeds the client is cold.

        Args:
            groups: the geometry.
            base: tokens, wished for if the server is unbound.
            expect: the only chunk size that is agreed to, now and after each new
                connection, tokens; None for any. A server of another one stays as it is.
            dry_run: only ask what would come of it.
            who: for the binding's winner.
            timeout_s: of all of it; defaults to the option's ``connect_timeout_s``.

        Raises:
            GeometryError, BindingError: the server's refusal, or its size is another one.
            ServerUnreachable, RequestTimeout: no answer within ``timeout_s``.
        """
        self._check_caller()
        wish = BindWish(tuple(groups), base, who[:256], str(self._session.endpoint), expect)
        if not dry_run:
            self._session.remembered.bind(wish)
        limit = self.options.connect_timeout_s if timeout_s is None else timeout_s
        deadline = calls.Deadline(limit)
        try:
            if expect is not None and not dry_run:
                # An unbound server would be bound before its size turned out to be another.
                self._bind(wish, deadline, dry_run=True)
            reply, binding = self._bind(wish, deadline, dry_run=dry_run)
            if not dry_run:
                self._session.set_bound(reply.boot, binding)
        except PersistError as error:
            if not dry_run and not error.retryable:
                self._session.set_refused(wish.key, error)
            raise
        return BindOutcome(reply.outcome, binding, tuple(reply.warnings))

    def _bind(
        self, wish: BindWish, deadline: calls.Deadline, *, dry_run: bool
    ) -> tuple[BindReply, Binding]:
        reply = calls.ask_again(
            self._session,
            lambda link: wish.message(link, dry_run=dry_run),
            BindReply,
            deadline.left(),
        )
        binding = replies.decode_binding(reply.binding)
        if binding is None:
            raise MalformedMessage("bind reply has no binding, expected one")
        wish.check(binding.chunk_size)
        return reply, binding

    def register(self, registration: Registration, *, timeout_s: float | None = None) -> Registered:
        """Say what a worker runs; remembered and repeated like :meth:`bind`.

        Not if the bind was refused: a registration is made for a chunk size.

        Raises:
            GeometryError, BindingError: the refusal of the bind.
            RegistrationError, BindingError: the server's refusal.
            ServerUnreachable, RequestTimeout: no answer within ``timeout_s``.
        """
        self._check_caller()
        wish = RegisterWish(registration)
        link = self._session.link
        refusal = link.refusal(None) if link is not None else None
        if refusal is not None:
            raise refusal
        self._session.remembered.register(wish)
        limit = self.options.connect_timeout_s if timeout_s is None else timeout_s
        try:
            reply = calls.ask_again(self._session, wish.message, Registered, limit)
        except PersistError as error:
            if not error.retryable:
                self._session.set_refused(wish.key, error)
            raise
        self._session.set_registered(reply.boot, wish.key)
        return reply

    def flush(self, timeout_s: float = 60.0, *, seq: int | None = None) -> int:
        """Wait until ``seq`` is durable; None is everything committed so far, by anyone.

        Returns:
            The server's durable sequence number.

        Durable: everything up to the returned number.

        Raises:
            RequestTimeout: not durable in time.
            ServerUnreachable, StoreError: as they say.
        """
        self._check_caller()
        deadline = calls.Deadline(timeout_s)
        # "All so far" is fixed now: under others' load it would move with every poll.
        goal = seq if seq is not None else int(self.stats(timeout_s)["committed_seq"])
        while True:
            wait_ms = min(MAX_WAIT_MS, int(deadline.left() * 1000))
            reply = calls.ask(
                self._session,
                lambda link, ms=wait_ms: Flush(**link.header(), seq=goal, wait_ms=ms),  # type: ignore[misc]
                (Flushed, NotYet),
                wait_ms / 1000 + min(_ANSWER_S, self.options.request_timeout_s),
            )
            if isinstance(reply, Flushed):
                return reply.durable_seq
            if deadline.over():
                raise RequestTimeout(
                    f"flush is at {reply.durable_seq} after {timeout_s:g} s, expected {goal}"
                )

    def ping(self, timeout_s: float | None = None) -> None:
        """One round trip. Raises ``TransportError`` without an answer."""
        self.request(Ping, timeout_s=timeout_s)

    def stats(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The server's numbers. Raises ``TransportError`` without an answer."""
        reply = self.request(Stats, timeout_s=timeout_s)
        if not isinstance(reply, JsonReply):
            raise MalformedMessage(f"stats was answered with {type(reply).__name__}")
        try:
            value = json.loads(reply.body)
        except (ValueError, RecursionError) as error:
            raise MalformedMessage(f"stats cannot be decoded: {error}") from error
        if not isinstance(value, dict):
            raise MalformedMessage(f"stats is a {type(value).__name__}, expected an object")
        return value

    def request(
        self, message: Callable[..., Request], *, timeout_s: float | None = None, **fields: Any
    ) -> Reply:
        """Send one message and wait.

        Args:
            message: its type; boot, session and binding are filled in.
            timeout_s: defaults to the option's.
            **fields: the message's own.

        Returns:
            Any reply but an error.

        Raises:
            PersistError: the server's refusal, or a ``TransportError`` without an answer.
        """
        self._check_caller()
        limit = self.options.request_timeout_s if timeout_s is None else timeout_s
        reply: Reply = calls.ask(
            self._session, lambda link: message(**link.header(), **fields), None, limit
        )
        return reply

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"client was made in process {self._pid} and is used in its forked child"
                f" {os.getpid()}, expected a client of its own"
            )

    def _check_caller(self) -> None:
        self._check_process()
        if self._session.on_io_thread():
            raise RuntimeError("a waiting call inside on_change would wait for itself")
