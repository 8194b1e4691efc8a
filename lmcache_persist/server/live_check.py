"""``verify`` on a live server: every digest, a bounded while per message.

The caller walks on with the cursor of each answer, so that neither a message nor a thread
of the server is busy with it for long, and a check of a large store can be stopped. It
changes nothing: what is proven bad stays until somebody wants to load it, and is dropped
then, as after any read. A repair drops it, and begins with one step on the
writer thread, which writes nothing else meanwhile; the caller asks again until that is
done. Then it checks like any other, and an answer waits until what it names is dropped.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from lmcache_persist import protocol
from lmcache_persist.errors import PersistError, StoreIOError
from lmcache_persist.server.state import ServerState
from lmcache_persist.server.wire import Answer
from lmcache_persist.store.base import CHUNK_KEY_BYTES, ChunkKey, DiskTier, Usage
from lmcache_persist.store.check_part import CHUNKS, check_cursor
from lmcache_persist.store.findings import CheckPart, Mended
from lmcache_persist.store.throttle import Throttle

logger = logging.getLogger(__name__)

BUDGET_S = 0.3
"""Seconds of checking per message."""
MAX_WAITING = 16
MAX_MENDED_SHOWN = 1000
"""Things mended in the first step that an answer names; the others are counted."""

MENDING = b"a"
"""The cursor of a repair's first step; smaller than those of a check."""
MENDED = CHUNKS + bytes(CHUNK_KEY_BYTES)
"""Where the check begins after it."""


class LiveCheck:
    """Answers ``admin.verify``.

    Threads: the loop; the checking runs on a reader, the mending on the writer.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._queue: deque[tuple[bytes, bool, Answer]] = deque()
        self._busy = False
        self._log = Throttle(logger)
        self._mending: Future[list[Mended]] | None = None

    def verify(self, message: protocol.AdminVerify, answer: Answer) -> None:
        """Check from the cursor on; a repair also drops and counts a chunk that is bad.

        One check at a time, so that lookups always find a reader.

        Raises:
            MalformedMessage: the cursor is none.
            StoreIOError: too many checks wait already.
            StoreGone: what would be checked is not what the data dir holds.
        """
        if self._state.files.gone:
            raise self._state.files.error()
        if message.repair and message.cursor in (b"", MENDING):
            self._mend(answer)
            return
        check_cursor(message.cursor)
        if len(self._queue) >= MAX_WAITING:
            raise StoreIOError(f"{MAX_WAITING} checks wait already", hint="try again later")
        self._queue.append((message.cursor, message.repair, answer))
        self._next()

    def _next(self) -> None:
        if self._busy or not self._queue:
            return
        self._busy = True
        cursor, repair, answer = self._queue.popleft()
        state = self._state

        def then(done: Future[tuple[CheckPart, Usage]]) -> None:
            self._busy = False
            self._next()
            _answer(
                answer, done, lambda found: self._tell(found[0], found[1], answer, repair=repair)
            )

        state.run(state.readers, lambda: check_some(state.disk, cursor, repair=repair), then)

    def _tell(self, part: CheckPart, usage: Usage, answer: Answer, *, repair: bool) -> None:
        state = self._state
        if part.bad:
            then_what = "they are dropped" if repair else "a load or verify --repair drops them"
            self._log.warning(
                f"verify found {len(part.bad)} bad chunks, the first {next(iter(part.bad)).hex()}:"
                f" {then_what}"
            )
        if not repair or not part.bad:
            answer(_json(part_document(part, usage, repair=repair)))
            return
        state.counters.corrupt_chunks += len(part.bad)

        def then(done: Future[list[ChunkKey]]) -> None:
            _answer(answer, done, lambda _: answer(_json(part_document(part, usage, repair=True))))

        state.writer.run(lambda: state.disk.drop(part.bad)).add_done_callback(
            lambda done: state.mailbox.post(lambda: then(done))
        )

    def _mend(self, answer: Answer) -> None:
        """Start mending, or say that it goes on; the result goes to whoever asks first."""
        if self._mending is None:
            self._mending = self._state.writer.run(self._state.disk.repair)
        if not self._mending.done():
            answer(_json({**_NOTHING, "cursor": MENDING.hex()}))
            return
        done, self._mending = self._mending, None
        _answer(answer, done, lambda mended: self._mended(mended, answer))

    def _mended(self, mended: list[Mended], answer: Answer) -> None:
        dropped = {one.dropped for one in mended if one.dropped is not None}
        self._state.counters.corrupt_chunks += len(dropped)
        answer(_json(mended_document(mended)))


def _answer(answer: Answer, done: Future[Any], told: Callable[[Any], None]) -> None:
    """Pass a result on, or the refusal in its place."""
    try:
        result = done.result()
    except PersistError as error:
        answer(error)
    except OSError as error:
        answer(StoreIOError(f"the store cannot be checked: {error}"))
    else:
        told(result)


_NOTHING: dict[str, Any] = {
    "violations": [],
    "checked_objects": 0,
    "checked_bytes": 0,
    "total_objects": None,
    "total_bytes": None,
    "notes": [],
}


def check_some(disk: DiskTier, cursor: bytes, *, repair: bool) -> tuple[CheckPart, Usage]:
    """A part of a check, and what there is to check in all."""
    return disk.check_part(cursor, BUDGET_S, note=repair), disk.usage()


def part_document(part: CheckPart, usage: Usage, *, repair: bool) -> dict[str, Any]:
    """The answer for one part; ``cursor`` is hex, null at the end.

    With ``repair`` each violation has ``repaired``: what was done, null for nothing.
    """
    bad = tuple(f"chunk {key.hex()}" for key in part.bad)
    violations: list[dict[str, Any]] = [asdict(one) for one in part.violations]
    if repair:
        for one in violations:
            one["repaired"] = "dropped the chunk" if one["where"].startswith(bad) else None
    return {
        "violations": violations,
        "checked_objects": part.checked_objects,
        "checked_bytes": part.checked_bytes,
        "total_objects": usage.objects + usage.stale_objects,
        "total_bytes": usage.bytes + usage.stale_bytes,
        # The first step of a repair has compared the sums, whatever their number.
        "notes": [] if repair else part.notes,
        "cursor": part.cursor.hex() if part.cursor is not None else None,
    }


def mended_document(mended: list[Mended]) -> dict[str, Any]:
    """The answer for a repair's first step."""
    notes = []
    if len(mended) > MAX_MENDED_SHOWN:
        notes.append(f"{len(mended) - MAX_MENDED_SHOWN} more were mended and are not named")
    shown = [{**asdict(one.violation), "repaired": one.done} for one in mended[:MAX_MENDED_SHOWN]]
    return {**_NOTHING, "violations": shown, "notes": notes, "cursor": MENDED.hex()}


def _json(document: dict[str, Any]) -> protocol.JsonReply:
    return protocol.JsonReply(body=json.dumps(document).encode())
