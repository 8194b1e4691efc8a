"""Where settings come from: flags, environment, YAML file. Names are checked, values stay text."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from lmcache_persist.errors import ConfigError

ENV_PREFIX: Final = "LMCACHE_PERSIST_"
OTHER_VARIABLES: Final = frozenset({"LMCACHE_PERSIST_FAILPOINTS", "LMCACHE_PERSIST_TEST_SEED"})
"""Variables with our prefix that are no settings."""

CONFIG_NAME: Final = "config"
"""The name of the flag and variable that say where the file is; no key of the file."""

PATH_NAMES: Final = frozenset({"data_dir", "pool_dir", CONFIG_NAME})
MAX_CONFIG_FILE_BYTES: Final = 64 << 10

_A_LINE: Final = (
    "write one setting a line, its name as that of the flag, without indentation: 'capacity: 64GiB'"
)
"""A hint: what a config file holds."""

Given = dict[str, tuple[str, str]]
"""By setting name: the text, and where it came from."""


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + name.upper()


def unknown_name(what: str, name: str, valid: Sequence[str], where: str = "") -> ConfigError:
    """The refusal of a name, with the nearest valid one, or all if none is near."""
    return ConfigError(f"{what} {name!r}{where} is unknown", hint=suggestion(name, valid))


def suggestion(name: str, valid: Sequence[str]) -> str:
    """What to say to a name that is none: the nearest valid one, or all if none is near."""
    return nearest(name, valid) or f"there are: {', '.join(valid)}"


def nearest(word: str, valid: Sequence[str]) -> str | None:
    """The question for the nearest valid word, None if none is near."""
    folded = {one.casefold(): one for one in valid}  # a word in the wrong case is near
    typed = word.casefold()
    close = difflib.get_close_matches(typed, folded, n=1)
    begun = [one for one in folded if len(typed) > 2 and one.startswith(typed)]
    if not close and len(begun) == 1:
        close = begun
    return f"did you mean {folded[close[0]]}?" if close else None


def read_flags(flags: Mapping[str, str | bool | None], names: Sequence[str]) -> Given:
    """What was typed; relative paths are taken from the current folder.

    Raises:
        ConfigError: a name is unknown.
    """
    given: Given = {}
    for name, value in flags.items():
        if name != CONFIG_NAME and name not in names:
            raise unknown_name("setting", name, [*names, CONFIG_NAME])
        if value is None:
            continue
        text = ("true" if value else "false") if isinstance(value, bool) else value
        if text and name in PATH_NAMES and not text.startswith("~"):
            text = os.path.abspath(text)
        given[name] = (text, "--" + name.replace("_", "-"))
    return given


def read_environment(env: Mapping[str, str], names: Sequence[str]) -> Given:
    """What the environment says under our prefix.

    Raises:
        ConfigError: a variable is unknown, also one that differs in case only.
    """
    by_variable = {variable_of(name): name for name in (*names, CONFIG_NAME)}
    given: Given = {}
    for variable in sorted(env):
        if not variable.upper().startswith(ENV_PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable not in by_variable:
            raise unknown_name("variable", variable, list(by_variable))
        given[by_variable[variable]] = (env[variable], variable)
    return given


def read_file(path: Path, names: Sequence[str]) -> Given:
    """What a YAML file says; names may be spelt with ``-`` for ``_``.

    Raises:
        ConfigError: it cannot be read, is no mapping of scalars, or a name is unknown or
            given twice.
    """
    given: Given = {}
    for key, text in _yaml_pairs(path):
        name = key.replace("-", "_")
        if name not in names:
            raise unknown_name("setting", key, names, f" in {path}")
        if name in given:
            raise ConfigError(
                f"{name} is given twice in {path}, expected once",
                hint="remove one of the lines; - and _ in a name are the same",
            )
        given[name] = (text, str(path))
    return given


def _yaml_pairs(path: Path) -> list[tuple[str, str]]:
    """Key and text of each entry of a YAML mapping of scalars, in order, repeated ones too."""
    import yaml  # only here: most starts have no file

    try:
        raw = _read_bounded(path)
        # Nodes, not values: they keep every scalar as it was written.
        root = yaml.compose(raw, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(
            f"config file {path} cannot be read: {error.strerror}",
            hint="name a file that the user of the server may read",
        ) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"config file {path} is no YAML: {_yaml_problem(error)}", hint=_A_LINE
        ) from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"config file {path} holds no mapping, expected lines 'name: value'", hint=_A_LINE
        )
    pairs = []
    for key, value in root.value:
        if not isinstance(key, yaml.ScalarNode) or not isinstance(value, yaml.ScalarNode):
            line = key.start_mark.line + 1
            raise ConfigError(f"line {line} of {path} is no plain 'name: value'", hint=_A_LINE)
        is_null = value.tag == "tag:yaml.org,2002:null"
        pairs.append((str(key.value), "" if is_null else str(value.value)))
    return pairs


def _yaml_problem(error: Exception) -> str:
    """One line; of an error that shows where it is, without the piece of the file."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    return f"{getattr(error, 'problem', error)} (line {mark.line + 1}, column {mark.column + 1})"


def _read_bounded(path: Path) -> bytes:
    with open(path, "rb") as file:
        raw = file.read(MAX_CONFIG_FILE_BYTES + 1)
    if len(raw) > MAX_CONFIG_FILE_BYTES:
        raise ConfigError(
            f"config file {path} is larger than {MAX_CONFIG_FILE_BYTES} bytes", hint=_A_LINE
        )
    return raw
