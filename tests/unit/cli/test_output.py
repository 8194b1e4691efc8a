"""How verbs end: exit codes, no tracebacks, readers that go away, hostile names."""

from __future__ import annotations

import inspect as python_inspect
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable

import pytest
import typer

from lmcache_persist.cli import main, output
from lmcache_persist.cli.app import app
from lmcache_persist.cli.exit_codes import ExitCode, exit_code_of
from lmcache_persist.config import SETTINGS
from lmcache_persist.errors import ERRORS_BY_CODE, PersistError

VERBS = sorted(typer.main.get_command(app).commands)
GROUPS = {
    "config": 2,
    "usage": 2,
    "geometry": 2,
    "alignment_too_large": 2,
    "binding": 3,
    "stale": 3,
    "registration": 3,
    "transport": 4,
    "request_timeout": 4,
    "startup_refused": 5,
    "data_dir_locked": 5,
    "manifest_unreadable": 5,
    "object_corrupt": 1,
    "store_damaged": 6,
    "manifest_busy": 6,
    "malformed_message": 6,
    "internal": 6,
}


@pytest.mark.parametrize(("code", "status"), GROUPS.items())
def test_each_kind_of_error_has_its_exit_code(code: str, status: int) -> None:
    """Scripts may rely on the numbers."""
    assert exit_code_of(ERRORS_BY_CODE[code]("x")) == status


@pytest.mark.parametrize("verb", [*VERBS, None])
def test_help_works_everywhere_and_has_an_example(
    verb: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every verb explains itself, with a command to copy."""
    assert main([verb, "--help"] if verb else ["--help"]) == 0
    text = capsys.readouterr().out
    assert "Usage: lmcache-persist" in text
    if verb is not None:
        assert f"Example: lmcache-persist {verb}" in " ".join(text.split())


def test_every_setting_is_a_flag_of_serve_and_the_other_way_round() -> None:
    """Neither a setting without a flag nor a flag that is no setting."""
    [serve] = [
        info.callback for info in app.registered_commands if info.callback.__name__ == "serve"
    ]  # type: ignore[union-attr]
    assert serve is not None
    flags = set(python_inspect.signature(serve).parameters)
    assert flags == {setting.name for setting in SETTINGS} | {"config"}


def ended(function: Callable[[], int], **kwargs: object) -> int:
    """The exit code that a verb with this body ends with."""

    def verb(json_output: bool = False) -> int:
        return function()

    with pytest.raises(typer.Exit) as caught:
        output.ending(verb)(**kwargs)  # type: ignore[arg-type]
    return int(caught.value.exit_code)


@pytest.mark.parametrize("code", sorted(ERRORS_BY_CODE))
def test_no_error_of_ours_ends_in_a_traceback(
    code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every class is message, code and hint on stderr, and a document with --json."""

    def fails() -> int:
        raise ERRORS_BY_CODE[code]("what was found", hint="the way out")

    assert ended(fails, json_output=True) == exit_code_of(ERRORS_BY_CODE[code]("x"))
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "error": {"code": code, "message": "what was found", "hint": "the way out"}
    }
    assert captured.err == f"error: what was found [{code}]\nhint: the way out\n"


def test_interrupt_and_broken_pipe_have_their_codes() -> None:
    """Ctrl-C and a closed pipe are no tracebacks either."""

    def interrupted() -> int:
        raise KeyboardInterrupt

    def unread() -> int:
        raise BrokenPipeError

    assert ended(interrupted) == ExitCode.INTERRUPTED
    assert ended(unread) == ExitCode.BROKEN_PIPE


def test_a_defect_still_shows_its_traceback() -> None:
    """What is no refusal of ours is a defect and must not be hidden."""

    def broken() -> int:
        raise RuntimeError("defect")

    with pytest.raises(RuntimeError):
        output.ending(broken)()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain name", "plain name"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("two\nlines\ttab", "two\\nlines\\ttab"),
        ("\udcff", "\\udcff"),
        ("\u202eright to left", "\\u202eright to left"),
        ("größe 模型", "größe 模型"),
    ],
)
def test_names_cannot_steer_the_terminal(text: str, shown: str) -> None:
    """Only printable characters reach the terminal as they are."""
    assert output.plain(text) == shown


def test_tables_are_tab_separated_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Piped tables can be cut and sorted, and markup in names is text."""
    output.write_table("things", ("name", "count"), [("[red]a\tb", 1)])
    assert capsys.readouterr().out == "# things\nname\tcount\n[red]a\\tb\t1\n"


def test_tables_are_drawn_on_a_terminal() -> None:
    """On a terminal the same table has its columns aligned, and markup is still text."""
    script = (
        "from lmcache_persist.cli import output;"
        "output.write_table('things', ('name', 'count'), [('[red]a', 1)])"
    )
    master, slave = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=slave, timeout=60, check=False, env=environment()
        )
        os.close(slave)
        text = os.read(master, 65536).decode()
    finally:
        os.close(master)
    assert done.returncode == 0
    assert "name    count" in text
    assert "[red]a      1\r\n" in text


def environment(**more: str) -> dict[str, str]:
    """The environment of a child."""
    return {**os.environ, "TERM": "xterm", "COLUMNS": "80", **more}


MANY_LINES = (
    "import sys, typer; from lmcache_persist.cli import output, app\n"
    "@output.ending\n"
    "def many() -> int:\n"
    "    for number in range(200000): output.write(str(number))\n"
    "    return 0\n"
    "app.app.command()(many)\n"
    "sys.exit(app.main(['many']))\n"
)


def test_a_reader_that_goes_away_ends_a_verb_quietly() -> None:
    """``| head`` gets its lines; there is no traceback and no complaint at exit."""
    process = subprocess.Popen(
        [sys.executable, "-c", MANY_LINES], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"0\n"
    process.stdout.close()
    talk = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == ExitCode.BROKEN_PIPE
    assert talk == b""


def test_a_reader_that_was_never_there_ends_a_verb_quietly() -> None:
    """A short result that is only written at the end meets the closed pipe there."""
    reader, writer = os.pipe()
    os.close(reader)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "lmcache_persist.cli", "plan", "544"],
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
            env=env,
        )
    finally:
        os.close(writer)
    assert done.returncode == ExitCode.BROKEN_PIPE
    assert done.stderr == b""


def test_a_full_disk_behind_stdout_is_an_error() -> None:
    """A result that could not be written is never reported as a success."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lmcache_persist.cli", "plan", "544"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == ExitCode.FAILED
    assert done.stderr == "error: stdout cannot be written: No space left on device [output]\n"


def test_a_terminal_without_unicode_gets_escapes() -> None:
    """An encoding that lacks a character is no reason to fail."""
    script = "import sys; from lmcache_persist.cli import main; sys.exit(main(['plan', '模型']))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        timeout=60,
        check=False,
        env=environment(PYTHONIOENCODING="ascii", PYTHONUTF8="0"),
    )
    assert done.returncode == 2
    assert b"\\u6a21" in done.stderr
    assert b"Traceback" not in done.stderr


def test_the_module_runs_like_the_program() -> None:
    """``python -m lmcache_persist.cli`` is the same program with the same exit codes."""
    done = subprocess.run(
        [sys.executable, "-m", "lmcache_persist.cli", "plan", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "no_cacheable_group" in done.stderr


def test_every_error_is_a_persist_error() -> None:
    """The table of exit codes covers the whole tree."""
    for cls in ERRORS_BY_CODE.values():
        assert issubclass(cls, PersistError)
        assert exit_code_of(cls("x")) != ExitCode.OK
