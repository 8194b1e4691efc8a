"""``inspect`` and ``top`` at real terminals of several sizes, beside a real server."""

from __future__ import annotations

import contextlib
import sys

import pytest
from rich.cells import cell_len

from support.emulated import EmulatedEngine
from support.screens import Window, without_sequences
from support.server import ServerProcess

PROGRAM = [sys.executable, "-m", "lmcache_persist.cli"]
NAMES = ("Qwen/Qwen3-Next-80B-A3B-Instruct-FP8-with-a-very-long-name", "模型/größe\x1b[2J", "m")


def filled(server: ServerProcess) -> contextlib.ExitStack:
    """Three models with objects, as long as it is open."""
    stack = contextlib.ExitStack()
    for number, name in enumerate(NAMES):
        engine = stack.enter_context(
            EmulatedEngine(
                server.url,
                [64],
                object_bytes=4096,
                name=f"host-{number}.example.com-{name}",
                changes={"model": name},
            )
        ).join(base=64)
        engine.store(engine.hashes(list(range(641))))
        engine.client.flush()
    return stack


def frames(drawn: str) -> list[list[str]]:
    """What ``top`` drew, screen after screen, as lines."""
    screens = drawn.split("\x1b[?1049h", 1)[-1].split("\x1b[?1049l", 1)[0].split("\x1b[H")
    return [without_sequences(one).replace("\r", "").splitlines() for one in screens if one]


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_inspect_at_a_terminal_of_any_width(server: ServerProcess, columns: int) -> None:
    """The state first, every line within the terminal, all models, no escape of a name's own."""
    with filled(server):
        window = Window([*PROGRAM, "inspect", str(server.data_dir)], columns, 24)
        assert window.wait() == 0
    assert "\x1b[2J" not in window.drawn
    lines = without_sequences(window.drawn).replace("\r", "").splitlines()
    assert lines[0] == "state"
    assert "runs, ready" in " ".join(lines[1:3])
    assert [line for line in lines if cell_len(line) > columns] == []
    assert [line for line in lines if line.split()[:1] == ["m"]] != []


def test_top_follows_a_terminal_that_is_resized(server: ServerProcess) -> None:
    """Drawn anew at once, within the new size, long before the next interval; then Ctrl-C."""
    with filled(server):
        args = ["top", str(server.data_dir), "--interval", "8"]
        window = Window([*PROGRAM, *args], 80, 24)
        window.read_until(lambda drawn: "hit rate" in drawn)
        wide = frames(window.drawn)[-1]
        assert max(map(cell_len, wide)) <= 80
        assert sum("…" in line for line in wide) >= 2  # names, shortened
        seen = len(window.drawn)
        window.resize(40, 10)
        window.read_until(lambda drawn: "hit rate" in drawn[seen:])
        narrow = frames(window.drawn[seen:])[-1]
        assert len(narrow) <= 10
        assert max(map(cell_len, narrow)) <= 40
        assert narrow[0].split()[-1] == wide[0].split()[-1], "the same interval, drawn anew"
        window.type("\x03")
        assert window.wait() == 130
    assert "Traceback" not in window.drawn
    assert window.drawn.rstrip("\r\n").endswith("\x1b[?1049l")
