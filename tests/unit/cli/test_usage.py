"""Words that do not fit: one refusal, with the nearest that would. Help, version, completion.

Verbs and parameters are read from the program, so that a new one is tried by itself.
"""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import typer

from lmcache_persist import __version__
from lmcache_persist.cli import usage
from lmcache_persist.cli.about import COMPLETE_VARIABLE, SHELLS
from lmcache_persist.cli.app import app
from lmcache_persist.config import SETTINGS, Settings
from support.verbs import quiet

PROGRAM = typer.main.get_command(app)
VERBS: dict[str, Any] = PROGRAM.commands  # type: ignore[attr-defined]
each_verb = pytest.mark.parametrize("verb", VERBS)


def params(verb: str, kind: str) -> list[Any]:
    """The arguments, or the options, of a verb."""
    return [one for one in VERBS[verb].params if one.param_type_name == kind]


def takes_any_number(verb: str) -> bool:
    """Whether no number of arguments is too many."""
    return any(one.nargs == -1 for one in params(verb, "argument"))


def refusal(*words: str) -> tuple[str, str]:
    """The message and the hint of a call that is refused for its words."""
    code, out, err = quiet(*words)
    assert (code, out) == (2, ""), (words, err)
    error, hint, *more = err.splitlines()
    assert more == [], err
    assert error.startswith("error: ") and error.endswith(" [usage]"), err
    assert hint.startswith("hint: "), err
    return error.removeprefix("error: ").removesuffix(" [usage]"), hint.removeprefix("hint: ")


def helps(verb: str) -> str:
    """The hint that names a verb's help."""
    return f"see lmcache-persist {verb} --help"


@each_verb
def test_a_misspelt_option_has_the_nearest_named(verb: str) -> None:
    """For every option of every verb; one that is like none has them all named."""
    for option in params(verb, "option"):
        for name in option.opts:
            found, hint = refusal(verb, name + "x")
            assert found == f"option '{name}x' is unknown, did you mean {name}?"
            assert hint == helps(verb)
    found, hint = refusal(verb, "--no-such-flag=1")
    assert found.startswith("option '--no-such-flag' is unknown, ")
    assert "--help" in found or "did you mean" in found
    assert hint == helps(verb)
    found, _ = refusal(verb, "-z")
    assert found.startswith("option '-z' is unknown, there are: ")


@pytest.mark.parametrize("verb", [name for name in VERBS if not takes_any_number(name)])
def test_a_word_too_many_is_named_with_what_fits(verb: str) -> None:
    """More words than a verb has arguments."""
    arguments = params(verb, "argument")
    needed = [word for one in params(verb, "option") if one.required for word in (one.opts[0], "1")]
    found, hint = refusal(verb, *needed, *["word"] * len(arguments), "one more")
    assert found.startswith(f"'one more' is too much, expected {verb} [OPTIONS]")
    assert all(one.metavar in found for one in arguments)
    way = f"a data dir is given as: lmcache-persist {verb} --data-dir 'one more'"
    has_option = any("--data-dir" in one.opts for one in params(verb, "option"))
    assert hint == (way if has_option else helps(verb))


def test_a_unit_on_its_own_is_told_where_it_belongs() -> None:
    """``--capacity 8 GiB``: the second word is no data dir."""
    _, hint = refusal("serve", "--capacity", "8", "GiB")
    assert hint == "a size is one word, without a blank: 8GiB"


def test_who_wants_to_stop_a_server_is_told_how() -> None:
    """There is no such verb, and none is near."""
    code, _, err = quiet("stop", "DIR")
    assert code == 2
    assert err.startswith("error: verb 'stop' is unknown [usage]\nhint: ")
    assert "SIGTERM" in err
    assert "did you mean" not in err


@each_verb
def test_a_word_that_is_missing_is_named(verb: str) -> None:
    """An argument or an option that a verb cannot do without."""
    required = [one for one in VERBS[verb].params if one.required]
    for number, param in enumerate(required):
        words: list[str] = []
        for one in required[:number]:
            words += [one.opts[0], "1"] if one.param_type_name == "option" else ["word"]
        found, hint = refusal(verb, *words)
        assert " is missing, expected " in found
        assert param.metavar in found
        assert hint == helps(verb)


