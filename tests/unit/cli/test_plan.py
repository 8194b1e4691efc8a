"""``plan``: right numbers, each refusal with its own error, nothing heavy imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lmcache_persist.cli import main


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, object], str]:
    """Exit code, JSON document and talk of ``plan ... --json``."""
    code = main(["plan", *args, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


@pytest.mark.parametrize(
    ("args", "alignment", "chunk_size"),
    [
        (["544", "64", "--base", "1024"], 1088, 1088),
        (["640", "0", "640", "640", "640", "640"], 640, 640),
        (["640,0,640", "640"], 640, 640),
        (["400"], 400, 400),
        (["400", "--base", "1024"], 400, 1200),
        (["--base", "1024", "544"], 544, 1088),
        (["544"], 544, 544),
        (["16"], 16, 256),
    ],
)
def test_a_geometry_gets_its_alignment_and_chunk_size(
    capsys: pytest.CaptureFixture[str], args: list[str], alignment: int, chunk_size: int
) -> None:
    """The document has exactly the documented keys, and the right numbers."""
    code, document, _ = run(capsys, *args)
    assert code == 0
    assert document == {
        "required_alignment": alignment,
        "chunk_size": chunk_size,
        "warnings": [],
    }


@pytest.mark.parametrize(
    ("args", "error", "found"),
    [
        (["0", "0"], "no_cacheable_group", "none of 2 groups"),
        ([], "no_cacheable_group", "no group is given"),
        (["-16"], "invalid_tokens_per_block", "-16"),
        (["640", "-16"], "invalid_tokens_per_block", "-16"),
        (["16.5"], "invalid_tokens_per_block", "'16.5'"),
        (["sixteen"], "invalid_tokens_per_block", "'sixteen'"),
        (["true"], "invalid_tokens_per_block", "'true'"),
        (["640,,640"], "invalid_tokens_per_block", "''"),
        (["٣"], "invalid_tokens_per_block", "group 0"),
        (["9" * 5000], "invalid_tokens_per_block", "group 0"),
        (["1000003", "1000033", "1000037", "1000039"], "alignment_too_large", "16384"),
        (["640", "--base", "0"], "config", "--base"),
        (["640", "--base", "16.5"], "config", "--base"),
        (["640", "--max-chunk-size", "-1"], "config", "--max-chunk-size"),
        (["640", "--bsae", "1"], "usage", "--bsae"),
        (["16"] * 65, "unsupported_group", "65 groups"),
    ],
)
def test_each_refusal_has_its_own_error_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], args: list[str], error: str, found: str
) -> None:
    """A refusal is a document with code, message and hint, and talk on stderr."""
    code, document, talk = run(capsys, *args)
    assert code == 2
    assert set(document) == {"error"}
    reply = document["error"]
    assert isinstance(reply, dict)
    assert set(reply) == {"code", "message", "hint"}
    assert reply["code"] == error
    assert found in reply["message"]
    assert error in talk


def test_a_coarse_alignment_warns(capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes with little in common are served, and said to be a poor choice."""
    code, document, _ = run(capsys, "96", "100", "7")
    assert code == 2  # 16800 is above the maximum
    code, document, _ = run(capsys, "96", "100", "7", "--max-chunk-size", "20000")
    assert code == 0
    assert document["chunk_size"] == 16800
    assert document["warnings"]


def test_text_has_results_on_stdout_and_talk_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """For people: numbers on stdout, warnings on stderr."""
    assert main(["plan", "96", "100", "7", "--max-chunk-size", "20000"]) == 0
    captured = capsys.readouterr()
    assert "chunk size: 16800 tokens" in captured.out
    assert captured.err.startswith("warning:")


def test_plan_imports_nothing_heavy() -> None:
    """It starts at once because storage, sockets and engines stay out."""
    script = (
        "import sys; from lmcache_persist.cli import main; main(['plan', '544']);"
        "bad = {'sqlalchemy', 'alembic', 'lmdb', 'zmq', 'torch', 'vllm', 'yaml', 'blake3',"
        " 'msgspec', 'prometheus_client'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
