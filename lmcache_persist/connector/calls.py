"""From a message to its answer: futures for the data path, waiting calls for the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from lmcache_persist.connector.link import Link
from lmcache_persist.connector.session import Session
from lmcache_persist.errors import (
    MalformedMessage,
    PersistError,
    RequestTimeout,
    ServerUnreachable,
    Stale,
    TransportError,
)
from lmcache_persist.protocol import Reply, Request, encode

_R = TypeVar("_R")
_GRACE_S = 1.0
"""Beyond a request's own time-out, for a busy interpreter to tell of it."""
_PAUSE_S = 0.02


class Deadline:
    """A point in time, monotonic."""

    def __init__(self, timeout_s: float) -> None:
        self._at = time.monotonic() + timeout_s

    def left(self) -> float:
        """Seconds, not negative."""
        return max(0.0, self._at - time.monotonic())

    def over(self) -> bool:
        """Whether nothing is left."""
        return self.left() == 0.0


def _finish(
    future: Future[Any],
    link: Link,
    expected: type | tuple[type, ...] | None,
    judge: Callable[[Link, Any], Any] | None,
    reply: Reply | PersistError,
) -> None:
    """Complete ``future`` with what ``reply`` comes to."""
    try:
        if isinstance(reply, PersistError):
            raise reply
        if expected is not None and not isinstance(reply, expected):
            raise MalformedMessage(f"request was answered with {type(reply).__name__}")
        future.set_result(judge(link, reply) if judge else reply)
    except PersistError as error:
        future.set_exception(error)


def start(
    session: Session,
    make: Callable[[Link], Request],
    expected: type[_R],
    judge: Callable[[Link, _R], _R] | None,
    timeout_s: float,
    late: Callable[[str, Reply], None] | None = None,
) -> Future[_R]:
    """Send without waiting.

    Args:
        session: where to.
        make: the message for a session that is up.
        expected: the reply's type.
        judge: checks the reply, may raise.
        timeout_s: until the future fails.
        late: gets session and reply if it comes after the time-out, or was judged wrong.

    Returns:
        A future that completes within ``timeout_s``; at once without a server.
    """
    future: Future[_R] = Future()
    # Never cancelled: the server has been asked already.
    future.set_running_or_notify_cancel()
    link = session.link
    if link is None or link.cold is not None:
        future.set_exception(session.unreachable() if link is None else link.cold)
        return future

    def done(reply: Reply | PersistError) -> None:
        _finish(future, link, expected, judge, reply)
        if late is not None and not isinstance(reply, PersistError) and future.exception():
            late(link.session, reply)

    body = encode(make(link))
    session.send(link, body, timeout_s, done, partial(late, link.session) if late else None)
    return future


def ask(
    session: Session,
    make: Callable[[Link], Request],
    expected: type[_R] | tuple[type[_R], ...] | None,
    timeout_s: float,
) -> Any:
    """Send one message and wait for its reply.

    Raises:
        PersistError: the refusal, or a ``TransportError``; without a server at once, but for a
            look at why, which takes half a second at most.
    """
    future: Future[Any] = Future()
    link = session.link
    if link is None:
        raise session.missing()
    body = encode(make(link))
    session.send(link, body, timeout_s, partial(_finish, future, link, expected, None))
    try:
        return future.result(timeout_s + _GRACE_S)
    except TimeoutError as error:
        raise RequestTimeout(
            f"no answer within {timeout_s:g} s, and the I/O thread does not run"
        ) from error


def ask_again(
    session: Session, make: Callable[[Link], Request], expected: type[_R], timeout_s: float
) -> _R:
    """:func:`ask` for repeatable messages: waits for a server, tries again with the next one.

    Raises:
        PersistError: the refusal, or what was the trouble when the time was over.
    """
    deadline = Deadline(timeout_s)
    while True:
        session.wait_link(deadline.left())
        try:
            reply: _R = ask(session, make, expected, max(deadline.left(), 0.001))
        except (ServerUnreachable, Stale) as error:
            if deadline.over():
                raise
            trouble: PersistError = error
        except TransportError:
            raise
        else:
            return reply
        # Between noticing and being down there is a moment in which the link looks up.
        time.sleep(min(_PAUSE_S, deadline.left()))
        if deadline.over():
            raise trouble
