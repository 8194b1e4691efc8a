"""``help``, ``version`` and ``completion``: the program about itself."""

from __future__ import annotations

from typing import Annotated

import typer

from lmcache_persist import __version__
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.options import Json
from lmcache_persist.cli.output import ending, help_hint, write, write_json
from lmcache_persist.cli.usage import no_such_verb
from lmcache_persist.config_sources import suggestion
from lmcache_persist.errors import UsageError

PROGRAM = "lmcache-persist"
COMPLETE_VARIABLE = "_LMCACHE_PERSIST_COMPLETE"
"""Set by the script of ``completion`` where it wants words instead of a verb."""

SHELLS = ("bash", "zsh", "fish")


def _verbs(ctx: typer.Context, incomplete: str) -> list[str]:
    root = ctx.find_root().command
    return [name for name in getattr(root, "commands", {}) if name.startswith(incomplete)]


def _shells(incomplete: str) -> list[str]:
    return [name for name in SHELLS if name.startswith(incomplete)]


@ending
def help_(
    ctx: typer.Context,
    verb: Annotated[
        str | None,
        typer.Argument(metavar="VERB", help="[default: the program]", autocompletion=_verbs),
    ] = None,
) -> int:
    """Explain a verb, or list them all. The same as --help.

    Example: lmcache-persist help serve
    """
    root = ctx.find_root()
    if verb is None:
        write(root.get_help())
        return ExitCode.OK
    command = getattr(root.command, "commands", {}).get(verb)
    if command is None:
        raise no_such_verb(ctx, verb)
    write(command.get_help(typer.Context(command, info_name=verb, parent=root)))
    return ExitCode.OK


@ending
def version(json_output: Json = False) -> int:
    """Print the version. The same as --version.

    Example: lmcache-persist version --json
    """
    if json_output:
        write_json({"version": __version__})
    else:
        write(f"{PROGRAM} {__version__}")
    return ExitCode.OK


@ending
def completion(
    shell: Annotated[
        str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", autocompletion=_shells)
    ],
) -> int:
    """Print a script with which a shell completes verbs and options.

    The shell has to read it at its start: docs/cli.md says where each looks for it.

    Example: lmcache-persist completion bash > lmcache-persist.bash
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    if shell not in SHELLS:
        raise UsageError(
            f"shell {shell!r} is unknown, {suggestion(shell, SHELLS)}",
            hint=help_hint("completion"),
        )
    script = get_completion_script(prog_name=PROGRAM, complete_var=COMPLETE_VARIABLE, shell=shell)
    write(script)
    return ExitCode.OK
