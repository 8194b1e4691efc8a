"""The program ``lmcache-persist``: its verbs and its entry point.

Nothing heavy is imported here: each verb imports what it needs when it runs.
"""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Annotated

import typer

from lmcache_persist import __version__
from lmcache_persist.cli.backup import backup
from lmcache_persist.cli.bench import bench
from lmcache_persist.cli.demo import demo
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.flush import flush
from lmcache_persist.cli.inspect import inspect
from lmcache_persist.cli.negotiate import negotiate
from lmcache_persist.cli.output import finish, open_closed_streams, output_failure, say_error, write
from lmcache_persist.cli.plan import plan
from lmcache_persist.cli.prune import prune
from lmcache_persist.cli.rebind import rebind
from lmcache_persist.cli.recover import recover
from lmcache_persist.cli.reset import reset
from lmcache_persist.cli.resize import resize
from lmcache_persist.cli.restore import restore
from lmcache_persist.cli.serve import serve
from lmcache_persist.cli.top import top
from lmcache_persist.cli.verify import verify
from lmcache_persist.errors import OutputFailed

app = typer.Typer(
    name="lmcache-persist",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A cache server that keeps an LLM engine's KV cache on disk, across every restart.",
)

app.command()(serve)
# Negative numbers are arguments to refuse, not options.
app.command(context_settings={"ignore_unknown_options": True})(plan)
app.command()(negotiate)
app.command()(flush)
app.command()(inspect)
app.command()(verify)
app.command()(prune)
app.command()(backup)
app.command()(restore)
app.command()(resize)
app.command()(rebind)
app.command()(recover)
app.command()(reset)
app.command()(top)
app.command()(bench)
app.command()(demo)


def _version(wanted: bool) -> None:
    if wanted:
        write(f"lmcache-persist {__version__}")
        raise typer.Exit(finish(0))


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


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
    stdout = sys.stdout
    try:
        app(args=args, prog_name="lmcache-persist")
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
