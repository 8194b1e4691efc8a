"""``prune``: take stored chunks away that the operator names."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmcache_persist.cli import prune_steps
from lmcache_persist.cli.confirm import NOTHING_CHANGED, confirmation
from lmcache_persist.cli.connection import seconds
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.inspect import ask_server
from lmcache_persist.cli.layout import Column, Kind
from lmcache_persist.cli.live import absolute, by_server
from lmcache_persist.cli.options import AnswerTimeout, DataDir, DryRun, Json, Yes
from lmcache_persist.cli.output import ending, plain, say, write, write_json, write_table
from lmcache_persist.cli.ticker import Ticker
from lmcache_persist.errors import ConfigError, DataDirLocked, PersistError
from lmcache_persist.printable import command
from lmcache_persist.units import approximate_size, parse_duration_s, parse_size

if TYPE_CHECKING:
    from lmcache_persist.server.losses import Loss
    from lmcache_persist.server.prune import Agree
    from lmcache_persist.store.selection import Picked, Selection

PREVIEW_S = 30.0
"""Seconds for which is counted what would go, before it is asked about."""


@ending
def prune(
    data_dir: DataDir,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FINGERPRINT", help="Chunks of this model; 6 digits of a fingerprint do."
        ),
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
    yes: Yes = False,
    timeout: AnswerTimeout = "30",
    json_output: Json = False,
) -> int:
    """Remove stored chunks, the least recently used first. Asks first, if anything is meant.

    Selectors combine: all must mean it. A live server does it between its other work; with
    no server the files are changed. Interrupted, it says how far it came, and the rest is
    there.

    Example: lmcache-persist prune /var/lib/kv --older-than 7d --dry-run

    Example: lmcache-persist prune /var/lib/kv --older-than 7d --yes
    """
    root = absolute(data_dir)
    timeout_s = seconds(timeout)
    if model is fingerprint is older_than is down_to is None and not stale:
        raise ConfigError(
            "prune was not told what to remove",
            hint="give one of --model, --fingerprint, --stale, --older-than, --down-to;"
            f" everything goes with: {command('reset', root)}",
        )
    # What does not depend on the data dir is refused first.
    stored_before = None if older_than is None else int(time.time() - _age_s(older_than))
    down_to_bytes = None if down_to is None else parse_size(down_to)
    rows, is_live = _models(root, timeout_s, model, fingerprint)
    names = {row["fingerprint"]: row.get("name") for row in rows}
    selection = _selection(
        names if model or fingerprint else None, stale, stored_before, down_to_bytes
    )
    with Ticker() as ticker:
        agree = None if dry_run else _agreement(names, ticker, yes=yes)
        steps = (
            prune_steps.live(root, timeout_s, selection, agree)
            if is_live
            else prune_steps.offline(root, selection, agree)
        )
        total, complete = _follow(steps, ticker, dry_run)
    _write(names, total, dry_run, complete=complete, as_json=json_output)
    return ExitCode.OK if complete else ExitCode.INTERRUPTED


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


def _models(
    root: Path, timeout_s: float, model: str | None, fingerprint: str | None
) -> tuple[list[dict[str, Any]], bool]:
    """The models that are meant, all by default; and whether a server holds the data dir."""
    from lmcache_persist.server import naming
    from lmcache_persist.server.looking import Wish, look

    prefix = None if fingerprint is None else naming.checked_prefix(fingerprint)
    if model is not None and not model.strip():
        raise ConfigError(
            "--model is empty, expected a name or a fingerprint", hint="inspect lists the models"
        )
    wish = Wish(model=prefix or model or "")
    try:
        document, problem = look(root, wish)
        is_live = False
    except DataDirLocked as error:
        if not by_server(error):
            raise
        document, problem, is_live = ask_server(root, timeout_s, wish), None, True
    if problem is not None:
        raise problem
    rows = [*document["models"], *document["unregistered"]]
    if wish.model and document["left_out"].get("models"):
        raise ConfigError(
            f"model {wish.model!r} has more fingerprints than a server can tell at once",
            hint="prune while no server runs, or one by one with --fingerprint",
        )
    if prefix is not None:
        _check_both(rows, model, prefix)
    return rows, is_live


def _check_both(rows: list[dict[str, Any]], model: str | None, prefix: str) -> None:
    """That what a prefix has found is a fingerprint, and one of the model."""
    from lmcache_persist.server import naming

    for row in rows:
        name, found = row.get("name"), str(row["fingerprint"])
        if not found.startswith(prefix):
            raise ConfigError(
                f"{prefix!r} is the name of a model here, expected a fingerprint",
                hint="name the model with --model, or give more digits",
            )
        if model is None:
            continue
        try:
            naming.meant({found: name} if name else {}, [found], model)
        except ConfigError as error:
            raise ConfigError(
                f"fingerprint {found[:12]} is of model {name or 'unknown'!r}, expected {model!r}",
                hint="selectors combine: give one of both",
            ) from error


def _selection(
    names: dict[str, Any] | None, stale: bool, stored_before: int | None, down_to_bytes: int | None
) -> Selection:
    from lmcache_persist.identity import Fingerprint
    from lmcache_persist.store.selection import Selection

    meant = None if names is None else frozenset(map(Fingerprint, names))
    return Selection(meant, stale, stored_before, down_to_bytes)


def _follow(steps: prune_steps.Steps, ticker: Ticker, dry_run: bool) -> tuple[Picked, bool]:
    """What was pruned, or would be, and whether that is all."""
    from lmcache_persist.store.selection import Picked

    total, complete = Picked(), True
    try:
        with contextlib.closing(steps):
            for step in steps:
                total.add_all(step)
                ticker.show(f"{_verb(dry_run)} {_amount(total)} so far")
    except KeyboardInterrupt:
        complete = False
        if dry_run or total.amounts:
            ticker.clear()
            say(f"interrupted: {_verb(dry_run)} {_amount(total)}; the rest is as it was")
    except PersistError:
        if total.amounts:
            ticker.clear()
            say(f"{_verb(dry_run)} {_amount(total)} before this:")
        raise
    return total, complete


def _agreement(names: dict[str, Any], ticker: Ticker, *, yes: bool) -> Agree:
    """Asks about what would go, unless that is nothing. With ``yes`` it is not counted first."""
    from lmcache_persist.server.losses import per_model

    ask = confirmation("prune", yes=yes)

    def agree(would: Iterator[Picked]) -> bool:
        if yes:
            return True
        total, whole = _count(would, ticker)
        if whole and not total.amounts and not total.pool_chunks:
            return False
        known = {fingerprint: name for fingerprint, name in names.items() if name}
        ask([_loss(total, whole), *per_model(_losses(total), known)])
        return True

    return agree


def _count(would: Iterator[Picked], ticker: Ticker) -> tuple[Picked, bool]:
    """What would go, and whether that is all of it: counting ends in time."""
    from lmcache_persist.store.selection import Picked

    total, until_s = Picked(), time.monotonic() + PREVIEW_S
    try:
        for step in would:
            total.add_all(step)
            ticker.show(f"counting: {_amount(total)} so far; Ctrl-C changes nothing")
            if time.monotonic() >= until_s:
                break
    except KeyboardInterrupt:
        ticker.clear()
        say(f"interrupted: {NOTHING_CHANGED}")
        raise
    ticker.clear()
    return total, total.cursor is None


def _loss(total: Picked, whole: bool) -> str:
    if not whole:
        return (
            f"this throws away at least {_amount(total)}, and what was not reached in"
            f" {PREVIEW_S:g} s of counting (--dry-run counts it all)"
        )
    if not total.amounts:
        return f"this throws away {total.pool_chunks} chunks that only the server's pool has"
    return f"this throws away {_amount(total)}"


def _verb(dry_run: bool) -> str:
    return "would prune" if dry_run else "pruned"


def _losses(total: Picked) -> list[Loss]:
    from lmcache_persist.server.losses import Loss

    return [
        Loss(fingerprint, amount.chunks, amount.objects, amount.bytes, stale)
        for (fingerprint, stale), amount in sorted(total.amounts.items())
    ]


def _amount(total: Picked) -> str:
    from lmcache_persist.server.losses import amount_of

    return amount_of(_losses(total))


def _write(
    names: dict[str, Any], total: Picked, dry_run: bool, *, complete: bool, as_json: bool
) -> None:
    rows = _losses(total)
    if as_json:
        write_json(
            {
                "dry_run": dry_run,
                "complete": complete,
                "chunks": sum(row.chunks for row in rows),
                "objects": sum(row.objects for row in rows),
                "bytes": sum(row.nbytes for row in rows),
                "models": [
                    {
                        "name": names.get(row.fingerprint),
                        "fingerprint": row.fingerprint,
                        "stale": row.stale,
                        "chunks": row.chunks,
                        "objects": row.objects,
                        "bytes": row.nbytes,
                    }
                    for row in rows
                ],
            }
        )
        return
    if not rows:
        write("nothing to prune" if complete else "nothing was pruned")
        return
    write_table(
        _verb(dry_run),
        (
            Column("model", Kind.NAME),
            Column("fingerprint", Kind.NAME, least=12),
            Column("stale", Kind.NAME, drop=1),
            Column("chunks", Kind.NUMBER, drop=3),
            Column("objects", Kind.NUMBER, drop=2),
            Column("size", Kind.NUMBER),
        ),
        [
            (
                names.get(row.fingerprint) or "?",
                row.fingerprint[:12],
                "yes" if row.stale else "no",
                row.chunks,
                row.objects,
                approximate_size(row.nbytes),
            )
            for row in rows
        ],
    )
    write(f"{plain(_verb(dry_run))} {_amount(total)}")
