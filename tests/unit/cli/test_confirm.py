"""Asking before something is thrown away."""

from __future__ import annotations

import io

import pytest

from lmcache_persist.cli.confirm import confirmation
from lmcache_persist.errors import ConfigError
from support.terminals import Interrupted, Terminal


@pytest.mark.parametrize("answer", ["yes\n", "YES", " Yes \n"])
def test_a_yes_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    """The losses are shown on stderr, and a yes in any case is one."""
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    confirmation("reset", yes=False)(["this throws away a\x1bb"])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "this throws away a" in shown.err
    assert "\x1b" not in shown.err


@pytest.mark.parametrize(
    "answer", ["", "\n", "no\n", "y\n", "Y\n", "ye\n", "yess\n", "yes yes\n", "nyes\n"]
)
def test_anything_else_is_a_no(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """Nobody there, an empty line, or another word: refused."""
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    with pytest.raises(ConfigError, match="nothing was changed"):
        confirmation("reset", yes=False)(["x"])


def test_ctrl_c_is_a_no(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted at the question, it says that nothing was changed."""
    monkeypatch.setattr("sys.stdin", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        confirmation("reset", yes=False)(["x"])
    assert capsys.readouterr().err.endswith("\ninterrupted: nothing was changed\n")


def test_yes_beforehand_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --yes stdin is not read."""
    monkeypatch.setattr("sys.stdin", None)
    confirmation("reset", yes=True)(["x"])


@pytest.mark.parametrize("stdin", [io.StringIO("yes\n"), None])
def test_a_script_has_to_say_yes_beforehand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stdin: io.StringIO | None
) -> None:
    """Without a terminal nothing is read and nothing happens; what would be lost is said."""
    monkeypatch.setattr("sys.stdin", stdin)
    with pytest.raises(ConfigError, match="no terminal"):
        confirmation("reset", yes=False)(["this throws away x"])
    assert "this throws away x" in capsys.readouterr().err
    assert stdin is None or stdin.tell() == 0
