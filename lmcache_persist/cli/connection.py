"""How verbs talk to a server: one client, connected in time or a typed error."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_persist.cli.output import plain, say
from lmcache_persist.datadir import Holder, ReaderLock, read_holder
from lmcache_persist.errors import (
    ConfigError,
    DataDirLocked,
    DataDirUnusable,
    MalformedMessage,
    PersistError,
    RequestTimeout,
    ServerUnreachable,
)
from lmcache_persist.printable import command
from lmcache_persist.units import approximate_duration, parse_duration_s

if TYPE_CHECKING:
    from lmcache_persist.connector import CacheClient
    from lmcache_persist.protocol import Request

DEFAULT_TIMEOUT = "10"
MAX_SECONDS = 30 * 86400.0
_UNHEARD = ("silent", "absent", "refused")
_PATIENCE_S = 1.0
"""Seconds that are waited in silence."""
_HANGS = "docs/troubleshooting.md, The server hangs"


@contextlib.contextmanager
def connected(
    server: str, timeout_s: float, verb: str, *, kind: str = "cli", root: Path | None = None
) -> Iterator[CacheClient]:
    """A client that has heard the server; closed at the end.

    What ends the connection has a hint afterwards, also if it ends later.

    Args:
        server: its endpoint.
        timeout_s: until it is to be heard, and for any answer that has no other.
        verb: who asks.
        kind: of client.
        root: the data dir of the server, if that is known.

    Raises:
        ServerUnreachable: nobody answers within ``timeout_s``.
        ConfigError: ``server`` is no endpoint.
    """
    from lmcache_persist.connector import CacheClient, ClientOptions

    # The verb says itself how it ended; the client's own log lines would say it twice.
    logging.getLogger("lmcache_persist").addHandler(logging.NullHandler())
    # All of them: what a person waits for, not what an engine does, is how long it may take.
    options = ClientOptions(
        connect_timeout_s=timeout_s, request_timeout_s=timeout_s, lookup_timeout_s=timeout_s
    )
    label = f"lmcache-persist {verb}"
    try:
        with CacheClient(server, kind=kind, label=label, options=options) as client:
            _wait(client, timeout_s)
            yield client
    except ServerUnreachable as error:
        raise _with_holder(error, root, timeout_s) from error
    except RequestTimeout as error:
        error.hint = error.hint or f"it is busy, its disk is slow, or it hangs ({_HANGS})"
        raise


def _wait(client: CacheClient, timeout_s: float) -> None:
    """Wait until the server is heard; after a moment say on stderr for what. Raises as it does."""
    deadline = time.monotonic() + timeout_s
    if timeout_s > 2 * _PATIENCE_S:  # the look takes a part of it
        try:
            client.wait_connected(_PATIENCE_S)
        except ServerUnreachable as error:
            why, limit = error.fields.get("why") or "no answer", approximate_duration(timeout_s)
            say(f"waiting for {client.endpoint}: {plain(why)}; up to {limit}, Ctrl-C ends")
    client.wait_connected(max(0.0, deadline - time.monotonic()))


def _with_holder(error: ServerUnreachable, root: Path | None, timeout_s: float) -> PersistError:
    """The error, with the process that holds the data dir: then there is none to be started."""
    reason, url = error.fields.get("reason"), error.fields.get("endpoint", "")
    if error.hint is None:
        error.hint = "it ended or was killed: its log and crash.log in its data dir may say why"
    socket = Path(url.removeprefix("ipc://"))
    if root is None and url.startswith("ipc://") and socket.name == "server.sock":
        root = socket.parent
    if root is None or reason not in _UNHEARD:
        return error
    holder = _holder(root)
    if holder is None:
        if reason != "silent":
            error.hint = start_hint(root) or error.hint
        return error
    who = f"pid {holder.pid} on {holder.host} holds {root}"
    if reason == "silent":
        why = f"{who} and does not answer within {timeout_s:g} s"
        hint = f"see its state with: ps -o stat,wchan:20,args -p {holder.pid}; T is stopped,"
        hint += f" it goes on with: kill -CONT {holder.pid}; if it hangs, end it with:"
        hint += f" kill -9 {holder.pid}, which loses nothing durable ({_HANGS})"
    else:
        why = f"{error.fields['why']}, but {who}, listening at {holder.endpoint}"
        hint = "use that endpoint; if it is this one, the server is about to start or to end, or"
        hint += f" its socket was removed: stop it with: kill {holder.pid}"
    return ServerUnreachable(f"no server answers at {url}: {why}", hint=hint, **error.fields)


def start_hint(root: Path) -> str:
    """How a server comes to run on a data dir: what a start would refuse comes first."""
    from lmcache_persist.server.offline import start_refusal

    refusal = start_refusal(root)
    if refusal is not None:
        return f"a start would be refused, since {refusal.message}: {refusal.hint}"
    return f"start one with: {command('serve', '--data-dir', root)}"


def _holder(root: Path) -> Holder | None:
    """The server that holds a data dir now, None if there is none, or that cannot be told."""
    try:
        with ReaderLock.acquire(root):
            return None
    except DataDirLocked:
        return read_holder(root)
    except DataDirUnusable:
        return None


def ask_json(
    client: CacheClient, message: type[Request], timeout_s: float, **fields: Any
) -> dict[str, Any]:
    """The document that a server answers with.

    Raises:
        MalformedMessage: the answer is no JSON object.
        PersistError: the server's refusal, or no answer.
    """
    from lmcache_persist.protocol import JsonReply

    reply = client.request(message, timeout_s=timeout_s, **fields)
    if not isinstance(reply, JsonReply):
        raise MalformedMessage(
            f"{message.__name__} was answered with {type(reply).__name__}, expected JSON"
        )
    try:
        document = json.loads(reply.body)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"the server's document cannot be decoded: {error}") from error
    if not isinstance(document, dict):
        raise MalformedMessage(f"the server's document is a {type(document).__name__}")
    return document


def seconds(text: str, flag: str = "--timeout") -> float:
    """The value of ``--timeout``, or of another flag. Raises ``ConfigError``, which names it."""
    try:
        value = parse_duration_s(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error.message}", hint=error.hint) from error
    if not 0 < value <= MAX_SECONDS:
        raise ConfigError(
            f"{flag} is {text!r}, expected more than 0 s and at most 30d",
            hint="for example 30, 500ms or 2min",
        )
    return value
