"""A store in pieces, for a copy that somebody else makes: cut here, put together there.

Cut in the order of keys, which no use changes, so that every chunk is met once and none
twice, however busy the store is. Each piece is read in short transactions: nothing is kept
from being reused meanwhile. What is stored after the beginning is left out; what is evicted
before its turn is left out, too.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from lmcache_persist.errors import MalformedMessage, ObjectCorrupt
from lmcache_persist.hashing import EXTENT_DIGEST_BYTES, extent_digest, extent_lengths
from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import CHUNK_KEY_BYTES, ChunkKey, ChunkRecord, Place

PIECE_BYTES = 3 << 20
"""Bytes of extents in one piece: three of them, so that a message holds it."""
PIECE_RECORD_BYTES = 512 << 10
BUDGET_S = 0.1
"""Seconds of looking per piece."""
RECORDS_PER_LOOK = 16

_CURSOR = struct.Struct(f">{CHUNK_KEY_BYTES}sQQQ")
CURSOR_BYTES = _CURSOR.size


class Source(Protocol):
    """What can be cut: a tier that is served, or one that is not."""

    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkRecord | None]:
        """See :class:`~.base.DiskTier`."""

    def scan(
        self, after: bytes, limit: int, bad: list[ChunkKey] | None = None
    ) -> list[ChunkRecord]:
        """See :class:`~.base.DiskTier`."""

    def read_part(self, record: ChunkRecord, place: Place, index: int, buffer: memoryview) -> bool:
        """See :class:`~.base.DiskTier`."""

    def last_serial(self) -> int:
        """See :class:`~.base.DiskTier`."""


class Part(NamedTuple):
    """Some consecutive extents of a chunk, all objects in a row.

    Attributes:
        record: as it is stored.
        first: number of the first extent.
        extents: their bytes.
    """

    record: bytes
    first: int
    extents: list[bytes]


_BEHIND = 2**64 - 1


class _Cursor(NamedTuple):
    """Where to go on: in chunk ``key`` with ``serial`` at extent ``first``, or behind it.

    Packed, they grow from one piece to the next.
    """

    key: bytes
    last_serial: int
    serial: int = _BEHIND
    first: int = 0

    def pack(self) -> bytes:
        return _CURSOR.pack(*self)


@dataclass(slots=True)
class Piece:
    """What one step cut.

    Attributes:
        parts: of chunks.
        cursor: where to go on; empty at the end.
        bad: chunks that proved bad on the way, and the serials of these copies.
        bad_records: chunks on the way whose records are bad already.
    """

    parts: list[Part] = field(default_factory=list)
    cursor: bytes = b""
    bad: dict[ChunkKey, int] = field(default_factory=dict)
    bad_records: int = 0

    @property
    def bad_chunks(self) -> int:
        """All that are bad; each is met in one piece only."""
        return len(self.bad) + self.bad_records


def beginning(source: Source) -> bytes:
    """The cursor of the first piece."""
    return _Cursor(bytes(CHUNK_KEY_BYTES), source.last_serial()).pack()


def cut(source: Source, cursor: bytes) -> Piece:
    """The piece at ``cursor``; takes a bounded while.

    Raises:
        ValueError: the cursor is none.
        StoreIOError: the disk failed.
    """
    if len(cursor) != CURSOR_BYTES:
        raise ValueError(f"cursor has {len(cursor)} bytes, expected {CURSOR_BYTES}")
    at = _Cursor(*_CURSOR.unpack(cursor))
    piece, deadline = _Cut(), time.monotonic() + BUDGET_S
    if at.serial != _BEHIND:
        [record] = source.find([ChunkKey(at.key)])
        if record is not None and record.serial == at.serial:
            first = piece.take(source, record, at.first)
            if first is not None:
                return Piece(piece.parts, at._replace(first=first).pack(), piece.bad)
    after = at.key
    while not piece.full:
        records = source.scan(after, RECORDS_PER_LOOK, piece.bad_records)
        for record in records:
            if piece.full:
                break
            if record.serial <= at.last_serial:
                first = piece.take(source, record, 0)
                if first is not None:
                    on = _Cursor(record.key, at.last_serial, record.serial, first)
                    return piece.ended(on.pack())
            after = record.key
        else:
            if len(records) < RECORDS_PER_LOOK:
                return piece.ended(b"")
        if time.monotonic() >= deadline:
            break
    return piece.ended(_Cursor(after, at.last_serial).pack())


def extents_of(record: ChunkRecord) -> list[tuple[Place, int, int]]:
    """Place, index and length of each extent of a chunk, in the order of its digests."""
    return [
        (place, index, length)
        for place, entry in record.objects.table.entries.items()
        for index, length in enumerate(extent_lengths(entry.nbytes))
    ]


class _Cut:
    """The piece that is being cut."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.bad: dict[ChunkKey, int] = {}
        self.bad_records: list[ChunkKey] = []
        self.nbytes = 0
        self.record_bytes = 0

    @property
    def full(self) -> bool:
        """Whether nothing more goes into it."""
        return self.nbytes >= PIECE_BYTES or self.record_bytes >= PIECE_RECORD_BYTES

    def ended(self, cursor: bytes) -> Piece:
        """The piece, which goes on at ``cursor``: bad records behind that are met again."""
        met = {key for key in self.bad_records if not cursor or key <= cursor[:CHUNK_KEY_BYTES]}
        return Piece(self.parts, cursor, self.bad, len(met - self.bad.keys()))

    def take(self, source: Source, record: ChunkRecord, first: int) -> int | None:
        """Extents of a chunk from ``first`` on; where to go on, None if the chunk is done.

        A chunk that proves bad, or was evicted, is done: what was taken of it is never
        complete.
        """
        part = Part(fmt.encode_record(record), first, [])
        for number, (place, index, length) in enumerate(extents_of(record)):
            if number < first:
                continue
            if self.nbytes + length > PIECE_BYTES and self.nbytes:
                return number
            buffer = bytearray(length)
            try:
                if not source.read_part(record, place, index, memoryview(buffer)):
                    return None
            except ObjectCorrupt:
                self.bad[record.key] = record.serial
                return None
            if not part.extents:
                self.parts.append(part)
                self.record_bytes += len(part.record)
            part.extents.append(bytes(buffer))
            self.nbytes += length
        return None


