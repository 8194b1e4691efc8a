"""``verify``: whether everything in a data dir is as it was written, and mending it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmcache_persist import datadir
from lmcache_persist.cli.connection import ask_json, seconds
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.live import absolute, by_server, holding_server
from lmcache_persist.cli.options import AnswerTimeout, DataDir, Json
from lmcache_persist.cli.output import ending, plain, say, write, write_json
from lmcache_persist.cli.progress import ProgressLine
from lmcache_persist.errors import DataDirLocked, MalformedMessage
from lmcache_persist.printable import command
from lmcache_persist.units import counted

if TYPE_CHECKING:
    from lmcache_persist.store.check import Progress

MAX_KEPT = 100_000
"""Violations of a JSON document; the others are counted. Text is not kept at all."""
_MENDING_POLL_S = 0.25
# The whole of it, as the check of files names it.
_MANIFEST = "manifest"
_STORE = ("store data file", "store")

Found = dict[str, Any]
"""``where`` and ``what``; with ``--repair`` also ``repaired``: what was done, or None."""


@ending
def verify(
    data_dir: DataDir,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Drop what is bad, put counters, totals and order right."),
    ] = False,
    timeout: AnswerTimeout = "30",
    json_output: Json = False,
) -> int:
    """Check every digest, record, key, total and cross-reference.

    A live server checks itself; else the files are read, and a server that starts meanwhile
    waits. Without --repair nothing is changed. Exit code 1 if anything is bad, with --repair
    only if something is left as it is.

    Example: lmcache-persist verify /var/lib/kv

    Example: lmcache-persist verify /var/lib/kv --repair
    """
    check = _Check(absolute(data_dir), seconds(timeout), repair=repair)
    kept: list[Found] = []
    try:
        with check.line, contextlib.closing(check.run()) as findings:
            for found in findings:
                if not json_output:
                    check.line.clear()
                    write(_text(found))
                elif len(kept) < MAX_KEPT:
                    kept.append(found)
    except KeyboardInterrupt:
        found_so_far = counted(check.found, "violation")
        say(f"interrupted: {counted(check.objects, 'object')} checked, {found_so_far} so far")
        raise
    for note in check.notes:
        say(f"note: {plain(note)}")
    bad = check.left if repair else check.found
    if json_output:
        write_json(_document(check, kept, repair=repair))
    else:
        write(_verdict(check, repair=repair))
    if check.found and not repair:
        say(f"hint: {plain(check.way_out())}")
    return ExitCode.BAD_DATA if bad else ExitCode.OK


def _text(found: Found) -> str:
    text = f"{plain(found['where'])}: {plain(found['what'])}"
    if "repaired" not in found:
        return text
    return f"{text} -> {plain(found['repaired'] or 'left as it is')}"


def _verdict(check: _Check, *, repair: bool) -> str:
    said = counted(check.found, "violation") if check.found else "all good"
    if repair and check.found:
        said += f", {check.found - check.left} repaired, {check.left} left"
    return f"{said}, {counted(check.objects, 'object')} checked"


def _document(check: _Check, kept: list[Found], *, repair: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "ok": not (check.left if repair else check.found),
        "checked_objects": check.objects,
        "violations": kept,
    }
    if repair:
        document["repaired"] = check.found - check.left
    if check.notes:
        document["notes"] = check.notes
    if len(kept) < check.found:
        document["violations_left_out"] = check.found - len(kept)
    return document


class _Check:
    """One check, from files or by the server.

    Attributes:
        found, left: violations, and those that nothing was done about.
        objects: looked at so far.
        notes: what could not be told.
        line: how far it is.
    """

    def __init__(self, root: Path, timeout_s: float, *, repair: bool) -> None:
        self._root = root
        self._timeout_s = timeout_s
        self._repair = repair
        self.found = self.left = self.objects = 0
        self._manifest_lost = self._store_broken = self._offline_found = False
        self.notes: list[str] = []
        self.line = ProgressLine("repair" if repair else "verify")

    def run(self) -> Generator[Found, None, None]:
        """What is wrong, as it is found."""
        for found in self._findings():
            self.found += 1
            self.left += found.get("repaired") is None
            self._manifest_lost |= found["where"] == _MANIFEST
            self._store_broken |= found["where"] in _STORE
            yield found

    def way_out(self) -> str:
        """What helps against what was found."""
        from lmcache_persist.server.backup_file import is_backup
        from lmcache_persist.server.offline import has_data_file, start_refusal
        from lmcache_persist.server.recovery import set_aside_hint

        if is_backup(self._root):
            return _way_out_of_backup(self._root, manifest_lost=self._manifest_lost)
        if self._manifest_lost:
            again = command("recover", self._root)
            return f"put the manifest back, or rebuild it with: {again}"
        # A repair would be refused as a start is, and the refusal knows the way out.
        refusal = start_refusal(self._root) if self._offline_found else None
        if refusal is not None and refusal.hint:
            return refusal.hint
        if self._store_broken and has_data_file(datadir.DataDir(self._root).store):
            return f"no bad byte is ever served; {set_aside_hint(self._root)}"
        return (
            "nothing was changed, and no bad byte is ever served; to drop what is bad and put the"
            f" rest right: {command('verify', self._root, '--repair')}"
        )

    def _findings(self) -> Iterator[Found]:
        try:
            yield from self._offline()
        except DataDirLocked as error:  # raised before anything is read
            if self._repair and not by_server(error):
                raise
            yield from self._live()

    def _offline(self) -> Iterator[Found]:
        progress = self._progress()
        self.line.update(0, None, "the trees first")
        try:
            if self._repair:
                from lmcache_persist.server.repair import repair

                for mended in repair(self._root, progress=progress):
                    violation = mended.violation
                    yield {
                        "where": violation.where,
                        "what": violation.what,
                        "repaired": mended.done,
                    }
            else:
                from lmcache_persist.server.offline import check

                for violation in check(self._root, progress=progress):
                    self._offline_found = True
                    yield {"where": violation.where, "what": violation.what}
        finally:
            self.objects = progress.checked_objects

    def _progress(self) -> Progress:
        from lmcache_persist.store.check import Progress

        line = self.line

        class Shown(Progress):
            def advance(self, objects: int, nbytes: int) -> None:
                super().advance(objects, nbytes)
                line.update(self.checked_bytes, self.total_bytes)

        return Shown()

    def _live(self) -> Iterator[Found]:
        from lmcache_persist.protocol import AdminVerify

        checked = 0
        with holding_server(self._root, self._timeout_s, "verify") as client:
            cursor: bytes | None = b""
            while cursor is not None:
                reply = ask_json(
                    client, AdminVerify, self._timeout_s, cursor=cursor, repair=self._repair
                )
                part = _decode(reply, repair=self._repair)
                self.objects += part.objects
                checked += part.nbytes
                self.notes += part.notes
                self.line.update(checked, part.total_bytes or None)
                yield from part.found
                if part.cursor is not None and part.cursor <= cursor:
                    if not self._repair or part.cursor < cursor:
                        raise MalformedMessage("the server's verify does not go forward")
                    self.line.update(checked, None, "the server mends its order and its sums")
                    time.sleep(_MENDING_POLL_S)
                cursor = part.cursor


def _way_out_of_backup(backup: Path, *, manifest_lost: bool) -> str:
    from lmcache_persist.server.backup_file import rebuild_hint
    from lmcache_persist.server.restore import why_not

    problem = why_not(backup)
    if problem is not None:
        return f"a backup is never mended, and this one cannot be restored: {problem.message}"
    if manifest_lost:
        return f"a backup is never mended; {rebuild_hint(backup)}"
    again = command("restore", backup, "DIR")
    return f"a backup is never mended; a restore leaves out what is bad: {again}"


class _Part:
    """An answer of a live server, taken apart."""

    def __init__(self, reply: dict[str, Any], *, repair: bool) -> None:
        keys = ("where", "what", "repaired") if repair else ("where", "what")
        self.found = [
            {key: None if item[key] is None else str(item[key]) for key in keys}
            for item in reply["violations"]
        ]
        self.cursor = None if reply["cursor"] is None else bytes.fromhex(reply["cursor"])
        self.objects = int(reply["checked_objects"])
        self.nbytes = int(reply["checked_bytes"])
        self.total_bytes = int(reply["total_bytes"] or 0)
        self.notes = [str(note) for note in reply["notes"]]


def _decode(reply: dict[str, Any], *, repair: bool) -> _Part:
    try:
        return _Part(reply, repair=repair)
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedMessage(f"the server's verify cannot be decoded: {error}") from error
