"""``prune``: take stored chunks away that the operator names."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmcache_persist.cli.connection import ask_json, seconds
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.inspect import ask_server
from lmcache_persist.cli.live import absolute, by_server, holding_server
from lmcache_persist.cli.options import AnswerTimeout, DataDir, DryRun, Json
from lmcache_persist.cli.output import ending, plain, say, write, write_json, write_table
from lmcache_persist.cli.ticker import Ticker
from lmcache_persist.errors import ConfigError, DataDirLocked, MalformedMessage, PersistError
from lmcache_persist.units import approximate_size, parse_duration_s, parse_size

if TYPE_CHECKING:
    from lmcache_persist.store.selection import Picked, Selection


@ending
def prune(
    data_dir: DataDir,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Chunks of the model of this name.")
    ] = None,
    fingerprint: Annotated[
        str | None, typer.Option(metavar="HEX", help="Of the model whose fingerprint begins so.")
    ] = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Chunks that a rebind left, which nobody finds.")
    ] = False,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Not used since: 90min, 12h, 7d.")
    ] = None,
    down_to: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Until what is meant takes no more than that, as 10GiB."),
    ] = None,
    dry_run: DryRun = False,
    timeout: AnswerTimeout = "30",
    json_output: Json = False,
) -> int:
    """Remove stored chunks, the least recently used first. Selectors combine: all must mean it.

    A live server does it between its other work; with no server the files are changed.
    Interrupted, it says how far it came, and the rest is there.

    Example: lmcache-persist prune /var/lib/kv --older-than 7d --dry-run
    """
    from lmcache_persist.store.selection import Picked

    root = absolute(data_dir)
    timeout_s = seconds(timeout)
    if model is fingerprint is older_than is down_to is None and not stale:
        raise ConfigError(
            "prune was not told what to remove",
            hint="give one of --model, --fingerprint, --stale, --older-than, --down-to;"
            " everything goes with: lmcache-persist reset",
        )
    # What does not depend on the data dir is refused first.
    stored_before = None if older_than is None else int(time.time() - _age_s(older_than))
    down_to_bytes = None if down_to is None else parse_size(down_to)
    models, live = _models(root, timeout_s)
    selection = _selection(models, model, fingerprint, stale, stored_before, down_to_bytes)
    steps = (
        _live(root, timeout_s, selection, dry_run) if live else _offline(root, selection, dry_run)
    )
    total, ended = Picked(), ExitCode.OK
    try:
        with contextlib.closing(steps), Ticker() as ticker:
            for step in steps:
                total.add_all(step)
                ticker.show(f"{_verb(dry_run)} {_amount(total)} so far")
    except KeyboardInterrupt:
        ended = ExitCode.INTERRUPTED
        say(f"interrupted: {_verb(dry_run)} {_amount(total)}; the rest is as it was")
    except PersistError:
        if total.amounts:
            say(f"{_verb(dry_run)} {_amount(total)} before this:")
        raise
    _write(models, total, dry_run, complete=not ended, as_json=json_output)
    return ended


def _age_s(text: str) -> float:
    if text.strip().replace(".", "").isdigit():
        raise ConfigError(
            f"--older-than is {text!r}, expected a number with a unit",
            hint=f"for example {text.strip()}d, {text.strip()}h or {text.strip()}s",
        )
    age_s = parse_duration_s(text)
    if age_s > time.time():
        raise ConfigError(f"{text!r} is longer ago than 1970")
    return age_s


def _models(root: Path, timeout_s: float) -> tuple[list[dict[str, Any]], bool]:
    """The models of the data dir, and whether a server holds it."""
    from lmcache_persist.server.looking import look

    try:
        document, problem = look(root)
    except DataDirLocked as error:
        if not by_server(error):
            raise
        return ask_server(root, timeout_s)["models"], True
    if problem is not None:
        raise problem
    return document["models"], False


def _selection(
    models: list[dict[str, Any]],
    name: str | None,
    fingerprint: str | None,
    stale: bool,
    stored_before: int | None,
    down_to_bytes: int | None,
) -> Selection:
    from lmcache_persist.server.prune import fingerprints_of
    from lmcache_persist.store.selection import Selection

    meant = fingerprints_of(models, name, fingerprint)
    return Selection(meant, stale, stored_before, down_to_bytes)


def _offline(root: Path, selection: Selection, dry_run: bool) -> Generator[Picked, None, None]:
    from lmcache_persist.server import prune as on_files

    if dry_run:
        yield from on_files.preview(root, selection)
    else:
        yield from on_files.prune(root, selection, on_begin=_say_room)


def _say_room() -> None:
    say("prune needs no more room on the disk: it works within what the store keeps back")


def _live(
    root: Path, timeout_s: float, selection: Selection, dry_run: bool
) -> Generator[Picked, None, None]:
    from lmcache_persist.protocol import AdminPrune

    names = selection.fingerprints
    with holding_server(root, timeout_s, "prune") as client:
        if not dry_run:
            _say_room()
        cursor, counted_bytes = b"", 0
        while True:
            reply = ask_json(
                client,
                AdminPrune,
                timeout_s,
                fingerprints=None if names is None else sorted(names),
                stale=selection.stale,
                stored_before=selection.stored_before,
                down_to_bytes=selection.down_to_bytes,
                dry_run=dry_run,
                cursor=cursor,
                counted_bytes=counted_bytes,
            )
            picked = _decode(reply)
            counted_bytes += picked.bytes
            yield picked
            if picked.cursor is None:
                return
            if picked.cursor <= cursor:
                raise MalformedMessage("the server's prune does not go forward")
            cursor = picked.cursor


def _decode(reply: dict[str, Any]) -> Picked:
    from lmcache_persist.store.base import FingerprintUsage
    from lmcache_persist.store.selection import Picked

    picked = Picked()
    try:
        for row in reply["picked"]:
            amount = FingerprintUsage(int(row["chunks"]), int(row["objects"]), int(row["bytes"]))
            picked.amounts[row["fingerprint"], bool(row["stale"])] = amount
        picked.cursor = None if reply["cursor"] is None else bytes.fromhex(reply["cursor"])
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedMessage(f"the server's prune cannot be decoded: {error}") from error
    return picked


def _verb(dry_run: bool) -> str:
    return "would prune" if dry_run else "pruned"


def _amount(total: Picked) -> str:
    chunks = sum(amount.chunks for amount in total.amounts.values())
    objects = sum(amount.objects for amount in total.amounts.values())
    return f"{chunks} chunks, {objects} objects, {approximate_size(total.bytes)}"


def _write(
    models: list[dict[str, Any]], total: Picked, dry_run: bool, *, complete: bool, as_json: bool
) -> None:
    names = {row["fingerprint"]: row["name"] for row in models}
    rows: list[dict[str, Any]] = [
        {
            "name": names.get(fingerprint),
            "fingerprint": fingerprint,
            "stale": stale,
            "chunks": amount.chunks,
            "objects": amount.objects,
            "bytes": amount.bytes,
        }
        for (fingerprint, stale), amount in sorted(total.amounts.items())
    ]
    if as_json:
        sums = {key: sum(row[key] for row in rows) for key in ("chunks", "objects", "bytes")}
        write_json({"dry_run": dry_run, "complete": complete, **sums, "models": rows})
        return
    if rows:
        write_table(
            _verb(dry_run),
            ("model", "fingerprint", "stale", "chunks", "objects", "size"),
            [
                (
                    row["name"] or "?",
                    row["fingerprint"][:12],
                    "yes" if row["stale"] else "no",
                    row["chunks"],
                    row["objects"],
                    approximate_size(row["bytes"]),
                )
                for row in rows
            ],
        )
    write(f"{plain(_verb(dry_run))} {_amount(total)}" if rows else "nothing to prune")