@each_verb
def test_an_option_says_whether_it_has_a_value(verb: str) -> None:
    """A value that is not there, and one that may not be."""
    for option in params(verb, "option"):
        name = option.opts[0]
        if option.is_flag:
            found, hint = refusal(verb, name + "=1")
            assert found == f"option {name} has a value, expected {name} alone"
        else:
            found, hint = refusal(verb, name)
            assert found == f"option {name} has no value, expected {name} {option.metavar}"
        assert hint == helps(verb)


@each_verb
def test_a_refusal_is_a_document_with_json(verb: str) -> None:
    """On stdout, beside the same words on stderr."""
    message, hint = refusal(verb, "--no-such-flag")
    code, out, err = quiet(verb, "--no-such-flag", "--json")
    assert code == 2
    assert err == f"error: {message} [usage]\nhint: {hint}\n"
    assert json.loads(out) == {"error": {"code": "usage", "message": message, "hint": hint}}


@each_verb
def test_values_are_read_by_us(verb: str) -> None:
    """No parameter has a type that the parser would refuse values of in its own words."""
    callback = inspect.unwrap(VERBS[verb].callback)
    for name, hint in typing.get_type_hints(callback).items():
        if name not in ("return", "ctx"):
            kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
            assert set(kinds) <= {str, bool, list[str], type(None)}, name


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "DIR", "--chunks", "x"],
        ["demo", "--block-size", "x"],
        ["inspect", "DIR", "--objects", "--limit", "x"],
        ["plan", "640", "--base", "x"],
        ["rebind", "DIR", "--chunk-size", "x"],
        ["top", "DIR", "--count", "x"],
    ],
)
def test_a_value_that_is_refused_names_the_help(words: list[str]) -> None:
    """Where there is no better way out."""
    code, out, err = quiet(*words)
    assert (code, out) == (2, "")
    flag = words[-2]
    expected = f"error: {flag} is 'x', expected a positive integer [config]\n"
    assert err == expected + f"hint: {helps(words[0])}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspec"], "verb 'inspec' is unknown, did you mean inspect?"),
        (["Verify"], "verb 'Verify' is unknown, did you mean verify?"),
        (["help", "verfy"], "verb 'verfy' is unknown, did you mean verify?"),
        (["--versio"], "option '--versio' is unknown, did you mean --version?"),
        (["--yes", "reset"], "option --yes stands before the verb, expected behind it"),
    ],
)
def test_the_program_itself_refuses_in_the_same_way(words: list[str], message: str) -> None:
    """An unknown verb, and what stands before it."""
    code, out, err = quiet(*words)
    assert (code, out) == (2, "")
    assert err == f"error: {message} [usage]\nhint: see lmcache-persist --help\n"


def test_a_verb_that_is_like_none_has_all_named() -> None:
    """Who has no idea learns the verbs, and a script learns it as a document."""
    code, out, err = quiet("zzz", "--json")
    assert code == 2
    assert f"there are: {', '.join(VERBS)} [usage]" in err
    assert json.loads(out)["error"]["code"] == "usage"


@pytest.mark.parametrize("words", [["flush"], ["bench"], ["top"], ["negotiate", "--groups", "1"]])
@pytest.mark.parametrize("both", [False, True])
def test_one_of_folder_and_server_is_needed(words: list[str], both: bool) -> None:
    """Neither and both are refused before anything is asked."""
    given = ["DIR", "--server", "ipc:///nowhere"] if both else []
    code, _, err = quiet(*words, *given)
    assert code == 2
    found = "both DIR and --server are" if both else "neither DIR nor --server is"
    assert err.startswith(f"error: {found} given, expected one")
    assert err.endswith(f"[usage]\nhint: {helps(words[0])}\n")


@pytest.mark.parametrize("word", ["-5", "-5,3", "-544", "544,-1"])
def test_negative_numbers_are_no_options(word: str) -> None:
    """A geometry refuses them, which says more."""
    code, _, err = quiet("plan", "640", word)
    assert code == 2
    assert "[invalid_tokens_per_block]" in err


@pytest.mark.parametrize("word", ["-bash", "--bas", "-5h", "-x", "-base=4"])
def test_an_option_of_plan_is_never_taken_for_a_number(word: str) -> None:
    """Also one that holds the letter of a short option."""
    found, hint = refusal("plan", "640", word)
    assert f"option '{word.partition('=')[0]}' is unknown" in found
    assert hint == helps("plan")


def test_the_value_of_an_option_of_plan_is_no_option() -> None:
    """What stands behind an option is its value, whatever it looks like."""
    code, _, err = quiet("plan", "640", "--base", "-x")
    assert code == 2
    assert err.startswith("error: --base is '-x', expected a positive integer")


