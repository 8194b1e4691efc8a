"""The server that holds a data dir, for verbs that ask it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_persist.cli.connection import connected
from lmcache_persist.datadir import DataDir, Holder, read_holder
from lmcache_persist.errors import DataDirLocked, ServerUnreachable

if TYPE_CHECKING:
    from lmcache_persist.connector import CacheClient


def absolute(data_dir: str) -> Path:
    """A data dir as it was typed, as a path."""
    return Path(os.path.abspath(os.path.expanduser(data_dir)))


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


def holder_of(root: Path) -> Holder:
    """The server that holds the data dir. Raises ``ServerUnreachable`` if it is yet unnamed."""
    holder = read_holder(root)
    if holder is None:
        raise ServerUnreachable(
            f"the server that holds {root} has not said where it listens", hint="try again"
        )
    return holder


def reachable_endpoint(root: Path, holder: Holder) -> str:
    """The holder's endpoint as seen from here: its path may have another name in a container."""
    path = holder.endpoint.removeprefix("ipc://")
    if path != holder.endpoint and not os.path.exists(path) and DataDir(root).socket.exists():
        return DataDir(root).endpoint
    return holder.endpoint
