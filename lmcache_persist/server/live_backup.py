"""``backup`` of a live server: it hands out its store and its manifest piece by piece.

Who asks writes them where he may write; the server opens no file for him. One piece is read
at a time, in short transactions, so that neither lookups nor the writer notice.
"""

from __future__ import annotations

import logging

from blake3 import blake3

from lmcache_persist import protocol
from lmcache_persist.errors import MalformedMessage, Unbound
from lmcache_persist.server.gate import Gate
from lmcache_persist.server.state import ServerState
from lmcache_persist.server.wire import Answer
from lmcache_persist.store import pieces
from lmcache_persist.store.base import DiskTier
from lmcache_persist.store.throttle import Throttle
from lmcache_persist.units import counted

logger = logging.getLogger(__name__)

MANIFEST_PIECE_BYTES = 2 << 20


class LiveBackup:
    """Answers ``admin.backup`` and ``admin.manifest``.

    Threads: the loop; the reading is done elsewhere.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._gate = Gate("back up")
        self._log, self._total_log = Throttle(logger), Throttle(logger)
        self._found = self._said = 0  # bad chunks of the backup that is made

    def store(self, message: protocol.AdminBackup, answer: Answer) -> None:
        """Begin, or cut the piece at the cursor; a chunk that proves bad is dropped.

        Raises:
            Unbound: there is nothing to back up.
            MalformedMessage: the cursor is none.
            StoreIOError: too many requests wait already.
        """
        state, disk, cursor = self._state, self._state.disk, message.cursor
        if state.binding is None:
            raise Unbound("this server is not bound yet: there is nothing to back up")
        if cursor and len(cursor) != pieces.CURSOR_BYTES:
            raise MalformedMessage(
                f"cursor has {len(cursor)} bytes, expected {pieces.CURSOR_BYTES} or none"
            )
        if not cursor:
            self._found = self._said = 0
            self._gate.pass_through(
                lambda work, then: state.run(state.readers, work, then),
                lambda: _beginning(disk),
                answer,
                answer,
            )
            return

        def then(piece: pieces.Piece) -> None:
            if piece.bad:
                state.counters.corrupt_chunks += len(piece.bad)
                state.writer.drop(piece.bad)
            self._tell(piece)
            parts = [protocol.StorePart(*part) for part in piece.parts]
            answer(
                protocol.StorePiece(parts=parts, cursor=piece.cursor, bad_chunks=piece.bad_chunks)
            )

        self._gate.pass_through(
            lambda work, then: state.run(state.readers, work, then),
            lambda: pieces.cut(disk, cursor),
            answer,
            then,
        )

    def _tell(self, piece: pieces.Piece) -> None:
        """Say at once that something is bad, and at the end how much, as who asked counts it."""
        self._found += piece.bad_chunks
        if piece.bad_chunks and self._found == piece.bad_chunks:
            first = next((f", the first {key.hex()}" for key in piece.bad), "")
            self._log.warning(
                f"backup found {counted(piece.bad_chunks, 'bad chunk')}{first}: left out of it, and"
                " dropped here"
            )
            self._said = self._found
        if not piece.cursor and self._found > self._said:
            self._total_log.warning(f"backup found {counted(self._found, 'bad chunk')} in all")

    def manifest(self, message: protocol.AdminManifest, answer: Answer) -> None:
        """Some of the manifest's bytes as of now; the digest tells whether it has changed."""
        state = self._state

        def work() -> protocol.ManifestPiece:
            data = state.manifest.serialize()
            return protocol.ManifestPiece(
                data=data[message.offset : message.offset + MANIFEST_PIECE_BYTES],
                total_bytes=len(data),
                digest=blake3(data).hexdigest(),
            )

        self._gate.pass_through(
            lambda work, then: state.run(state.clerk, work, then), work, answer, answer
        )


def _beginning(disk: DiskTier) -> protocol.StorePiece:
    usage = disk.usage()
    return protocol.StorePiece(
        cursor=pieces.beginning(disk),
        chunks=usage.chunks,
        objects=usage.objects,
        object_bytes=usage.bytes,
        used_bytes=usage.used_bytes,
        capacity_bytes=usage.capacity_bytes,
    )
