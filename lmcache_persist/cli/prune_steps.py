"""``prune``, step by step: by a live server, or on the files; looked at first, if asked for."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_persist.cli.connection import ask_json
from lmcache_persist.cli.live import holding_server
from lmcache_persist.errors import MalformedMessage

if TYPE_CHECKING:
    from lmcache_persist.connector import CacheClient
    from lmcache_persist.server.prune import Agree
    from lmcache_persist.store.selection import Picked, Selection

Steps = Generator["Picked", None, None]


def offline(root: Path, selection: Selection, agree: Agree | None) -> Steps:
    """What is removed from the files; what would be, without ``agree``."""
    from lmcache_persist.server import prune as on_files

    if agree is None:
        yield from on_files.preview(root, selection)
    else:
        yield from on_files.prune(root, selection, agree=agree)


def live(root: Path, timeout_s: float, selection: Selection, agree: Agree | None) -> Steps:
    """What the server that holds the data dir removes; what it would, without ``agree``."""
    with holding_server(root, timeout_s, "prune") as client:
        would = _of_server(client, timeout_s, selection, dry_run=True)
        if agree is None:
            yield from would
        elif agree(would):
            yield from _of_server(client, timeout_s, selection, dry_run=False)


def _of_server(
    client: CacheClient, timeout_s: float, selection: Selection, *, dry_run: bool
) -> Steps:
    from lmcache_persist.protocol import AdminPrune

    names = selection.fingerprints
    cursor, counted_bytes = b"", 0
    while True:
        reply = ask_json(
            client,
            AdminPrune,
            timeout_s,
            fingerprints=None if names is None else sorted(names),
            stale=selection.stale,
            stored_before=selection.stored_before,
            down_to_bytes=selection.down_to_bytes,
            dry_run=dry_run,
            cursor=cursor,
            counted_bytes=counted_bytes,
        )
        picked = _decode(reply)
        counted_bytes += picked.bytes
        yield picked
        if picked.cursor is None:
            return
        if picked.cursor <= cursor:
            raise MalformedMessage("the server's prune does not go forward")
        cursor = picked.cursor


def _decode(reply: dict[str, Any]) -> Picked:
    from lmcache_persist.store.base import FingerprintUsage
    from lmcache_persist.store.selection import Picked

    picked = Picked()
    try:
        for row in reply["picked"]:
            amount = FingerprintUsage(int(row["chunks"]), int(row["objects"]), int(row["bytes"]))
            picked.amounts[row["fingerprint"], bool(row["stale"])] = amount
        picked.cursor = None if reply["cursor"] is None else bytes.fromhex(reply["cursor"])
        picked.pool_chunks = int(reply["pool_chunks"])
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedMessage(f"the server's prune cannot be decoded: {error}") from error
    return picked
