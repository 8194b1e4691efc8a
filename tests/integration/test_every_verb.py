"""What holds for every verb of the program, those that come later included.

The verbs and their parameters are read from the program itself, so that a new one is tried
without being named here.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from lmcache_persist.cli.app import app
from lmcache_persist.cli.exit_codes import ExitCode
from support.verbs import quiet

UNREACHABLE = "ipc:///nonexistent/server.sock"
DONE = {"verify": {1}, "reset": {0}}
LOOKS_LIKE_ONE = ("a garbage manifest", "a folder as manifest", "a file as store")
LONG_LIVED = {"serve", "demo"}
"""Verbs that run on, or need an engine: tried with what they refuse."""


def verbs(group: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Every command with the words that call it, those of sub-programs, too."""
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from verbs(command, *path, name)
        else:
            yield " ".join((*path, name)), command


VERBS = dict(verbs(typer.main.get_command(app)))
NAMES = list(VERBS)


def arguments(verb: str) -> list[str]:
    """Names of the words that a verb takes."""
    return [one.name for one in VERBS[verb].params if one.param_type_name == "argument"]


def options(verb: str) -> dict[str, Any]:
    """Its options by name, without ``help``."""
    found = {one.name: one for one in VERBS[verb].params if one.param_type_name == "option"}
    found.pop("help", None)
    return found


def takes_folder(verb: str) -> bool:
    """Whether it is about a data dir."""
    return "data_dir" in arguments(verb)


VALUES = {
    "data_dir": "/nonexistent/data-dir",
    "server": UNREACHABLE,
    "groups": "64",
    "chunk_size": "640",
    "capacity": "64MiB",
    "sizes": "0",
    "timeout": "0.3",
}
"""Of what has to be given, or bounds the time."""


def call(verb: str, folder: Path, *, at_server: bool = False) -> list[str]:
    """The words that call a verb on a folder, or at a server that is not there."""
    words = verb.split()
    at_server = at_server or not takes_folder(verb)
    folders = itertools.chain([str(folder)], (str(folder.parent / f"made-{n}") for n in (1, 2)))
    words += [VALUES[name] if name == "sizes" else next(folders) for name in arguments(verb)]
    if at_server:
        words = words[: len(verb.split())] + [VALUES["sizes"]] * ("sizes" in arguments(verb))
    for name, option in options(verb).items():
        if name in ("yes", "json_output"):
            words.append(option.opts[0])
        elif option.required or name == "timeout" or (name == "server" and at_server):
            words += [option.opts[0], VALUES[name]]
    return words


def broken_folders(root: Path) -> dict[str, Path]:
    """Things that are no data dir, by what they are."""
    (root / "file").write_text("no folder")
    (root / "empty").mkdir()
    (root / "garbage").mkdir()
    (root / "garbage" / "manifest.sqlite").write_bytes(b"garbage" * 2000)
    (root / "folder").mkdir()
    (root / "folder" / "manifest.sqlite").mkdir()
    (root / "store").mkdir()
    (root / "store" / "store").write_text("a file in the place of the folder")
    (root / "loop").symlink_to(root / "loop")
    return {
        "nothing there": root / "nothing",
        "a file": root / "file",
        "below a file": root / "file" / "deeper",
        "an empty folder": root / "empty",
        "a garbage manifest": root / "garbage",
        "a folder as manifest": root / "folder",
        "a file as store": root / "store",
        "a loop of links": root / "loop",
        "a long name": root / ("x" * 300),
        "a name with a newline": root / "a\nb\x1b[31m",
    }


@pytest.mark.parametrize("verb", [name for name in NAMES if takes_folder(name)])
def test_no_folder_makes_a_traceback(verb: str, root: Path) -> None:
    """Whatever lies in a data dir's place: one error with its code, nothing made."""
    for what, folder in broken_folders(root).items():
        before = set(root.rglob("*"))
        code, out, err = quiet(*call(verb, folder))
        # verify tells of bad data, and reset throws away what nobody can read.
        assert code in {2, 3, 4, 5, 6} | DONE.get(verb, set()), (what, code, err)
        assert "Traceback" not in err, what
        assert err.count("error: ") == (code > ExitCode.BAD_DATA), (what, err)
        assert "\x1b" not in out + err, what
        made = {path.name for path in set(root.rglob("*")) - before}
        allowed = {"server.lock", "resetting"} if what in LOOKS_LIKE_ONE else set()
        assert made <= allowed, what