def test_json_behind_the_end_of_options_is_no_option() -> None:
    """``--`` ends options, as everywhere."""
    assert usage.wants_json(["plan", "--json", "--"])
    assert not usage.wants_json(["plan", "--", "--json"])


@pytest.mark.parametrize("verb", [*VERBS, None])
def test_every_way_to_ask_for_help_shows_the_same(verb: str | None) -> None:
    """--help, -h and the verb help; lines fit a terminal of 80 columns, examples are one line."""
    words = [verb] if verb else []
    code, out, err = quiet(*words, "--help")
    assert (code, err) == (0, "")
    assert quiet(*words, "-h") == (code, out, err)
    assert quiet("help", *words) == (code, out, err)
    assert max(map(len, out.splitlines())) <= 80
    examples = [line for line in out.splitlines() if "Example: " in line]
    assert examples
    for line in examples:
        after = out.splitlines()[out.splitlines().index(line) + 1]
        assert not after.strip(), "an example is to be copied from one line"
    assert "..." not in out.replace(",...", "").replace("]...", ""), "nothing is cut"
    assert "<str>" not in out


@each_verb
def test_every_parameter_says_what_it_is(verb: str) -> None:
    """And a value has a word for what it is a number of, or what it names."""
    for param in VERBS[verb].params:
        assert param.help, param.name
        assert param.metavar or param.param_type_name == "argument" or param.is_flag, param.name


def test_the_help_of_serve_has_the_defaults_of_settings() -> None:
    """Who changes a default changes the help."""
    effective = Settings(data_dir=Path("/x")).effective()
    helps_by_name = {param.name: param.help for param in VERBS["serve"].params}
    for setting in SETTINGS:
        if setting.name not in ("data_dir", "listen", "capacity"):
            default = effective[setting.name]
            shown = {"": "none", "true": "yes", "false": "no"}.get(default, default)
            assert f"[default: {shown}]" in helps_by_name[setting.name], setting.name


def test_the_name_alone_shows_the_help() -> None:
    """It is no result: it goes to stderr, and a script that forgot its verb has failed."""
    code, out, err = quiet()
    assert (code, out) == (2, "")
    assert err == quiet("--help")[1]


@pytest.mark.parametrize("words", [["version"], ["--version"], ["-V"]])
def test_every_way_to_ask_for_the_version_shows_the_same(words: list[str]) -> None:
    """Program and version on one line."""
    assert quiet(*words) == (0, f"lmcache-persist {__version__}\n", "")


def test_the_version_is_a_document_too() -> None:
    """For scripts."""
    assert json.loads(quiet("version", "--json")[1]) == {"version": __version__}


BASH = """
source <("$1" completion bash) || exit 9
COMP_WORDS=("${@:2}")
COMP_CWORD=$(( $# - 2 ))
_lmcache_persist_completion "$1"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    """A shell that reads the script gets verbs; nothing else is printed."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m lmcache_persist.cli "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        [bash, "--norc", "-c", BASH, "bash", str(program), "lmcache-persist", "re"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.split()) == sorted(one for one in VERBS if one.startswith("re"))


COMPLETED = {
    "lmcache-persist ver": ["verify", "version"],
    "lmcache-persist plan --b": ["--base"],
    "lmcache-persist help ins": ["inspect"],
    "lmcache-persist completion ": list(SHELLS),
    "lmcache-persist inspect /no-such-pl": [],
    "lmcache-persist no-such-verb --j": [],
}


@pytest.mark.parametrize("line", COMPLETED)
def test_words_are_completed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verbs, options, and words that are known; the shell itself does file names."""
    monkeypatch.setenv(COMPLETE_VARIABLE, "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    code, out, err = quiet()
    assert (code, err) == (0, "")
    assert [one.partition("\t")[0] for one in out.splitlines() if one] == COMPLETED[line]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell: str) -> None:
    """It calls the program with the variable that the program looks at, and names its words."""
    code, out, err = quiet("completion", shell)
    assert (code, err) == (0, "")
    assert f"{COMPLETE_VARIABLE}=complete_{shell}" in out


def test_a_shell_that_is_not_known_is_refused() -> None:
    """With the nearest."""
    found, hint = refusal("completion", "zhs")
    assert found == "shell 'zhs' is unknown, did you mean zsh?"
    assert hint == helps("completion")
