"""``verify``: whether everything in a data dir is as it was written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from lmcache_persist.cli.connection import ask_json, connected, seconds
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.inspect import holder_of, reachable_endpoint
from lmcache_persist.cli.output import ending, plain, write, write_json
from lmcache_persist.errors import DataDirLocked, MalformedMessage, ServerUnreachable


@ending
def verify(
    data_dir: Annotated[str, typer.Argument(metavar="DIR", help="A server's data dir.")],
    timeout: Annotated[
        str, typer.Option(metavar="SECONDS", help="For each answer of a live server.")
    ] = "30",
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check every digest, record, key, total and cross-reference. Changes nothing.

    A live server checks itself; else the files are read, and a server that starts
    meanwhile waits. Exit code 1 if anything is bad.

    Example: lmcache-persist verify /var/lib/kv
    """
    root = Path(os.path.abspath(os.path.expanduser(data_dir)))
    violations: list[dict[str, str]] = []
    counter = _Counter()
    for found in _findings(root, seconds(timeout), counter):
        violations.append(found)
        if not json_output:
            write(f"{plain(found['where'])}: {plain(found['what'])}")
    if json_output:
        write_json(
            {
                "ok": not violations,
                "checked_objects": counter.objects,
                "violations": violations,
            }
        )
    else:
        verdict = f"{len(violations)} violations" if violations else "all good"
        write(f"{verdict}, {counter.objects} objects checked")
    return ExitCode.BAD_DATA if violations else ExitCode.OK


class _Counter:
    objects = 0


def _findings(root: Path, timeout_s: float, counter: _Counter) -> Iterator[dict[str, str]]:
    try:
        yield from _offline(root, counter)
    except DataDirLocked:  # raised before anything is read
        yield from _live(root, timeout_s, counter)


def _offline(root: Path, counter: _Counter) -> Iterator[dict[str, str]]:
    from lmcache_persist.server.offline import Progress, check

    progress = Progress()
    for violation in check(root, progress=progress):
        yield {"where": violation.where, "what": violation.what}
    counter.objects = progress.checked_objects


def _live(root: Path, timeout_s: float, counter: _Counter) -> Iterator[dict[str, str]]:
    from lmcache_persist.protocol import AdminVerify

    holder = holder_of(root)
    with connected(reachable_endpoint(root, holder), timeout_s, "verify") as client:
        if client.boot_id != holder.boot_id:
            raise ServerUnreachable(
                f"the server at {holder.endpoint} has boot id {client.boot_id}, expected"
                f" {holder.boot_id}, which holds {root}"
            )
        cursor: bytes | None = b""
        while cursor is not None:
            reply = ask_json(client, AdminVerify, timeout_s, cursor=cursor)
            found, checked, following = _decode(reply)
            counter.objects += checked
            yield from found
            if following is not None and following <= cursor:
                raise MalformedMessage("the server's verify does not go forward")
            cursor = following


def _decode(reply: dict[str, Any]) -> tuple[list[dict[str, str]], int, bytes | None]:
    try:
        found = [
            {"where": str(item["where"]), "what": str(item["what"])} for item in reply["violations"]
        ]
        cursor = None if reply["cursor"] is None else bytes.fromhex(reply["cursor"])
        return found, int(reply["checked_objects"]), cursor
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedMessage(f"the server's verify cannot be decoded: {error}") from error
