"""``serve``: run the cache server of one data dir."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from lmcache_persist.cli.output import ending
from lmcache_persist.errors import PersistError

log = logging.getLogger(__name__)

Text = str | None


@ending
def serve(
    data_dir: Annotated[
        Text,
        typer.Option(metavar="DIR", help="Folder of manifest and store; made if absent. Needed."),
    ] = None,
    config: Annotated[
        Text, typer.Option(metavar="FILE", help="YAML file with settings. [default: none]")
    ] = None,
    chunk_size: Annotated[
        Text, typer.Option(metavar="auto|N", help="Tokens of a chunk. [default: auto]")
    ] = None,
    chunk_size_from: Annotated[
        Text, typer.Option(metavar="URL", help="Take that of another server. [default: none]")
    ] = None,
    base_chunk_size: Annotated[
        Text,
        typer.Option(metavar="TOKENS", help="Chunk size wished for in auto mode. [default: 256]"),
    ] = None,
    max_chunk_size: Annotated[
        Text, typer.Option(metavar="TOKENS", help="Refuse a larger chunk size. [default: 16384]")
    ] = None,
    capacity: Annotated[
        Text,
        typer.Option(metavar="SIZE", help="Of the disk tier. [default: as it is; new: 8GiB]"),
    ] = None,
    pool_size: Annotated[
        Text, typer.Option(metavar="SIZE", help="Of the memory tier. [default: 1GiB]")
    ] = None,
    pool_dir: Annotated[
        Text, typer.Option(metavar="DIR", help="For the pool. [default: /dev/shm]")
    ] = None,
    listen: Annotated[
        Text,
        typer.Option(metavar="URL", help="Endpoint for engines. [default: ipc://DIR/server.sock]"),
    ] = None,
    http: Annotated[
        Text, typer.Option(metavar="HOST:PORT", help="Metrics and health. [default: none]")
    ] = None,
    group: Annotated[
        Text,
        typer.Option(
            metavar="NAME", help="Group that may connect, beside the owner. [default: none]"
        ),
    ] = None,
    durability: Annotated[
        Text, typer.Option(metavar="sync|relaxed", help="relaxed may lose all. [default: sync]")
    ] = None,
    allow_network_fs: Annotated[
        bool | None,
        typer.Option(
            "--allow-network-fs/--no-allow-network-fs",
            help="Accept NFS and the like. [default: no]",
        ),
    ] = None,
    allow_remote: Annotated[
        bool | None,
        typer.Option(
            "--allow-remote/--no-allow-remote", help="Listen beyond this machine. [default: no]"
        ),
    ] = None,
    pool_wait: Annotated[
        Text,
        typer.Option(metavar="SECONDS", help="A start waits so long for memory. [default: 30]"),
    ] = None,
    shutdown_timeout: Annotated[
        Text, typer.Option(metavar="SECONDS", help="A stop flushes so long. [default: 10]")
    ] = None,
    log_level: Annotated[
        Text, typer.Option(metavar="LEVEL", help="debug, info, warning, error. [default: info]")
    ] = None,
    log_format: Annotated[
        Text, typer.Option(metavar="text|json", help="json: one object per line. [default: text]")
    ] = None,
) -> int:
    """Run the cache server of one data dir until SIGTERM.

    The first line on stdout once requests are answered is "ready URL". Every flag is also
    a variable (LMCACHE_PERSIST_CAPACITY) and a name in the --config file (capacity).

    Example: lmcache-persist serve --data-dir /var/lib/kv --capacity 64GiB
    """
    from lmcache_persist.config import Settings

    settings = Settings.load(
        {
            "data_dir": data_dir,
            "config": config,
            "chunk_size": chunk_size,
            "chunk_size_from": chunk_size_from,
            "base_chunk_size": base_chunk_size,
            "max_chunk_size": max_chunk_size,
            "capacity": capacity,
            "pool_size": pool_size,
            "pool_dir": pool_dir,
            "listen": listen,
            "http": http,
            "group": group,
            "durability": durability,
            "allow_network_fs": allow_network_fs,
            "allow_remote": allow_remote,
            "pool_wait": pool_wait,
            "shutdown_timeout": shutdown_timeout,
            "log_level": log_level,
            "log_format": log_format,
        }
    )
    from lmcache_persist.server.app import serve as run_server

    try:
        return run_server(settings)
    except PersistError as error:
        if settings.log_format == "json":
            # Who reads the log reads no other lines.
            log.error("the server cannot serve [%s]: %s", error.code, error)
        raise
