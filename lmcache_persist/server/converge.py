"""Agreeing with another server on the chunk size (design section 4, rules 1 and 8).

While this server is unbound it asks the first one again and again, so that it is bound
soon after the first one is, whoever bound that. From then on both are facts about two
disks: they are compared, and a difference is said, never mended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from lmcache_persist.binding import Binding
from lmcache_persist.errors import BindingMismatch, PersistError
from lmcache_persist.printable import command
from lmcache_persist.server.state import ServerState

if TYPE_CHECKING:
    from pathlib import Path

    from lmcache_persist.server.upstream import Seen, Upstream

log = logging.getLogger(__name__)

START_WAIT_S = 2.0
"""Seconds that a start waits for the first server's answer; without one it starts unbound."""
ASK_S = 0.25
"""Seconds between two questions while unbound."""
COMPARE_S = 5.0
"""Seconds between two comparisons while bound."""


def check_agrees(
    upstream: Upstream, seen: Seen | None, binding: Binding | None, data_dir: Path
) -> None:
    """Refuse a start whose data dir is bound to other boundaries than the first server.

    Raises:
        BindingMismatch: names both.
    """
    if binding is None or seen is None or seen.boundary_id in (None, binding.boundary_id):
        return
    raise disagreement(upstream, seen, binding, data_dir)


def disagreement(
    upstream: Upstream, seen: Seen, binding: Binding, data_dir: Path
) -> BindingMismatch:
    """The error that names both servers' boundaries."""
    return BindingMismatch(
        _difference(upstream, seen, binding),
        hint="start without --chunk-size-from, or give up what is stored here with:"
        f" {command('rebind', data_dir, '--chunk-size', seen.chunk_size)}",
        found=binding.chunk_size,
        expected=seen.chunk_size,
    )


def _difference(upstream: Upstream, seen: Seen, binding: Binding) -> str:
    return (
        f"this data dir is bound to chunk size {binding.chunk_size} (boundary"
        f" {binding.boundary_id[:12]}), server {upstream.url} to {seen.chunk_size}"
        f" (boundary {str(seen.boundary_id)[:12]}), expected the same (--chunk-size-from)"
    )


class Converger:
    """Keeps asking the first server.

    Args:
        state: this server's.
        upstream: the first one.
        adopt: binds this server to a size of the first one.

    Threads: the loop.
    """

    def __init__(
        self, state: ServerState, upstream: Upstream, adopt: Callable[[int], None]
    ) -> None:
        self._state, self._upstream, self._adopt = state, upstream, adopt
        self._seen: Seen | None = None
        self._trouble = ""
        self._agrees: bool | None = None
        self._ask()

    def stats(self) -> dict[str, Any]:
        """For ``stats``: what is known of the first server. Threads: any."""
        seen = self._seen
        return {
            "endpoint": self._upstream.url,
            "chunk_size": seen.chunk_size if seen else None,
            "agrees": self._agrees,
            "trouble": self._trouble or None,
        }

    @property
    def disagreement(self) -> str:
        """How the first server's boundaries differ from this one's; empty if they do not."""
        return self._trouble if self._agrees is False else ""

    def _ask(self) -> None:
        self._state.run(self._upstream.executor, self._upstream.look, self._heard)

    def _heard(self, done: Future[Seen]) -> None:
        if done.cancelled():
            return  # this server stops
        seen: Seen | None = None
        try:
            seen = done.result()
            self._judge(seen)
        except PersistError as error:
            self._say(error.message)
        except Exception as error:
            # A defect of ours; the loop counts and logs it with its trace.
            self._say(f"server {self._upstream.url} cannot be compared with: {error!r}")
            raise
        finally:
            # Whatever came of it: one bad answer must not be the end of all questions.
            self._seen = seen
            delay_s = ASK_S if self._state.binding is None else COMPARE_S
            self._state.timers.call_in(delay_s, self._ask)

    def _judge(self, seen: Seen) -> None:
        binding = self._state.binding
        if seen.chunk_size is None:
            self._agrees = None
            self._say("")
        elif binding is None:
            try:
                self._adopt(seen.chunk_size)
            except PersistError as error:
                self._say(str(error))
        else:
            self._agrees = seen.boundary_id == binding.boundary_id
            self._say("" if self._agrees else _difference(self._upstream, seen, binding))

    def _say(self, trouble: str) -> None:
        """Log a change, not every question."""
        if trouble and trouble != self._trouble:
            log.warning("%s", trouble)
        elif self._trouble and not trouble:
            log.info("server %s answers and agrees, as far as it is bound", self._upstream.url)
        self._trouble = trouble
