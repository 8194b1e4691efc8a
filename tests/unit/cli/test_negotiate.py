"""``negotiate`` and ``flush`` before any server is asked."""

from __future__ import annotations

import json

import pytest

from lmcache_persist.cli import main
from lmcache_persist.cli.negotiate import parse_groups
from lmcache_persist.errors import InvalidTokensPerBlock
from lmcache_persist.geometry import Group, GroupKind

NOBODY = "ipc:///nobody/is/here.sock"


def test_groups_are_full_or_scratch() -> None:
    """A number is a full group of that size, 0 one that takes no part."""
    assert parse_groups("640, 0,16") == [
        Group(GroupKind.FULL, 640, 640),
        Group(GroupKind.SCRATCH, 0, 0),
        Group(GroupKind.FULL, 16, 16),
    ]
    assert parse_groups("") == []


def test_a_negative_number_is_left_to_the_server() -> None:
    """What a message can hold is judged in one place, by the server."""
    assert parse_groups("-16")[0].tokens_per_block == -16


@pytest.mark.parametrize("text", ["16.5", "x", "640,,640", "true", "9" * 40, "4294967296"])
def test_what_no_message_can_hold_is_refused_here(text: str) -> None:
    """No integer, or one beyond all bounds, never reaches the server."""
    with pytest.raises(InvalidTokensPerBlock):
        parse_groups(text)


@pytest.mark.parametrize(
    ("args", "status", "code", "outcome"),
    [
        (["--groups", "16.5"], 2, "invalid_tokens_per_block", "refused"),
        (["--groups", "16", "--base", "0"], 2, "invalid_tokens_per_block", "refused"),
        (["--groups", "16", "--timeout", "soon"], 2, "config", None),
        (["--groups", "16", "--timeout", "0.2"], 4, "server_unreachable", None),
    ],
)
def test_refusals_have_the_same_document_as_answers(
    args: list[str],
    status: int,
    code: str,
    outcome: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """outcome, binding and error are always there."""
    assert main(["negotiate", "--server", NOBODY, *args, "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"outcome", "required_alignment", "binding", "error"}
    assert document["outcome"] == outcome
    assert document["binding"] is None
    assert document["error"]["code"] == code


@pytest.mark.parametrize("verb", [["flush"], ["negotiate", "--groups", "16"]])
def test_without_a_server_the_hint_has_the_command_to_start_one(
    verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 4, and what to do."""
    assert main([*verb, "--server", NOBODY, "--timeout", "0.2"]) == 4
    assert "lmcache-persist serve" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["", "host", "udp://x:1", "ipc://relative", "tcp://h:99999"])
def test_what_is_no_endpoint_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad address is refused input, not a missing server."""
    assert main(["flush", "--server", url]) == 2
    assert "config" in capsys.readouterr().err
