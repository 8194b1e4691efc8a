"""The server that holds a data dir, for verbs that ask it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_persist.cli.connection import connected
from lmcache_persist.cli.inspect import holder_of, reachable_endpoint
from lmcache_persist.errors import DataDirLocked, ServerUnreachable

if TYPE_CHECKING:
    from lmcache_persist.connector import CacheClient


@contextlib.contextmanager
def holding_server(root: Path, timeout_s: float, verb: str) -> Iterator[CacheClient]:
    """A client of the very server that holds the data dir, and no other one.

    Raises:
        ServerUnreachable: it does not answer within ``timeout_s``, or another one does.
    """
    holder = holder_of(root)
    with connected(reachable_endpoint(root, holder), timeout_s, verb) as client:
        if client.boot_id != holder.boot_id:
            raise ServerUnreachable(
                f"the server at {holder.endpoint} has boot id {client.boot_id}, expected"
                f" {holder.boot_id}, which holds {root}"
            )
        yield client


def by_server(error: DataDirLocked) -> bool:
    """Whether a server that can be asked holds the lock, not another offline verb."""
    return "endpoint" in error.fields
