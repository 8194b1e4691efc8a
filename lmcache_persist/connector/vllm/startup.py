"""Start-up of either role: connect, bind, and refuse or run cold."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

from lmcache_persist.connector import CacheClient, ClientOptions
from lmcache_persist.connector.vllm.counters import Counters, logger
from lmcache_persist.connector.vllm.settings import ConnectorSettings
from lmcache_persist.errors import PersistError
from lmcache_persist.geometry import Group

BIND_TIMEOUT_S = 10.0
"""Seconds for the answer of a server that is known to be there."""

REMEMBER_TIMEOUT_S = 0.05
"""Seconds for a bind that cannot be answered and is only to be remembered."""


def start_client(
    settings: ConnectorSettings,
    counters: Counters,
    groups: Sequence[Group],
    *,
    kind: str,
    label: str,
    who: str,
) -> CacheClient:
    """A client that has bound ``groups``, or goes on trying where the settings allow it.

    Args:
        settings: the operator's.
        counters: for what goes wrong without being an error.
        groups: the geometry.
        kind: ``worker`` or ``scheduler``.
        label: who this is, in the server's log.
        who: the model, for the binding's winner.

    Raises:
        PersistError: the server is not there, refuses the geometry, or is bound to another
            size than expected, and ``persist.required`` is not false.
    """
    options = ClientOptions(
        connect_timeout_s=settings.connect_timeout,
        request_timeout_s=settings.request_timeout,
        lookup_timeout_s=settings.lookup_timeout,
    )
    client = CacheClient(settings.server, kind=kind, label=label, options=options)
    try:
        _bind(client, settings, groups, who)
    except PersistError as error:
        if settings.required:
            client.close()
            raise
        counters.incident("start_without_cache", error)
        logger.warning("cache: running without it (persist.required is false): %s", error)
    except BaseException:
        client.close()
        raise
    return client


def _bind(
    client: CacheClient, settings: ConnectorSettings, groups: Sequence[Group], who: str
) -> None:
    bind = partial(
        client.bind,
        groups,
        base=settings.base_chunk_size,
        expect=settings.expect_chunk_size,
        who=who,
    )
    try:
        client.wait_connected(settings.connect_timeout)
    except PersistError:
        # The client remembers a bind whatever comes of it, and binds once a server is there.
        with contextlib.suppress(PersistError):
            bind(timeout_s=REMEMBER_TIMEOUT_S)
        raise
    for warning in bind(timeout_s=BIND_TIMEOUT_S).warnings:
        logger.warning("cache: %s", warning)
