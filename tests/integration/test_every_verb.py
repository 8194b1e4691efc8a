"""What holds for every verb of the program, those that come later included.

The verbs and their parameters are read from the program itself, so that a new one is tried
without being named here.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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


def verbs(group: typer.Typer = app, *path: str) -> Iterator[tuple[tuple[str, ...], object]]:
    """Every command with the words that call it, those of sub-programs, too."""
    for info in group.registered_commands:
        if info.callback is not None:
            name = info.name or info.callback.__name__.replace("_", "-")
            yield (*path, name), info.callback
    for nested in group.registered_groups:
        if nested.typer_instance is not None:
            yield from verbs(nested.typer_instance, *path, str(nested.name))


VERBS = dict(verbs())
NAMES = [" ".join(path) for path in VERBS]


def parameters(verb: str) -> dict[str, inspect.Parameter]:
    """A verb's parameters by name."""
    callback = VERBS[tuple(verb.split())]
    return dict(inspect.signature(callback).parameters)  # type: ignore[arg-type]


def takes_folder(verb: str) -> bool:
    """Whether its argument is a data dir."""
    return "data_dir" in parameters(verb)


def flags(verb: str) -> list[str]:
    """What a verb needs beside a data dir, by which it asks nobody."""
    found = ["--yes"] if "yes" in parameters(verb) else []
    for name, parameter in parameters(verb).items():
        if parameter.default is inspect.Parameter.empty and name not in ("data_dir", "sizes"):
            found += [f"--{name.replace('_', '-')}", VALUES.get(name, "640")]
    if "timeout" in parameters(verb):
        found += ["--timeout", "0.3"]
    if "json_output" in parameters(verb):
        found.append("--json")
    return found


VALUES = {"server": UNREACHABLE, "groups": "64", "chunk_size": "640"}
"""Of options that must be given."""


def call(verb: str, folder: Path) -> list[str]:
    """The words that call a verb on a folder, or at a server that is not there."""
    words = verb.split()
    if takes_folder(verb):
        words += ["--data-dir", str(folder)] if verb == "serve" else [str(folder)]
    if "sizes" in parameters(verb):
        words.append("0")
    return [*words, *flags(verb)]


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


@pytest.mark.parametrize("verb", [name for name in NAMES if takes_folder(name) and name != "serve"])
def test_no_folder_makes_a_traceback(verb: str, root: Path) -> None:
    """Whatever lies in a data dir's place: one error with its code, nothing made."""
    for what, folder in broken_folders(root).items():
        before = set(root.rglob("*"))
        code, out, err = quiet(*call(verb, folder))
        # verify tells of bad data, and reset throws away what nobody can read.
        assert code in {2, 3, 5, 6} | DONE.get(verb, set()), (what, code, err)
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


@pytest.mark.parametrize("verb", [name for name in NAMES if "server" in parameters(name)])
def test_no_server_is_said_and_has_its_code(verb: str, root: Path) -> None:
    """Nobody at the endpoint, within the time that was given: exit code 4."""
    code, _, err = quiet(*call(verb, root))
    assert code == ExitCode.NO_SERVER, err
    assert "Traceback" not in err


@pytest.mark.parametrize("verb", NAMES)
def test_help_explains_every_flag(verb: str) -> None:
    """Every verb has a help with an example that begins as it is called, and all flags."""
    code, out, err = quiet(*verb.split(), "--help")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert f"Example: lmcache-persist {verb}" in text
    for name in parameters(verb):
        if name not in ("data_dir", "sizes") or verb == "serve":
            assert f"--{name.removesuffix('_output').replace('_', '-')}" in text


WITHOUT_READER = """
import json, os, sys
from lmcache_persist.cli import main
import lmcache_persist.connector, lmcache_persist.server.app  # once for all children
ends = []
for words in json.loads(sys.argv[1]):
    print("verb", *words[:1], file=sys.stderr, flush=True)
    child = os.fork()
    if child == 0:  # from here on a process like any other, with its own end
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
        sys.exit(main(words))
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(ends))
"""


def test_a_reader_that_goes_away_is_no_traceback(root: Path) -> None:
    """With nobody behind stdout every verb ends quietly, whatever it was about to say."""
    (root / "empty").mkdir()
    calls = [
        [*verb.split(), "--help"] if verb in LONG_LIVED else call(verb, root / "empty")
        for verb in NAMES
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_READER, json.dumps(calls)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    ends = json.loads(done.stdout)
    found = dict(zip(NAMES, ends, strict=True))
    assert set(ends) <= set(ExitCode), found
    assert {found[verb] for verb in LONG_LIVED} == {ExitCode.BROKEN_PIPE}


def test_the_walk_finds_verbs_of_every_kind() -> None:
    """The tests above try something: folders, servers, neither."""
    assert len(NAMES) >= 10
    assert sum(map(takes_folder, NAMES)) >= 5
    assert any("server" in parameters(name) for name in NAMES)
