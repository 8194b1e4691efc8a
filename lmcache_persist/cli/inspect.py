"""``inspect``: what a data dir holds, from its server or from its files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmcache_persist.cli.connection import ask_json, seconds
from lmcache_persist.cli.exit_codes import ExitCode, exit_code_of
from lmcache_persist.cli.live import absolute, holding_server
from lmcache_persist.cli.options import AnswerTimeout, DataDir, Json
from lmcache_persist.cli.output import ending, plain, say, say_error, write_json
from lmcache_persist.cli.plan import positive
from lmcache_persist.errors import (
    ConfigError,
    DataDirLocked,
    MalformedMessage,
    PersistError,
    TransportError,
)

if TYPE_CHECKING:
    from lmcache_persist.server.looking import Wish

DEFAULT_LIMIT = 100
MAX_LIMIT = 100_000
"""Objects that one call shows: all of them are in memory for a moment."""

_KEY_BYTES = 64


@ending
def inspect(
    data_dir: DataDir,
    models: Annotated[
        bool,
        typer.Option(
            "--models", help="Also what each fingerprint was made of, and how they differ."
        ),
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|FINGERPRINT", help="Only this model; 6 digits of a fingerprint do."
        ),
    ] = "",
    objects: Annotated[
        bool, typer.Option("--objects", help="Also a page of objects, in the order of keys.")
    ] = False,
    after: Annotated[
        str, typer.Option(metavar="KEY", help="With --objects: the page after this key.")
    ] = "",
    limit: Annotated[
        str, typer.Option(metavar="N", help="With --objects: so many at most, whole chunks.")
    ] = str(DEFAULT_LIMIT),
    timeout: AnswerTimeout = "5",
    json_output: Json = False,
) -> int:
    """Show what a data dir holds and how it came about. Changes nothing.

    Binding, models, usage, ages, rejections, starts, and a live server's numbers. A live
    server is asked; else the files are read. If the server does not answer, the manifest is
    shown, the store is "unavailable" and the exit code is 4.

    Example: lmcache-persist inspect /var/lib/kv --json

    Example: lmcache-persist inspect /var/lib/kv --objects --limit 20
    """
    from lmcache_persist.server.looking import Wish

    wish = Wish(
        model=model,
        details=models,
        objects=_checked_limit(limit) if objects else None,
        after=_key(after),
    )
    document, problem = read(absolute(data_dir), wish, seconds(timeout))
    if json_output:
        write_json(document)
    else:
        from lmcache_persist.cli.inspect_text import write_document

        write_document(document, None if problem is None else problem.message)
    if problem is None:
        return ExitCode.OK
    say_error(problem)
    return exit_code_of(problem)


def _checked_limit(text: str) -> int:
    limit = positive("limit", text)
    if limit > MAX_LIMIT:
        raise ConfigError(
            f"--limit is {limit}, expected 1 to {MAX_LIMIT}", hint="page with --after"
        )
    return limit


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b"?"
    if len(key) not in (0, _KEY_BYTES):
        raise ConfigError(
            f"--after is {text[:40]!r}, expected a chunk's key of {2 * _KEY_BYTES} hex digits",
            hint="take the key that the page before ended with",
        )
    return key


def read(root: Path, wish: Wish, timeout_s: float) -> tuple[dict[str, Any], PersistError | None]:
    """The document, and why a part of it is unavailable."""
    from lmcache_persist.server.looking import look, look_at_manifest

    try:
        return look(root, wish)
    except DataDirLocked as error:
        locked = error
    try:
        return ask_server(root, timeout_s, wish), None
    except TransportError as error:
        hung = error
    try:
        return look(root, wish)  # it may have ended just now
    except DataDirLocked:
        say(f"note: {plain(locked.message)}")
        return look_at_manifest(root, wish), hung


def ask_server(root: Path, timeout_s: float, wish: Wish | None = None) -> dict[str, Any]:
    """The document from the server that holds the data dir.

    Raises:
        TransportError: it does not answer, or another one does.
    """
    from lmcache_persist.protocol import MAX_OBJECTS_PER_PAGE, AdminInspect, AdminObjects
    from lmcache_persist.server.looking import Wish

    wish = wish or Wish()
    with holding_server(root, timeout_s, "inspect") as client:
        document = ask_json(client, AdminInspect, timeout_s, model=wish.model, details=wish.details)
        if wish.objects is None:
            return document
        found: list[Any] = []
        following: str | None = wish.after.hex()
        while following is not None and len(found) < wish.objects:
            page = ask_json(
                client,
                AdminObjects,
                timeout_s,
                after=bytes.fromhex(following),
                limit=min(MAX_OBJECTS_PER_PAGE, wish.objects - len(found)),
                model=wish.model,
            )
            more, before = list(page["objects"]), following
            if found and len(found) + len(more) > wish.objects:
                break  # a chunk that would not fit: it begins the next page
            found += more
            following = page["next"]
            if following is not None and following <= before:
                raise MalformedMessage("the server's pages do not go forward")
    return {**document, "objects": found, "next": following}
