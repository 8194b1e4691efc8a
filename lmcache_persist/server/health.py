"""Whether the data path works, told without touching it.

The :class:`Probe` looks at the disk once a second on the clerk's thread; who asks for health
gets what it found last, and how long ago, so an answer comes at once also while the disk
hangs. Nothing is written by looking.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_persist.datadir import DataDir
from lmcache_persist.errors import StoreError
from lmcache_persist.printable import plain
from lmcache_persist.store.base import Usage
from lmcache_persist.units import approximate_duration

if TYPE_CHECKING:
    from lmcache_persist.server.registration import Engine
    from lmcache_persist.server.state import ServerState

PROBE_EVERY_S = 1.0
STALLED_S = 30.0
"""Seconds after which a disk that has not answered, or a loop that has not turned, counts as
stalled: longer than the largest group commit takes on a slow disk."""
DEAD_S = 60.0
"""Seconds without a turn of the loop after which a restart is all that helps."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why something does not work: a word that stays, and a sentence for people."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class _Seen:
    usage: Usage | None
    problems: tuple[Problem, ...]


class Probe:
    """What a look at data dir and disk tier found last.

    Attributes:
        usage: of the disk tier; None before the first look.
        problems: of the last look.
        seen_s: monotonic time at which that look ended.

    Threads: :meth:`tick` the loop; the attributes any.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._busy_since_s: float | None = None
        self.usage: Usage | None = None
        self.problems: tuple[Problem, ...] = ()
        self.seen_s = float("-inf")

    def tick(self) -> None:
        """Look again if it is time to, and the last look came back."""
        now = time.monotonic()
        if self._busy_since_s is None and now - self.seen_s >= PROBE_EVERY_S:
            self._busy_since_s = now
            self._state.run(self._state.clerk, self._look, self._looked)

    @property
    def waiting_s(self) -> float:
        """Seconds that the look under way takes already, 0 without one. Threads: any."""
        since = self._busy_since_s
        return 0.0 if since is None else time.monotonic() - since

    def _look(self) -> _Seen:
        state, problems, usage = self._state, [], None
        folder = state.settings.data_dir
        in_place = state.files.look()
        try:
            if in_place and os.statvfs(DataDir(folder).store).f_flag & os.ST_RDONLY:
                problems.append(
                    Problem("read_only", f"data dir {plain(folder)} is mounted read-only")
                )
        except OSError as error:
            problems.append(
                Problem("data_dir", f"data dir {plain(folder)} fails: {error.strerror}")
            )
        try:
            usage = state.disk.usage()
        except (StoreError, OSError) as error:
            problems.append(Problem("store_unreadable", f"the disk tier: {plain(error)}"))
        return _Seen(usage, tuple(problems))

    def _looked(self, done: Future[_Seen]) -> None:
        self._busy_since_s = None
        self.seen_s = time.monotonic()
        if done.cancelled():
            return  # the server stops
        seen = done.result()
        self.problems = seen.problems
        self.usage = seen.usage or self.usage


def liveness(state: ServerState) -> list[Problem]:
    """Why only a restart helps; empty while the server lives. Threads: any."""
    silent_s = time.monotonic() - state.turned_s
    if silent_s > DEAD_S:
        return [_loop_stalled(silent_s)]
    return []


def readiness(
    state: ServerState, probe: Probe, engines: Sequence[Engine], disagreement: str
) -> list[Problem]:
    """Why engines cannot store and load; empty if they can. Threads: any.

    Args:
        state: the server's.
        probe: what it saw last counts.
        engines: those registered.
        disagreement: how the server of ``--chunk-size-from`` differs, else empty.
    """
    now = time.monotonic()
    found: list[Problem] = []
    if now - state.turned_s > STALLED_S:
        found.append(_loop_stalled(now - state.turned_s))
    if state.files.gone:
        found.append(Problem("store_gone", state.files.gone))
    found += _of_writer(state, now)
    found += probe.problems
    waited = max(
        [now - begin for begin in list(state.reading.values())] + [probe.waiting_s], default=0.0
    )
    if waited > STALLED_S:
        found.append(_disk_stalled("a look at", waited))
    if disagreement:
        found.append(Problem("boundaries_differ", plain(disagreement)))
    if state.binding is None:
        found.append(Problem("unbound", "no chunk size is bound: no engine has asked for one"))
    elif not any(engine.fingerprint for engine in engines):
        found.append(_no_engine(engines))
    return found


def _of_writer(state: ServerState, now: float) -> list[Problem]:
    writer, found = state.writer, []
    if not writer.alive:
        found.append(Problem("writer_stopped", "the writer thread has stopped"))
    if writer.failing:
        found.append(Problem("disk_failing", f"the disk tier fails: {plain(writer.last_error)}"))
    busy_s = now - (writer.busy_since_s or now)
    if busy_s > STALLED_S:
        found.append(_disk_stalled("a write to", busy_s))
    return found


def _loop_stalled(silent_s: float) -> Problem:
    silent = approximate_duration(int(silent_s))
    return Problem("loop_stalled", f"the loop has not turned for {silent}")


def _disk_stalled(what: str, taken_s: float) -> Problem:
    taken = approximate_duration(int(taken_s))
    return Problem("disk_stalled", f"{what} the disk takes {taken} already")


def _no_engine(engines: Sequence[Engine]) -> Problem:
    for engine in engines:
        missing = ", ".join(map(str, engine.missing_ranks[:8]))
        return Problem("no_engine", f"engine {plain(engine.name)} waits for rank {missing}")
    return Problem("no_engine", "no engine is registered")
