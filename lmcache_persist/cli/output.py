"""What verbs print: results on stdout, talk on stderr, and how a verb ends.

Everything that may come from outside (model names, paths, other people's text) passes
:func:`plain`, so that it cannot steer the terminal.
"""

from __future__ import annotations

import contextvars
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from lmcache_persist.cli import terminal
from lmcache_persist.cli.exit_codes import ExitCode, exit_code_of
from lmcache_persist.cli.interrupt import unwinding
from lmcache_persist.errors import ConfigError, DataDirUnusable, OutputFailed, PersistError
from lmcache_persist.posix import discard_output
from lmcache_persist.printable import command
from lmcache_persist.printable import plain as plain  # noqa: PLC0414 - verbs take it from here

if TYPE_CHECKING:
    from lmcache_persist.cli.layout import Column

P = ParamSpec("P")

_called_with: contextvars.ContextVar[Sequence[str]] = contextvars.ContextVar("called_with")

_CLOSED_STREAMS = (("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY))
"""What a closed stream is replaced by: one that reads nothing, refuses, or forgets."""


def set_called_with(words: Sequence[str]) -> None:
    """Remember the words behind the program's name, for hints that repeat them."""
    _called_with.set(tuple(words))


def open_closed_streams() -> None:
    """Give each standard stream that is closed a descriptor, which no other file gets then.

    A write to stdout fails as it would have, with an error that verbs know.
    """
    for name, flags in _CLOSED_STREAMS:
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, flags)
            stream = open(fd, "r" if name == "stdin" else "w")  # noqa: SIM115 - the process's
            setattr(sys, name, stream)


def write(text: str, *, at_once: bool = False) -> None:
    """One line, or several, to stdout.

    Raises:
        OutputFailed: it is a full disk, closed, or the like.
    """
    try:
        sys.stdout.write(text + "\n")
        if at_once:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _output_failed(error) from error


def output_failure() -> OutputFailed | None:
    """Why nothing can be written to stdout, tried with an empty line; None if it can be."""
    try:
        write("", at_once=True)
    except OutputFailed as error:
        return error
    return None


def _output_failed(error: OSError) -> OutputFailed:
    return OutputFailed(f"stdout cannot be written: {error.strerror}")


def write_json(document: Any) -> None:
    """A document to stdout; ASCII only, keys in the order given."""
    write(json.dumps(document, indent=2, allow_nan=False))


def write_line(document: Any) -> None:
    """A document as one line to stdout, at once: for those that come one after the other."""
    write(json.dumps(document, allow_nan=False), at_once=True)


def say(text: str) -> None:
    """A line to stderr. Never fails: talk is not the result."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        return


class Name(str):
    """A cell that may be shortened where there is no room for it."""

    __slots__ = ()


def write_table(
    title: str, columns: Sequence[str | Column], rows: Iterable[Sequence[object]]
) -> None:
    """A table to stdout: laid out for a terminal, tab-separated with a header line elsewhere."""
    cells = [[plain(cell) for cell in row] for row in rows]
    names = [column if isinstance(column, str) else column.name for column in columns]
    if not terminal.is_terminal(sys.stdout):
        lines = [f"# {title}", *("\t".join(row) for row in [names, *cells])]
        write("\n".join(lines))
        return
    from lmcache_persist.cli import layout

    found = layout.table(
        [layout.Column(one) if isinstance(one, str) else one for one in columns],
        [[terminal.encodable(cell, sys.stdout) for cell in row] for row in cells],
        terminal.size(sys.stdout).columns,
        terminal.ellipsis(sys.stdout),
    )
    lines = [_heading(title)]
    if not cells:
        lines.append("none")
    elif found.header is not None:
        lines.append(terminal.styled(found.header, terminal.UNDERLINED, sys.stdout))
    lines += found.lines
    dropped = [name for name in found.dropped if name]
    if dropped and cells:
        lines += _wrapped(f"no room here for: {', '.join(dropped)}")
    write("\n".join([*lines, ""]))


def write_fields(title: str, rows: Iterable[tuple[str, object]]) -> None:
    """Names and values to stdout, as :func:`write_table`; a :class:`Name` may be shortened."""
    pairs = list(rows)
    if not terminal.is_terminal(sys.stdout):
        write_table(title, ("field", "value"), pairs)
        return
    from lmcache_persist.cli import layout

    lines = layout.fields(
        [
            (
                terminal.encodable(plain(name), sys.stdout),
                terminal.encodable(plain(value), sys.stdout),
                layout.Kind.NAME if isinstance(value, Name) else layout.Kind.WORDS,
            )
            for name, value in pairs
        ],
        terminal.size(sys.stdout).columns,
        terminal.ellipsis(sys.stdout),
    )
    write("\n".join([_heading(title), *lines, ""]))


def _heading(title: str) -> str:
    lines = _wrapped(terminal.encodable(title, sys.stdout))
    return "\n".join(terminal.styled(line, terminal.BOLD, sys.stdout) for line in lines)


def _wrapped(text: str) -> list[str]:
    from lmcache_persist.cli import layout

    return layout.wrap(text, terminal.size(sys.stdout).columns)


def error_document(error: PersistError) -> dict[str, str | None]:
    """The ``error`` of a JSON result."""
    return {"code": error.code, "message": error.message, "hint": error.hint}


def say_error(error: PersistError) -> None:
    """The error on stderr, for people: what, and the way out."""
    say(f"error: {plain(error.message)} [{error.code}]")
    if error.hint:
        say(f"hint: {plain(error.hint)}")


def help_hint(verb: str = "") -> str:
    """The hint that names the help of a verb, or of the program."""
    return f"see lmcache-persist {verb} --help" if verb else "see lmcache-persist --help"


def add_help_hint(error: PersistError, verb: str) -> None:
    """Give input that is refused without a hint the verb's help as one."""
    if isinstance(error, ConfigError) and not error.hint:
        error.hint = help_hint(verb)


def add_owners_command(error: PersistError) -> None:
    """Give root, who is refused another user's data dir, the same command as that user's."""
    owner, words = error.fields.get("owner"), _called_with.get(())
    if isinstance(error, DataDirUnusable) and owner and words and os.geteuid() == 0:
        error.hint = f"run it as its owner: {command(*words, user=str(owner))}"


def refused(error: PersistError, *, as_json: bool) -> int:
    """Say the error that ends a verb, with ``as_json`` also as a document; its exit code."""
    say_error(error)
    if as_json:
        _write_last({"error": error_document(error)})
    return exit_code_of(error)


def ending(verb: Callable[P, int]) -> Callable[P, None]:
    """Make a verb's result, or the error that ends it, its exit code. No tracebacks.

    With ``--json`` (the parameter ``json_output``) an error is also a document on stdout. A
    value that is refused without a hint has the verb's help as one.
    """

    @functools.wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with unwinding():
                code = int(verb(*args, **kwargs))
        except PersistError as error:
            add_help_hint(error, verb.__name__.rstrip("_"))
            add_owners_command(error)
            code = refused(error, as_json=bool(kwargs.get("json_output")))
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
        except BrokenPipeError:
            code = ExitCode.BROKEN_PIPE
        raise typer.Exit(finish(code))

    return run


def _write_last(document: Any) -> None:
    try:
        write_json(document)
    except (BrokenPipeError, OutputFailed):
        return  # the error itself has been said on stderr


def finish(code: int) -> int:
    """Flush stdout; the exit code, or the one for output that could not be written."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = ExitCode.BROKEN_PIPE
    except OSError as error:
        if code != ExitCode.FAILED:
            say_error(_output_failed(error))
        code = ExitCode.FAILED
    else:
        return code
    # The interpreter flushes once more at its end and would complain: let that go nowhere.
    discard_output(sys.stdout.fileno())
    return code
