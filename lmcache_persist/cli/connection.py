"""How verbs talk to a server: one client, connected in time or a typed error."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lmcache_persist.errors import MalformedMessage
from lmcache_persist.units import parse_duration_s

if TYPE_CHECKING:
    from lmcache_persist.connector import CacheClient
    from lmcache_persist.protocol import Request

DEFAULT_TIMEOUT = "10"


@contextlib.contextmanager
def connected(
    server: str, timeout_s: float, verb: str, *, kind: str = "cli"
) -> Iterator[CacheClient]:
    """A client that has heard the server; closed at the end.

    Raises:
        ServerUnreachable: nobody answers within ``timeout_s``.
        ConfigError: ``server`` is no endpoint.
    """
    from lmcache_persist.connector import CacheClient, ClientOptions

    # The verb says itself how it ended; the client's own log lines would say it twice.
    logging.getLogger("lmcache_persist").addHandler(logging.NullHandler())
    options = ClientOptions(connect_timeout_s=timeout_s)
    with CacheClient(server, kind=kind, label=f"lmcache-persist {verb}", options=options) as client:
        client.wait_connected(timeout_s)
        yield client


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


def seconds(text: str) -> float:
    """The value of ``--timeout``. Raises ``ConfigError``."""
    return parse_duration_s(text)
