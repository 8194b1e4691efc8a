"""``prune`` on a live server: a bounded number of chunks per message.

The writer thread removes them between its batches, in transactions of their own; lookups
never wait for it. What is in the pool goes, too, as soon as nobody holds it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lmcache_persist import protocol
from lmcache_persist.errors import MalformedMessage
from lmcache_persist.identity import Fingerprint
from lmcache_persist.server.gate import Gate
from lmcache_persist.server.state import ServerState
from lmcache_persist.server.wire import Answer
from lmcache_persist.store.base import ChunkKey
from lmcache_persist.store.selection import Picked, Selection

_CURSOR_BYTES = 8


class LivePrune:
    """Answers ``admin.prune``.

    Threads: the loop.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._gate = Gate("prune")

    def prune(self, message: protocol.AdminPrune, answer: Answer) -> None:
        """Remove, or only count, from the cursor on.

        Raises:
            MalformedMessage: nothing is selected, or the cursor is none.
            StoreIOError: too many requests wait already.
        """
        selection = _selection(message)
        if message.cursor and len(message.cursor) != _CURSOR_BYTES:
            raise MalformedMessage(
                f"cursor has {len(message.cursor)} bytes, expected {_CURSOR_BYTES} or none"
            )
        state, disk = self._state, self._state.disk
        if message.dry_run:
            self._gate.pass_through(
                lambda work, then: state.run(state.readers, work, then),
                lambda: disk.preview(selection, message.cursor, message.counted_bytes),
                answer,
                lambda picked: answer(_reply(picked, self._pool_keys(selection, picked))),
            )
            return

        def pruned(picked: Picked) -> None:
            state.counters.pruned_chunks += len(picked.keys)
            state.memory.prune(picked.keys)
            state.memory.prune(self._pool_keys(selection, picked))
            answer(_reply(picked))

        self._gate.pass_through(
            state.run_on_writer, lambda: disk.prune(selection, message.cursor), answer, pruned
        )

    def _pool_keys(self, selection: Selection, picked: Picked) -> list[ChunkKey]:
        """At the end of whole models: also what only the pool has, as the disk evicted it."""
        if picked.cursor is not None or not selection.whole_models:
            return []
        return self._state.memory.keys_of(selection.whole_models)


def _selection(message: protocol.AdminPrune) -> Selection:
    names = message.fingerprints
    selection = Selection(
        fingerprints=None if names is None else frozenset(map(Fingerprint, names)),
        stale=message.stale,
        stored_before=message.stored_before,
        down_to_bytes=message.down_to_bytes,
    )
    if selection.is_everything:
        raise MalformedMessage("admin.prune selects nothing in particular, expected a selector")
    return selection


def _reply(picked: Picked, pool_keys: Sequence[ChunkKey] = ()) -> protocol.JsonReply:
    document: dict[str, Any] = {
        "picked": [
            {
                "fingerprint": fingerprint,
                "stale": stale,
                "chunks": amount.chunks,
                "objects": amount.objects,
                "bytes": amount.bytes,
            }
            for (fingerprint, stale), amount in picked.amounts.items()
        ],
        "cursor": None if picked.cursor is None else picked.cursor.hex(),
        "pool_chunks": len(pool_keys),
    }
    return protocol.JsonReply(body=json.dumps(document).encode())
