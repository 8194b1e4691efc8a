"""The program ``lmcache-persist``: its verbs and its entry point.

Nothing heavy is imported here: each verb imports what it needs when it runs.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Annotated

import typer

from lmcache_persist.cli.about import COMPLETE_VARIABLE, PROGRAM, completion, help_, version
from lmcache_persist.cli.backup import backup
from lmcache_persist.cli.bench import bench
from lmcache_persist.cli.demo import demo
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.flush import flush
from lmcache_persist.cli.inspect import inspect
from lmcache_persist.cli.negotiate import negotiate
from lmcache_persist.cli.output import (
    finish,
    open_closed_streams,
    output_failure,
    refused,
    say_error,
    set_called_with,
)
from lmcache_persist.cli.plan import plan
from lmcache_persist.cli.prune import prune
from lmcache_persist.cli.rebind import rebind
from lmcache_persist.cli.recover import recover
from lmcache_persist.cli.reset import reset
from lmcache_persist.cli.resize import resize
from lmcache_persist.cli.restore import restore
from lmcache_persist.cli.serve import serve
from lmcache_persist.cli.top import top
from lmcache_persist.cli.usage import Program, Verb, VerbOfNumbers, wants_json
from lmcache_persist.cli.verify import verify
from lmcache_persist.errors import OutputFailed, UsageError

ABOUT = """A cache server that keeps an LLM engine's KV cache on disk, across every restart.

Every verb explains itself: lmcache-persist VERB --help.

Example: lmcache-persist serve --data-dir /var/lib/kv --capacity 64GiB
"""

app = typer.Typer(
    name="lmcache-persist",
    cls=Program,
    add_completion=False,  # its options write into dot files; see the verb completion
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=ABOUT,
)

app.command(cls=Verb)(serve)
app.command(cls=VerbOfNumbers)(plan)
app.command(cls=Verb)(negotiate)
app.command(cls=Verb)(flush)
app.command(cls=Verb)(inspect)
app.command(cls=Verb)(verify)
app.command(cls=Verb)(prune)
app.command(cls=Verb)(backup)
app.command(cls=Verb)(restore)
app.command(cls=Verb)(resize)
app.command(cls=Verb)(rebind)
app.command(cls=Verb)(recover)
app.command(cls=Verb)(reset)
app.command(cls=Verb)(top)
app.command(cls=Verb)(bench)
app.command(cls=Verb)(demo)
app.command(cls=Verb)(completion)
app.command(cls=Verb)(version)
app.command("help", cls=Verb)(help_)


def _version(wanted: bool) -> None:
    if wanted:
        version()


@app.callback()
def _options(
    wants_version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    del wants_version


def main(args: list[str] | None = None) -> int:
    """Run a verb.

    Args:
        args: without the program's name; ``sys.argv[1:]`` by default.

    Returns:
        The exit code (:class:`lmcache_persist.cli.exit_codes.ExitCode`).
    """
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names may hold what the terminal's encoding has no form for.
            with contextlib.suppress(io.UnsupportedOperation):
                stream.reconfigure(errors="backslashreplace")
    stdout, words = sys.stdout, sys.argv[1:] if args is None else args
    set_called_with(words)
    if COMPLETE_VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    try:
        app(args=args, prog_name=PROGRAM)
    except UsageError as error:
        return finish(refused(error, as_json=wants_json(words)))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
        if sys.stdout is not stdout:
            return ExitCode.BROKEN_PIPE  # of a help text: click put something mute in its place
        return finish(code)
    except (OSError, OutputFailed):
        # Of the version or a help text, which click writes by itself; all else is a defect.
        failure = output_failure()
        if failure is None:
            raise
        say_error(failure)
        return finish(ExitCode.FAILED)
    return finish(ExitCode.OK)
