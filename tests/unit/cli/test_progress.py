"""The progress line: right numbers, on a terminal only, never in the way of a result."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from lmcache_persist.cli.progress import ProgressLine, texts

MIB = 1 << 20


def test_the_line_has_share_rate_and_time_left() -> None:
    """A quarter of 4 GiB at 512 MiB a second: 6 s to go."""
    assert texts("verify", 1024 * MIB, 4096 * MIB, 512.0 * MIB)[0] == (
        "verify: [######                  ]  25 % 1.00 GiB of 4.00 GiB, 512.00 MiB/s, 6 s left"
    )


@pytest.mark.parametrize("rate", [None, 0.0, 1.0])
def test_nothing_is_divided_by_zero(rate: float | None) -> None:
    """No rate, nothing known, more done than there was: a line all the same."""
    assert "s left" not in texts("x", 100, 100, rate)[0]
    assert texts("x", 1, None, rate, "note")[0].endswith(", note")
    assert texts("x", 0, None, rate, "note") == ["x: note"]
    assert all("100 %" in text for text in texts("x", 300, 100, rate))


def test_the_rate_is_of_the_reading_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was done before it was known how much there is does not count for the time left."""
    now = [0.0]
    said: list[str] = []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(ProgressLine, "due", True)
    monkeypatch.setattr(ProgressLine, "show", lambda _, *texts: said.append(texts[0]))
    progress = ProgressLine("verify")
    progress.update(0, None, "the trees first")
    now[0] = 1000.0
    progress.update(MIB, 11 * MIB)
    now[0] = 1001.0
    progress.update(2 * MIB, 11 * MIB)
    assert said[0] == "verify: the trees first"
    assert said[1].endswith(" -, ...")
    assert said[2].endswith(" 1.00 MiB/s, 9 s left")


def test_nothing_is_drawn_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Stderr of a script stays free of it."""
    progress = ProgressLine("verify")
    progress.update(1, 2)
    progress.clear()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_sees_it_and_stdout_does_not() -> None:
    """Drawn on stderr, no wider than it, wiped before a result is written."""
    script = (
        "from lmcache_persist.cli.progress import ProgressLine; import sys\n"
        "progress = ProgressLine('verify'); progress.update(1, 2, 'x' * 500); progress.clear()\n"
        "sys.stdout.write('result')"
    )
    master, slave = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=slave,
            timeout=60,
            check=True,
            env={**os.environ, "COLUMNS": "60", "TERM": "xterm"},
        )
        os.close(slave)
        drawn = os.read(master, 65536).decode()
    finally:
        os.close(master)
    assert done.stdout == b"result"
    _, text, rest = drawn.split("\r\x1b[K")
    assert text.startswith("verify:  50 %, ")
    assert "xxx" not in text
    assert len(text) < 60
    assert rest == ""
