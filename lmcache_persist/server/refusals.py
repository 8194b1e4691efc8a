"""Binds and registrations that are refused: counted, logged, and kept in the manifest.

Each one that is counted is also recorded, whoever floods us: the clerk has one job for them
at a time, in one transaction, and what comes meanwhile is merged for the next one.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace
from typing import Final

from lmcache_persist.errors import PersistError
from lmcache_persist.manifest.catalog import RejectionRow
from lmcache_persist.printable import short
from lmcache_persist.server.state import ServerState, utc_now
from lmcache_persist.server.wire import sendable
from lmcache_persist.store.throttle import Throttle

log = logging.getLogger(__name__)

MAX_WAITING = 64
"""Different refusals that wait for the clerk; beyond, equal reasons are one."""
MAX_WHO_CHARS = 120

_GEOMETRY = "mend the engine's groups, which make no sense as they are"
WAYS_OUT: Final = {
    "geometry": _GEOMETRY,
    "invalid_tokens_per_block": f"{_GEOMETRY}: whole numbers, 0 for a scratch group",
    "no_cacheable_group": "run the engine without this cache: such a model has nothing to store",
    "alignment_too_large": "choose block sizes with a common multiple, or raise --max-chunk-size",
    "unsupported_group": "run the engine without this cache, or with groups that it takes",
    "binding": "point the engine at a server that fits it",
    "incompatible_alignment": "start the engine with block sizes that divide the bound chunk size,"
    " point it at a server with a data dir of its own, or stop this server and give up what is"
    " stored with: lmcache-persist rebind DIR --chunk-size N",
    "unbound": "none is needed: an engine binds first, by itself",
    "unexpected_chunk_size": "point the engine at the right server, or correct"
    " persist.expect_chunk_size",
    "binding_mismatch": "run the same version of lmcache-persist on both servers",
    "stale": "none is needed: the engine starts over, by itself",
    "registration": "give each engine an id of its own, and the version of the server",
    "identity_unknown": "run the engine with weights on disk, of a known revision",
    "identity_mismatch": "give all ranks of the engine the same model and configuration",
    "chunk_too_large": "restart the server with a larger --pool-size, or resize the store,"
    " whichever the detail names",
}
"""By the reason of a rejection: what an operator can do. Numbers are in its detail."""


class Refusals:
    """Takes down every refusal.

    Threads: the loop.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._waiting: dict[tuple[str, str], RejectionRow] = {}
        self._recording = False
        self._said: dict[str, Throttle] = {}
        self._trouble = Throttle(log)

    def note(self, error: PersistError, who: str) -> None:
        """Count, log and record a refusal of ``who``."""
        self._state.counters.rejected(error.code)
        # Per reason: a client that goes on trying must not hide why another one is refused.
        said = self._said.setdefault(error.code, Throttle(log))
        said.warning(f"refused {short(who, MAX_WHO_CHARS) or 'a client'}: {error}")
        self._merge(RejectionRow(utc_now(), error.code, sendable(error.message), 1))
        if not self._recording:
            self._record()

    def _merge(self, row: RejectionRow) -> None:
        key = row.reason, row.detail
        if key not in self._waiting and len(self._waiting) >= MAX_WAITING:
            key = next((known for known in self._waiting if known[0] == row.reason), key)
        known = self._waiting.pop(key, None)
        if known is not None:
            row = replace(row, count=row.count + known.count)
        self._waiting[row.reason, row.detail] = row

    def _record(self) -> None:
        """Have the clerk record what waits."""
        state, rows = self._state, list(self._waiting.values())
        self._waiting.clear()
        self._recording = True
        state.run(
            state.clerk,
            lambda: state.manifest.record_rejections(rows),
            lambda done: self._recorded(done, rows),
        )

    def _recorded(self, done: Future[None], rows: list[RejectionRow]) -> None:
        self._recording = False
        error = done.exception()
        if error is not None:
            # Kept for the next one: a disk that fails is not asked again and again.
            self._trouble.error(f"a refusal is not recorded yet: {error}")
            newer, self._waiting = self._waiting, {}
            for row in (*rows, *newer.values()):
                self._merge(row)
        elif self._waiting:
            self._record()
