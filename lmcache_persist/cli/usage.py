"""How the program takes the words it is called with, and refuses those that do not fit.

Every refusal is a :class:`UsageError` of the program's own form: what was found, what was
expected, the nearest valid name, and the help to read. The parser's own errors end here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.output import help_hint, say
from lmcache_persist.config_sources import suggestion
from lmcache_persist.errors import UsageError
from lmcache_persist.printable import command
from lmcache_persist.units import is_size_unit

# The parser's base class of usage errors has no public name, and another module by version.
_PARSER_ERROR: type[Exception] = typer.BadParameter.__bases__[0]

_NEGATIVE = re.compile(r"-[0-9][0-9,.+-]*", re.ASCII)

_ENDS = ("stop", "kill", "shutdown", "quit")
_HOW_TO_END = (
    "a server ends cleanly on SIGTERM: systemctl stop, or kill with its process id, which"
    " DIR/server.lock names"
)

# The first sentence of a verb's help, which is never this long.
_WHOLE = 1000


class Verb(TyperCommand):
    """A verb. Contexts of the parser are ``Any``: their class differs by version."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the words. Raises ``UsageError``."""
        ctx.allow_extra_args = True  # to refuse them here
        with _own_errors(ctx):
            rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            raise _too_much(ctx, rest[0])
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What the usage line says behind the name."""
        return _pieces(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, without their types, which say nothing, and options."""
        for kind in ("argument", "option"):
            params = [one for one in self.get_params(ctx) if one.param_type_name == kind]
            records = [(one, one.get_help_record(ctx)) for one in params]
            rows = [
                (_word(one) if kind == "argument" else record[0], record[1])
                for one, record in records
                if record
            ]
            if rows:
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(rows)


class VerbOfNumbers(Verb):
    """A verb whose arguments may be negative numbers, for it to refuse: no options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the words. Raises ``UsageError``."""
        unknown = None if ctx.resilient_parsing else _unknown_option(ctx, args)
        if unknown is not None:
            raise _no_such_option(ctx, unknown)
        ctx.ignore_unknown_options = True  # what is left of them are numbers
        return super().parse_args(ctx, args)


class Program(TyperGroup):
    """The program: options of its own, then a verb."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the words up to the verb. Raises ``UsageError``."""
        if not args and not ctx.resilient_parsing:
            say(self.get_help(ctx))
            raise typer.Exit(ExitCode.REFUSED_INPUT)
        with _own_errors(ctx):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the verb. Raises ``UsageError``."""
        if args[0] not in self.commands and not ctx.resilient_parsing:
            raise no_such_verb(ctx, args[0])
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write every verb with the first sentence of its help, the whole of it."""
        rows = [(name, one.get_short_help_str(_WHOLE)) for name, one in self.commands.items()]
        with formatter.section("Verbs"):
            formatter.write_dl(rows)


def no_such_verb(ctx: Any, name: str) -> UsageError:
    """The refusal of a verb that there is not."""
    names = list(ctx.find_root().command.commands)
    if name in _ENDS:
        return UsageError(f"verb {name!r} is unknown", hint=_HOW_TO_END)
    message = f"verb {name!r} is unknown, {suggestion(name, names)}"
    return UsageError(message, hint=help_hint())


def wants_json(words: Sequence[str]) -> bool:
    """Whether a refusal of these words is to be a document, too."""
    options = words[: words.index("--")] if "--" in words else words
    return "--json" in options


@contextlib.contextmanager
def _own_errors(ctx: Any) -> Iterator[None]:
    try:
        yield
    except _PARSER_ERROR as error:
        raise _translated(ctx, error) from error


def _translated(ctx: Any, error: Any) -> UsageError:
    """An error of the parser in our words. Kinds are told by what they carry."""
    option = getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):
        return _no_such_option(ctx, option)
    param = getattr(error, "param", None)
    if option is not None:
        param = next(one for one in ctx.command.get_params(ctx) if option in _names(one))
        if param.is_flag:
            return _refusal(ctx, f"option {option} has a value, expected {option} alone")
        return _refusal(ctx, f"option {option} has no value, expected {option} {_word(param)}")
    if param is None or not hasattr(error, "param_type"):
        return _refusal(ctx, error.format_message())
    if param.param_type_name == "argument":
        return _refusal(ctx, f"{_word(param)} is missing, expected {_form(ctx)}")
    name = param.opts[0]
    return _refusal(ctx, f"option {name} is missing, expected {name} {_word(param)}")


def _refusal(ctx: Any, message: str) -> UsageError:
    return UsageError(message, hint=help_hint(ctx.info_name if ctx.parent else ""))


def _too_much(ctx: Any, word: str) -> UsageError:
    """The refusal of a word without a place: what it was meant for, where that can be told."""
    refusal = _refusal(ctx, f"{word!r} is too much, expected {_form(ctx)}")
    options = [name for one in ctx.command.get_params(ctx) for name in _names(one)]
    if is_size_unit(word):
        refusal.hint = f"a size is one word, without a blank: 8{word}"
    elif "--data-dir" in options:
        refusal.hint = f"a data dir is given as: {command(ctx.info_name, '--data-dir', word)}"
    return refusal


def _no_such_option(ctx: Any, name: str) -> UsageError:
    verbs = getattr(ctx.command, "commands", {}).values()
    if any(name in _names(param) for verb in verbs for param in verb.params):
        return _refusal(ctx, f"option {name} stands before the verb, expected behind it")
    names = [name for one in ctx.command.get_params(ctx) for name in _names(one)]
    return _refusal(ctx, f"option {name!r} is unknown, {suggestion(name, names)}")


def _unknown_option(ctx: Any, words: Sequence[str]) -> str | None:
    """The first word that looks like an option and is neither one, its value, nor a number."""
    options = [one for one in ctx.command.get_params(ctx) if one.param_type_name == "option"]
    known = {name for one in options for name in _names(one)}
    with_value = {name for one in options if not one.is_flag for name in _names(one)}
    is_value = False
    for word in words:
        if word == "--" and not is_value:
            return None
        name = word.partition("=")[0]
        odd = len(word) > 1 and word.startswith("-") and name not in known
        if odd and not is_value and not _NEGATIVE.fullmatch(word):
            return name
        is_value = not is_value and word in with_value
    return None


def _names(param: Any) -> list[str]:
    return [*param.opts, *param.secondary_opts] if param.param_type_name == "option" else []


def _word(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def _pieces(ctx: Any) -> list[str]:
    pieces = ["[OPTIONS]"]
    for param in ctx.command.get_params(ctx):
        if param.param_type_name == "argument":
            word = _word(param) if param.required else f"[{_word(param)}]"
            pieces.append(word if param.nargs == 1 else f"{word}...")
    return pieces


def _form(ctx: Any) -> str:
    return " ".join([str(ctx.info_name), *_pieces(ctx)])
