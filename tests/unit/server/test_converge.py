"""Asking the first server again and again, with stand-ins for both servers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from lmcache_persist import hashing
from lmcache_persist.errors import ServerUnreachable
from lmcache_persist.protocol import Bind
from lmcache_persist.server.converge import ASK_S, COMPARE_S, Converger
from lmcache_persist.server.state import ServerState
from lmcache_persist.server.upstream import Seen, Upstream
from store_support import binding


class First:
    """The first server: answers what it is told to."""

    url = "ipc:///first"
    executor = None

    def __init__(self) -> None:
        self.says: Seen | Exception = Seen(None, None)

    def look(self) -> Seen:
        """The answer, or the error."""
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


class Turns:
    """This server: its work is done at once, its timers when told to."""

    def __init__(self) -> None:
        self.timers = self
        self.binding = binding()
        self.due: list[tuple[float, Callable[[], None]]] = []

    def call_in(self, delay_s: float, action: Callable[[], None]) -> None:
        """Note a timer."""
        self.due.append((delay_s, action))

    def run(
        self,
        executor: ThreadPoolExecutor | None,
        work: Callable[[], Any],
        then: Callable[[Future[Any]], None],
    ) -> None:
        """Do it now."""
        done: Future[Any] = Future()
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001 - as an executor does
            done.set_exception(error)
        then(done)

    def turn(self) -> float:
        """Run the one timer there is; its delay."""
        [(delay_s, action)], self.due = self.due, []
        action()
        return delay_s


def converger(
    first: First, turns: Turns, adopt: Callable[[int], None] = lambda size: None
) -> Converger:
    """One between the two stand-ins."""
    return Converger(cast(ServerState, turns), cast(Upstream, first), adopt)


AGREES = Seen(640, hashing.boundary_id(640))


@pytest.mark.parametrize("error", [ZeroDivisionError("a defect"), OSError(24, "too many files")])
def test_no_error_is_the_last_question(error: Exception) -> None:
    """Whatever an answer leads to, it is raised, said in ``stats``, and asked again after."""
    first, turns = First(), Turns()
    first.says = AGREES
    asking = converger(first, turns)
    assert asking.stats()["agrees"] is True
    first.says = error
    with pytest.raises(type(error)):
        turns.turn()
    assert asking.stats()["chunk_size"] is None
    assert type(error).__name__ in asking.stats()["trouble"]
    first.says = AGREES
    assert turns.turn() == COMPARE_S
    assert asking.stats()["trouble"] is None
    assert asking.stats()["chunk_size"] == 640


def test_a_size_that_cannot_be_taken_is_asked_for_again() -> None:
    """Unbound, a defect while adopting the first server's size does not end the questions."""
    first, turns = First(), Turns()
    turns.binding = None  # type: ignore[assignment]
    asked: list[int] = []

    def adopt(size: int) -> None:
        asked.append(size)
        if len(asked) == 1:
            raise RuntimeError("a defect")

    asking = converger(first, turns, adopt)
    first.says = AGREES
    with pytest.raises(RuntimeError, match="a defect"):
        turns.turn()
    assert turns.turn() == ASK_S
    assert asked == [640, 640]
    assert "a defect" in asking.stats()["trouble"]


def test_an_absent_first_server_is_told_from_a_silent_one(tmp_path: Path) -> None:
    """Whoever is refused because of it reads what is in the way."""
    first = Upstream(f"ipc://{tmp_path}/nope.sock", "second", "b" * 32)
    try:
        assert first.wait(0.05) is None
        with pytest.raises(ServerUnreachable, match=r"gives no answer: no socket there \("):
            first.look()
        with pytest.raises(ServerUnreachable, match=r"gives no answer: no socket there \("):
            first.pass_on(Bind(boot="", session="", binding="", groups=[]))
    finally:
        first.close()


def test_a_silent_server_is_no_defect() -> None:
    """It is said and asked again; nothing is raised."""
    first, turns = First(), Turns()
    first.says = ServerUnreachable("server ipc:///first gives no answer")
    asking = converger(first, turns)
    assert "no answer" in asking.stats()["trouble"]
    first.says = AGREES
    turns.turn()
    assert asking.stats()["trouble"] is None
