"""Asking before something is thrown away."""

from __future__ import annotations

import io

import pytest

from lmcache_persist.cli.confirm import confirmation
from lmcache_persist.errors import ConfigError


@pytest.mark.parametrize("answer", ["yes\n", "y\n", "YES", " Yes \n"])
def test_a_yes_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    """The losses are shown on stderr, and a yes in any case is one."""
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    confirmation("reset", yes=False)(["this throws away a\x1bb"])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "this throws away a" in shown.err
    assert "\x1b" not in shown.err


@pytest.mark.parametrize("answer", ["", "\n", "no\n", "yess\n", "nyes\n"])
def test_anything_else_is_a_no(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """Nobody there, an empty line, or another word: refused."""
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    with pytest.raises(ConfigError, match="nothing was changed"):
        confirmation("reset", yes=False)(["x"])


def test_yes_beforehand_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --yes stdin is not read."""
    monkeypatch.setattr("sys.stdin", None)
    confirmation("reset", yes=True)(["x"])
