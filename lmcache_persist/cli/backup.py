"""``backup``: manifest and store of a data dir as one pair, also while its server runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from lmcache_persist.cli.connection import seconds
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.cli.live import absolute, by_server, holding_server
from lmcache_persist.cli.options import AnswerTimeout, DataDir, Json
from lmcache_persist.cli.output import ending, plain, say, write, write_json
from lmcache_persist.cli.ticker import CopyTicker
from lmcache_persist.errors import (
    DataDirLocked,
    MalformedMessage,
    RequestTimeout,
    StoreGone,
    TransportError,
    Unbound,
)
from lmcache_persist.printable import command
from lmcache_persist.units import approximate_size, counted

if TYPE_CHECKING:
    from lmcache_persist.connector import CacheClient
    from lmcache_persist.protocol import Reply
    from lmcache_persist.server.backup import Source
    from lmcache_persist.store.pieces import Part

T = TypeVar("T", bound="Reply")

_MANIFEST_TRIES = 20


@ending
def backup(
    data_dir: DataDir,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Folder to make; absent.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every digest of the copy afterwards.")
    ] = False,
    timeout: AnswerTimeout = "30",
    json_output: Json = False,
) -> int:
    """Copy manifest and store into a new folder, from which restore makes a data dir.

    A live server hands them out piece by piece and goes on serving. The copy holds what is
    good and not stale, and takes no more room than that.

    Example: lmcache-persist backup /var/lib/kv /backup/kv-monday
    """
    from lmcache_persist.server.backup import back_up
    from lmcache_persist.server.offline import check_apart

    root = absolute(data_dir)
    target = Path(os.path.abspath(os.path.expanduser(dest)))
    check_apart(root, target)
    with _told_if_interrupted(target), _source(root, seconds(timeout)) as source:
        with CopyTicker("copied", source.held.bytes) as ticker:
            made = back_up(
                source, target, say=lambda text: say(plain(text)), on_chunk=ticker.on_chunk
            )
        left_out_objects = max(0, source.held.objects - made.objects)
        live, bad_chunks = isinstance(source, _LiveSource), source.bad_chunks
        if not live:  # nothing else can happen to what lies still
            bad_chunks = made.left_out_chunks
    violations = _verify(target) if verify else []
    for line in violations:
        say(f"bad: {plain(line)}")
    if json_output:
        write_json(
            {
                "backup": str(target),
                **asdict(made),
                "left_out_objects": left_out_objects,
                "left_out_bad_chunks": bad_chunks,
                "verified": not violations if verify else None,
            }
        )
    else:
        size = approximate_size(made.bytes)
        write(
            f"backup {plain(target)}: {counted(made.objects, 'object')}, {size}, chunk size"
            f" {made.chunk_size}"
        )
        if made.left_out_chunks:
            objects = counted(left_out_objects, "object")
            write(f"left out: {objects} ({counted(made.left_out_chunks, 'chunk')})")
            _say_why(root, bad_chunks, made.left_out_chunks - bad_chunks, live=live)
        if verify and not violations:
            write("all good")
    return ExitCode.BAD_DATA if violations else ExitCode.OK


def _say_why(root: Path, bad_chunks: int, gone_chunks: int, *, live: bool) -> None:
    """Why chunks are left out: of those that are bad a backup drops nothing but a server does."""
    if gone_chunks > 0:
        say(f"note: {counted(gone_chunks, 'chunk')} left the server's store meanwhile")
    if not bad_chunks:
        return
    if live:
        say(
            f"note: {counted(bad_chunks, 'chunk')} proved bad; the server drops what is bad and"
            " counts it (corrupt_chunks_total): it is a miss from now on, until it is stored again"
        )
        return
    again = command("verify", root, "--repair")
    say(f"hint: {counted(bad_chunks, 'chunk')} proved bad; to drop what is bad: {plain(again)}")


@contextlib.contextmanager
def _told_if_interrupted(target: Path) -> Iterator[None]:
    """Around the making of a backup: Ctrl-C says what is left of it, which is nothing."""
    from lmcache_persist.server.backup import partial_name

    was_there, partial = os.path.lexists(target), partial_name(target)
    try:
        yield
    except KeyboardInterrupt:
        if not was_there and os.path.lexists(target):
            say(f"interrupted: backup {plain(target)} is whole")
        elif os.path.lexists(partial):
            say(
                f"interrupted: {plain(partial)} is left, which is no backup; the next one of that"
                " name removes it"
            )
        else:
            say("interrupted: nothing was left behind")
        raise


def _verify(target: Path) -> list[str]:
    from lmcache_persist.server.offline import check

    try:
        return [str(violation) for violation in check(target)]
    except KeyboardInterrupt:
        again = command("verify", target)
        say(f"interrupted: backup {plain(target)} is whole, but not verified: {plain(again)}")
        raise


@contextlib.contextmanager
def _source(root: Path, timeout_s: float) -> Iterator[Source]:
    from lmcache_persist.server.backup import FilesSource

    with contextlib.ExitStack() as stack:
        try:
            source: Source = stack.enter_context(FilesSource.open(root))
        except DataDirLocked as error:
            if not by_server(error):
                raise
            client = stack.enter_context(holding_server(root, timeout_s, "backup"))
            source = _LiveSource(client, timeout_s)
        yield source


class _LiveSource:
    """A server that hands out what it has."""

    def __init__(self, client: CacheClient, timeout_s: float) -> None:
        from lmcache_persist.protocol import AdminBackup, StorePiece
        from lmcache_persist.server.backup import Held

        self._client = client
        self._timeout_s = timeout_s
        try:
            client.flush(timeout_s)
        except StoreGone as error:
            say(f"note: {plain(error.message)}; this saves what the server still has")
        except TransportError as error:
            say(f"note: not everything that is committed is on disk yet: {plain(error.message)}")
        first = _asked(client.request(AdminBackup, timeout_s=timeout_s), StorePiece)
        binding = client.binding
        if binding is None:
            raise Unbound("the server is not bound yet: there is nothing to back up")
        self.binding = binding
        self._cursor = first.cursor
        self.bad_chunks = 0
        self.held = Held(
            first.chunks,
            first.objects,
            first.object_bytes,
            first.used_bytes,
            first.capacity_bytes,
        )

    def parts(self) -> Iterator[list[Part]]:
        """The store, in pieces."""
        from lmcache_persist.protocol import AdminBackup, StorePiece
        from lmcache_persist.store.pieces import Part

        cursor = self._cursor
        while cursor:
            reply = self._client.request(AdminBackup, timeout_s=self._timeout_s, cursor=cursor)
            piece = _asked(reply, StorePiece)
            self.bad_chunks += piece.bad_chunks
            yield [Part(part.record, part.first, part.extents) for part in piece.parts]
            if piece.cursor and piece.cursor <= cursor:
                raise MalformedMessage("the server's backup does not go forward")
            cursor = piece.cursor

    def manifest(self) -> bytes:
        """The manifest of one moment, however often it changes meanwhile."""
        for _ in range(_MANIFEST_TRIES):
            data = self._manifest()
            if data is not None:
                return data
        raise RequestTimeout("the server's manifest changed all the while it was copied")

    def _manifest(self) -> bytes | None:
        from blake3 import blake3

        from lmcache_persist.protocol import AdminManifest, ManifestPiece

        data = b""
        while True:
            reply = self._client.request(AdminManifest, timeout_s=self._timeout_s, offset=len(data))
            piece = _asked(reply, ManifestPiece)
            data += piece.data
            if not piece.data or len(data) >= piece.total_bytes:
                return data if blake3(data).hexdigest() == piece.digest else None


def _asked(reply: object, kind: type[T]) -> T:
    if not isinstance(reply, kind):
        raise MalformedMessage(
            f"the server answered with {type(reply).__name__}, expected {kind.__name__}"
        )
    return reply
