"""The server that holds a data dir, for verbs that ask it."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_persist.cli.connection import connected, start_hint
from lmcache_persist.datadir import DataDir, Holder, ReaderLock, read_holder
from lmcache_persist.errors import ConfigError, DataDirLocked, ServerUnreachable, UsageError

if TYPE_CHECKING:
    from lmcache_persist.connector import CacheClient


def absolute(data_dir: str) -> Path:
    """A data dir as it was typed, as a path. Raises ``ConfigError`` if it is an endpoint."""
    scheme, found, rest = data_dir.partition("://")
    if found:
        folder = rest.removesuffix("/server.sock") if scheme == "ipc" else "DIR"
        raise ConfigError(
            f"{data_dir!r} is an endpoint, expected a folder",
            hint=f"give the data dir: {folder}; verbs that have --server take an endpoint there",
        )
    return Path(os.path.abspath(os.path.expanduser(data_dir)))


@contextlib.contextmanager
def holding_server(root: Path, timeout_s: float, verb: str) -> Iterator[CacheClient]:
    """A client of the very server that holds the data dir, and no other one.

    Raises:
        ServerUnreachable: it does not answer within ``timeout_s``, or another one does.
    """
    holder = holder_of(root)
    with connected(reachable_endpoint(root, holder), timeout_s, verb, root=root) as client:
        if client.boot_id != holder.boot_id:
            raise ServerUnreachable(
                f"the server at {holder.endpoint} has boot id {client.boot_id}, expected"
                f" {holder.boot_id}, which holds {root}",
                hint="try again: one of them may just have started",
            )
        yield client


def endpoint_of(data_dir: str | None, server: str | None) -> tuple[str, Path | None]:
    """The endpoint for a verb that takes DIR or ``--server``, and DIR if it is known.

    Raises:
        UsageError: neither or both are given.
        ConfigError: ``--server`` is a folder.
        DataDirUnusable: DIR is none.
        ServerUnreachable: no server runs, or none has said where it listens.
    """
    if (data_dir is None) == (server is None):
        found = "neither DIR nor --server is" if server is None else "both DIR and --server are"
        raise UsageError(
            f"{found} given, expected one, such as /var/lib/kv, or --server"
            " ipc:///var/lib/kv/server.sock"
        )
    if server is not None:
        _refuse_folder(server)
        return server, None
    root = absolute(str(data_dir))
    holder = read_holder(root)
    if holder is None:
        raise _unserved(root)
    if not _is_held(root):  # it was killed: nothing is to be waited for
        raise ServerUnreachable(f"no server runs on {root}", hint=start_hint(root))
    return reachable_endpoint(root, holder), root


def _refuse_folder(server: str) -> None:
    """Refuse a folder where an endpoint is expected. Raises ``ConfigError``."""
    path = os.path.expanduser(server.removeprefix("ipc://"))
    if "/" not in path or not os.path.isdir(path):
        return
    root = absolute(path)
    hint = f"give the data dir as DIR, without --server: {shlex.quote(str(root))}"
    if DataDir(root).socket.exists():
        hint += f"; or --server {shlex.quote(DataDir(root).endpoint)}"
    raise ConfigError(f"--server {server!r} is a folder, expected an endpoint", hint=hint)


def _is_held(root: Path) -> bool:
    """Whether somebody holds a data dir; the kernel says so, whatever the lock file does."""
    try:
        ReaderLock.acquire(root).release()
    except DataDirLocked:
        return True
    return False


def _unserved(root: Path) -> ServerUnreachable:
    """Why nobody can be asked about a data dir in whose lock file nobody is named.

    Raises:
        DataDirUnusable: it is none, or a backup.
    """
    from lmcache_persist.server.backup_file import refuse_to_change
    from lmcache_persist.server.offline import used_data_dir

    used_data_dir(root)
    refuse_to_change(root)
    if _is_held(root):
        return ServerUnreachable(
            f"the server that holds {root} has not said where it listens", hint="try again"
        )
    return ServerUnreachable(f"no server runs on {root}", hint=start_hint(root))


@contextlib.contextmanager
def without_server(verb: str, afterwards: str = "") -> Iterator[None]:
    """Around a verb that works while no server runs: that is the hint if one does.

    Raises:
        DataDirLocked: somebody holds the data dir.
    """
    try:
        yield
    except DataDirLocked as error:
        if by_server(error):
            where = error.fields["host"]
            there = "" if where == socket.gethostname() else f" on {where}"
            stop = f"stop that one{there} (kill -TERM {error.fields['pid']})"
            error.hint = f"{verb} works while no server runs: {stop}{afterwards}"
        raise


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
