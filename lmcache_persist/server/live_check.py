"""``verify`` on a live server: every digest, a bounded while per message.

The caller walks on with the cursor of each answer, so that neither a message nor a thread
of the server is busy with it for long, and a check of a large store can be stopped.
"""

from __future__ import annotations

import json
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

from lmcache_persist import protocol
from lmcache_persist.errors import MalformedMessage, ObjectCorrupt, PersistError, StoreIOError
from lmcache_persist.server.state import ServerState
from lmcache_persist.server.wire import Answer
from lmcache_persist.store.base import CHUNK_KEY_BYTES, ChunkKey, ChunkRecord, DiskTier

BUDGET_S = 0.3
"""Seconds of checking per message."""
RECORDS_PER_LOOK = 64
MAX_WAITING = 16


class LiveCheck:
    """Answers ``admin.verify``.

    Threads: the loop; the checking runs on a reader.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._queue: deque[tuple[bytes, Answer]] = deque()
        self._busy = False

    def verify(self, message: protocol.AdminVerify, answer: Answer) -> None:
        """Check from the cursor on; a corrupt chunk is named, dropped and counted.

        One check at a time, so that lookups always find a reader.

        Raises:
            MalformedMessage: the cursor is none.
            StoreIOError: too many checks wait already.
        """
        if message.cursor and len(message.cursor) != CHUNK_KEY_BYTES:
            raise MalformedMessage(
                f"cursor has {len(message.cursor)} bytes, expected {CHUNK_KEY_BYTES} or none"
            )
        if len(self._queue) >= MAX_WAITING:
            raise StoreIOError(f"{MAX_WAITING} checks wait already", hint="try again later")
        self._queue.append((message.cursor, answer))
        self._next()

    def _next(self) -> None:
        if self._busy or not self._queue:
            return
        self._busy = True
        cursor, answer = self._queue.popleft()
        state = self._state

        def then(done: Future[tuple[dict[str, Any], list[ChunkKey]]]) -> None:
            self._busy = False
            self._next()
            try:
                document, bad = done.result()
            except PersistError as error:
                answer(error)
                return
            except OSError as error:
                answer(StoreIOError(f"store cannot be checked: {error}"))
                return
            if bad:
                state.counters.corrupt_chunks += len(bad)
                state.writer.drop(bad)
            answer(protocol.JsonReply(body=json.dumps(document).encode()))

        state.run(state.readers, lambda: check_some(state.disk, cursor), then)


def check_some(disk: DiskTier, cursor: bytes) -> tuple[dict[str, Any], list[ChunkKey]]:
    """Read and verify objects after ``cursor`` until the budget is spent.

    Returns:
        The answer's document (``violations``, ``checked_objects``, ``cursor`` as hex or null
        at the end), and the keys that are proven bad.
    """
    deadline = time.monotonic() + BUDGET_S
    violations: list[dict[str, str]] = []
    bad: list[ChunkKey] = []
    checked, after = 0, cursor
    while time.monotonic() < deadline:
        records = disk.scan(after, RECORDS_PER_LOOK)
        for record in records:
            problem, objects = _check_chunk(disk, record)
            checked += objects
            if problem:
                violations.append({"where": f"chunk {record.key.hex()}", "what": problem})
                bad.append(record.key)
            after = record.key
        if len(records) < RECORDS_PER_LOOK:
            after = b""
            break
    document = {
        "violations": violations,
        "checked_objects": checked,
        "cursor": after.hex() if after else None,
    }
    return document, bad


def _check_chunk(disk: DiskTier, record: ChunkRecord) -> tuple[str, int]:
    checked = 0
    for place, stored in record.objects.items():
        buffer = memoryview(bytearray(stored.nbytes))
        try:
            if not disk.read_into(record, place, buffer):
                return "", checked
        except ObjectCorrupt as error:
            return str(error), checked
        checked += 1
    return "", checked