@pytest.mark.parametrize("verb", NAMES)
def test_no_odd_word_makes_a_traceback(verb: str) -> None:
    """Unknown flags and words too many are usage errors, exit code 2."""
    for words in (["--no-such-flag"], ["a", "b", "c", "\udcff", "--json"]):
        code, _, err = quiet(*verb.split(), *words)
        assert code == ExitCode.REFUSED_INPUT, err
        assert "Traceback" not in err


@pytest.mark.parametrize("verb", [name for name in NAMES if "server" in options(name)])
def test_no_server_is_said_and_has_its_code(verb: str, root: Path) -> None:
    """Nobody at the endpoint, within the time that was given: exit code 4."""
    code, _, err = quiet(*call(verb, root, at_server=True))
    assert code == ExitCode.NO_SERVER, err
    assert "Traceback" not in err


@pytest.mark.parametrize("verb", NAMES)
def test_help_explains_every_flag(verb: str) -> None:
    """Every verb has a help with an example that begins as it is called, and all flags."""
    code, out, err = quiet(*verb.split(), "--help")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert f"Example: lmcache-persist {verb}" in text
    for option in options(verb).values():
        assert option.opts[0] in text


WITHOUT_STDOUT = """
import json, os, sys
from lmcache_persist.cli import main
if sys.argv[2] == "servers":
    import lmcache_persist.connector, lmcache_persist.server.app  # once for all children
ends = []
for behind, *words in json.loads(sys.argv[1]):
    print("verb", *words[:1], file=sys.stderr, flush=True)
    child = os.fork()
    if child == 0:  # from here on a process like any other, with its own end
        if behind == "nobody":
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, 1)
        elif behind == "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        else:
            os.close(1)
            sys.stdout = None  # as it is in a program that is started so
        sys.exit(main(words))
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(ends))
"""


def ends_without_stdout(calls: list[list[str]], needs: str) -> tuple[list[int], str]:
    """Exit codes of calls, each behind the word for its stdout; what they said on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_STDOUT, json.dumps(calls), needs],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_reader_that_goes_away_is_no_traceback(root: Path) -> None:
    """With nobody behind stdout every verb ends quietly, whatever it was about to say."""
    (root / "empty").mkdir()
    calls = [
        [*verb.split(), "--help"] if verb in LONG_LIVED else call(verb, root / "empty")
        for verb in NAMES
    ]
    ends, _ = ends_without_stdout([["nobody", *words] for words in calls], "servers")
    found = dict(zip(NAMES, ends, strict=True))
    assert set(ends) <= set(ExitCode), found
    assert {found[verb] for verb in LONG_LIVED} == {ExitCode.BROKEN_PIPE}


def test_a_stdout_that_takes_nothing_is_an_error(root: Path) -> None:
    """Closed, or a full disk: what cannot be said ends every verb with 6, and with a reason."""
    calls = [["full", *words] for words in (["--help"], ["plan", "64"], ["--version"])]
    calls += [["closed", *verb.split(), "--help"] for verb in NAMES]
    calls += [["closed", "plan", "64", "--json"], ["closed", "inspect", str(root / "empty")]]
    ends, said = ends_without_stdout(calls, "nothing")
    # The last one has nothing to say but a refusal, which is said on stderr.
    assert ends == [ExitCode.FAILED] * (len(calls) - 1) + [ExitCode.DATA_DIR]
    assert said.count("error: stdout cannot be written: ") == len(calls) - 1
    assert said.count(" [output]") == len(calls) - 1


def test_the_walk_finds_verbs_of_every_kind() -> None:
    """The tests above try something: folders, servers, neither."""
    assert len(NAMES) >= 10
    assert sum(map(takes_folder, NAMES)) >= 5
    assert any("server" in options(name) for name in NAMES)
