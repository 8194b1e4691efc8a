"""Failpoints: what each action does, and that a misspelt one is no silence."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_persist import failpoints
from lmcache_persist.errors import ConfigError

POINT = "commit.before_write"


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    yield
    failpoints.configure("")


@pytest.mark.parametrize(
    "spec",
    [
        "nowhere=kill",
        f"{POINT}=sleep",
        f"{POINT}=kill@x",
        f"{POINT}=kill:/file",
        f"{POINT}=error:/file@1",
        f"{POINT}=@1",
        POINT,
    ],
)
def test_what_is_unknown_is_refused(spec: str) -> None:
    """A test never waits for a point that is not there."""
    with pytest.raises(ConfigError, match="unknown"):
        failpoints.configure(spec)
    failpoints.hit(POINT)


def test_an_error_comes_at_its_pass_only() -> None:
    """The second of three passes fails."""
    failpoints.configure(f"{POINT}=error@2")
    failpoints.hit(POINT)
    with pytest.raises(OSError, match=POINT):
        failpoints.hit(POINT)
    failpoints.hit(POINT)


def test_a_pause_ends_when_its_file_is_there(tmp_path: Path) -> None:
    """The thread is held, others pass other points, and the file lets it go."""
    file = tmp_path / "go"
    failpoints.configure(f"{POINT}=pause:{file}@1")
    thread = threading.Thread(target=failpoints.hit, args=(POINT,))
    thread.start()
    failpoints.hit("commit.after_sync")
    thread.join(0.1)
    assert thread.is_alive()
    file.touch()
    thread.join(10)
    assert not thread.is_alive()
    failpoints.hit(POINT)


def test_a_pause_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody lets it go, and it ends all the same."""
    monkeypatch.setattr(failpoints, "MAX_PAUSE_S", 0.05)
    failpoints.configure(f"{POINT}=pause")
    failpoints.hit(POINT)
