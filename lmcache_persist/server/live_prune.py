"""``prune`` on a live server: a bounded number of chunks per message.

The writer thread removes them between its batches, in transactions of their own; lookups
never wait for it. What is in the pool goes, too, as soon as nobody holds it.
"""

from __future__ import annotations

import json
from typing import Any

from lmcache_persist import protocol
from lmcache_persist.errors import MalformedMessage
from lmcache_persist.identity import Fingerprint
from lmcache_persist.server.gate import Gate
from lmcache_persist.server.state import ServerState
from lmcache_persist.server.wire import Answer
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
                lambda picked: answer(_reply(picked)),
            )
            return

        def pruned(picked: Picked) -> None:
            state.counters.pruned_chunks += len(picked.keys)
            state.memory.prune(picked.keys)
            if picked.cursor is None:
                self._prune_pool(selection)
            answer(_reply(picked))

        self._gate.pass_through(
            state.run_on_writer, lambda: disk.prune(selection, message.cursor), answer, pruned
        )

    def _prune_pool(self, selection: Selection) -> None:
        """All of a model: also what only the pool has, because the disk evicted it."""
        if selection == Selection(fingerprints=selection.fingerprints) and selection.fingerprints:
            memory = self._state.memory
            memory.prune(memory.keys_of(selection.fingerprints))


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


def _reply(picked: Picked) -> protocol.JsonReply:
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
    }
    return protocol.JsonReply(body=json.dumps(document).encode())
