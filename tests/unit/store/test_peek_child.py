"""The first look into a store may kill who looks: that is a child."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from lmcache_persist.errors import FormatTooNew, StoreDamaged, StoreIOError
from lmcache_persist.store.lmdb_disk import LmdbDisk
from lmcache_persist.store.offline import StorePeek, peek
from lmcache_persist.store.peek_child import peek_in_child
from store_support import MIB, UUID, binding, chunk
from support.mutilate import alter


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A closed store with a chunk."""
    disk = LmdbDisk.open(tmp_path / "store", 16 * MIB, uuid=UUID)
    disk.write_stamp(binding())
    disk.write([chunk(1)])
    disk.close()
    return tmp_path / "store"


def test_it_sees_what_a_look_sees(directory: Path) -> None:
    """All fields come through, the stamp included; no store is None."""
    found = peek_in_child(directory)
    assert found == peek(directory)
    assert found is not None
    assert (found.uuid, found.stamp, found.has_objects) == (UUID, binding(), True)
    assert peek_in_child(directory / "absent") is None


@pytest.mark.parametrize(
    ("name", "what"), [("lost counters", "counters"), ("broken totals", "totals")]
)
def test_what_must_be_mended_is_told(directory: Path, name: str, what: str) -> None:
    """Nothing can be written to such a store: who looks first is told, and knows whose it is."""
    alter(directory, name)
    found = peek(directory)
    assert found is not None
    assert what in found.unsound
    assert found.stamp == binding()


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS])
def test_a_death_is_damage(directory: Path, number: signal.Signals) -> None:
    """Whatever signal ends the child, the parent lives and knows."""

    def die(path: Path) -> NoReturn:
        os.kill(os.getpid(), number)
        raise AssertionError("still alive")

    with pytest.raises(StoreDamaged, match=f"signal {int(number)}"):
        peek_in_child(directory, look=die)


def test_a_look_without_an_end_is_damage(directory: Path) -> None:
    """A loop over broken pages is given up, and the child does not stay behind."""

    def loop(path: Path) -> NoReturn:
        while True:
            signal.pause()

    with pytest.raises(StoreDamaged, match="does not end"):
        peek_in_child(directory, timeout_s=0.2, look=loop)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize(
    "error",
    [
        FormatTooNew("the store has format 2", hint="start that version"),
        StoreDamaged("broken"),
        StoreIOError("cannot be read"),
    ],
)
def test_what_it_raises_comes_through(directory: Path, error: FormatTooNew) -> None:
    """Class, message and hint are those of the child's error."""

    def fail(path: Path) -> StorePeek | None:
        raise error

    with pytest.raises(type(error)) as caught:
        peek_in_child(directory, look=fail)
    assert (caught.value.message, caught.value.hint) == (error.message, error.hint)


def test_an_unexpected_error_is_damage(directory: Path) -> None:
    """Bytes that nobody thought of are no reason to end the start with a traceback."""

    def fail(path: Path) -> StorePeek | None:
        raise KeyError("what is this")

    with pytest.raises(StoreDamaged, match="unexpected error"):
        peek_in_child(directory, look=fail)