class Assembler:
    """Puts chunks together again.

    Attributes:
        incomplete: chunks of which the rest never came: evicted or bad at the source.
    """

    def __init__(self) -> None:
        self.incomplete = 0
        self._record: ChunkRecord | None = None
        self._encoded = b""
        self._extents: list[bytes] = []

    def feed(self, parts: Sequence[Part]) -> Iterator[tuple[ChunkRecord, dict[Place, bytes]]]:
        """Take the parts of the next piece; yields chunks as they are complete.

        Raises:
            MalformedMessage: a part is not what its record says.
        """
        for part in parts:
            if part.first == 0:
                self.end()
                self._begin(part.record)
            record = self._record
            if record is None or part.record != self._encoded or part.first != len(self._extents):
                raise MalformedMessage("a part of a chunk does not follow the one before it")
            digests = record.objects.digests
            for extent in part.extents:
                at = EXTENT_DIGEST_BYTES * len(self._extents)
                if extent_digest(extent) != digests[at : at + EXTENT_DIGEST_BYTES]:
                    raise MalformedMessage(f"an extent of chunk {record.key.hex()} is altered")
                self._extents.append(extent)
            if len(self._extents) == record.objects.table.num_digests:
                self._record = None
                yield record, self._contents(record)

    def end(self) -> None:
        """Nothing more of the chunk that is not complete yet."""
        if self._record is not None:
            self.incomplete += 1
        self._record = None

    def _begin(self, encoded: bytes) -> None:
        try:
            self._record = fmt.decode_record(encoded)
        except fmt.FormatError as error:
            raise MalformedMessage(f"a record cannot be decoded: {error}") from error
        self._encoded, self._extents = encoded, []

    def _contents(self, record: ChunkRecord) -> dict[Place, bytes]:
        contents = {}
        at = 0
        for place, entry in record.objects.table.entries.items():
            contents[place] = b"".join(self._extents[at : at + entry.num_digests])
            at += entry.num_digests
            if len(contents[place]) != entry.nbytes:
                raise MalformedMessage(f"an object of chunk {record.key.hex()} has a wrong length")
        self._extents = []
        return contents
