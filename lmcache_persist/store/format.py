"""What is on disk: keys and values of the store's databases. Pure.

============  ==================================  ===========================================
database      key                                 value
============  ==================================  ===========================================
``meta``      a name                              see below
``chunks``    chunk key (64)                      record
``extents``   serial u64, rank u16, group u16,    up to EXTENT_BYTES of an object
              index u32, all big-endian
``order``     order u64, big-endian               chunk key
``totals``    binding id (32), fingerprint (32)   chunks, objects, bytes, each u64
============  ==================================  ===========================================

A record is, little-endian: checksum u64 (XXH3-64 of all that follows), serial, order,
hits, stored_at u64 each, chunk key (64), binding id (32), number of objects u16,
reserved u16, table (rank u16, group u16, bytes u64 per object), digests (16 per extent).

``meta`` holds JSON with a checksum in front: ``store`` (format version, uuid), ``stamp`` (the whole
binding), ``rebind`` (the id of the binding that the stamp replaced, until the manifest has
followed), ``counters``, ``shutdown`` (present only after a clean one), ``mode``, ``unsettled``
(present while what lost records left behind is not removed yet); and ``probe``, plain bytes.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import xxhash

from lmcache_persist.hashing import EXTENT_DIGEST_BYTES
from lmcache_persist.store.base import CHUNK_KEY_BYTES, ChunkKey, ChunkRecord
from lmcache_persist.store.objects import (
    ENTRY_BYTES,
    ObjectTable,
    Place,
    StoredObjects,
    decode_table,
)

FORMAT_VERSION = 1
"""Of everything in this module and of LMDB's data format (0.9)."""

META_STORE = b"store"
META_STAMP = b"stamp"
META_COUNTERS = b"counters"
META_REBIND = b"rebind"
META_SHUTDOWN = b"shutdown"
META_MODE = b"mode"
META_PROBE = b"probe"
META_UNSETTLED = b"unsettled"
META_GROWN = b"grown"

PROBE_BYTES = 4096
"""Large enough to get pages of its own, as extents do."""

BINDING_ID_BYTES = 32
NO_BINDING = ""

_RECORD = struct.Struct("<QQQQ64s32sHH")
_CHECKSUM = struct.Struct("<Q")
_EXTENT_KEY = struct.Struct(">QHHI")
EXTENT_KEY_BYTES = _EXTENT_KEY.size
_ORDER_KEY = struct.Struct(">Q")
_TOTALS = struct.Struct("<QQQ")


class FormatError(ValueError):
    """Bytes on disk are not what was written; the caller says what becomes of it."""


def _checksum(data: bytes) -> bytes:
    return _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))


def binding_bytes(binding_id: str) -> bytes:
    """A binding id as keys and records hold it; zeros while there is no binding."""
    return bytes.fromhex(binding_id) if binding_id else bytes(BINDING_ID_BYTES)


def binding_text(raw: bytes) -> str:
    """The inverse of :func:`binding_bytes`."""
    return raw.hex() if any(raw) else NO_BINDING


def extent_key(serial: int, place: Place, index: int) -> bytes:
    """The key of one extent of one object."""
    return _EXTENT_KEY.pack(serial, place.rank, place.group, index)


def decode_extent_key(key: bytes) -> tuple[int, Place, int]:
    """Serial, place and index.

    Raises:
        FormatError: it has another length.
    """
    if len(key) != _EXTENT_KEY.size:
        raise FormatError(f"extent key has {len(key)} bytes, expected {_EXTENT_KEY.size}")
    serial, rank, group, index = _EXTENT_KEY.unpack(key)
    return serial, Place(rank, group), index


def order_key(order: int) -> bytes:
    """The key of an entry of ``order``."""
    return _ORDER_KEY.pack(order)


def decode_order_key(key: bytes) -> int:
    """The inverse of :func:`order_key`.

    Raises:
        FormatError: it has another length.
    """
    if len(key) != _ORDER_KEY.size:
        raise FormatError(f"order key has {len(key)} bytes, expected {_ORDER_KEY.size}")
    return int(_ORDER_KEY.unpack(key)[0])


def encode_record(record: ChunkRecord) -> bytes:
    """A record as it is stored."""
    body = (
        _RECORD.pack(
            record.serial,
            record.order,
            record.hits,
            record.stored_at,
            record.key,
            binding_bytes(record.binding_id),
            len(record.objects),
            0,
        )
        + record.objects.table.raw
        + record.objects.digests
    )
    return _checksum(body) + body


class RecordHead(NamedTuple):
    """What counts of a record, without its digests and its times."""

    key: ChunkKey
    totals_key: bytes
    serial: int
    order: int
    table: ObjectTable


class _Fields(NamedTuple):
    serial: int
    order: int
    hits: int
    stored_at: int
    key: bytes
    binding: bytes
    num_objects: int
    reserved: int


def _open_record(value: bytes) -> tuple[_Fields, ObjectTable, bytes]:
    """A record's fields, its table, and its digests."""
    head = _CHECKSUM.size + _RECORD.size
    if len(value) < head or _checksum(value[_CHECKSUM.size :]) != value[: _CHECKSUM.size]:
        raise FormatError("record has another checksum")
    fields = _Fields(*_RECORD.unpack_from(value, _CHECKSUM.size))
    end = head + fields.num_objects * ENTRY_BYTES
    try:
        table = decode_table(value[head:end])
    except ValueError as error:
        raise FormatError(str(error)) from error
    return fields, table, value[end:]


def decode_record(value: bytes) -> ChunkRecord:
    """The record in ``value``; whose key it was stored under is for the caller to compare.

    Raises:
        FormatError: it is altered, cut, or longer than it says.
    """
    found, table, digests = _open_record(value)
    try:
        objects = StoredObjects(table, digests)
    except ValueError as error:
        raise FormatError(str(error)) from error
    return ChunkRecord(
        ChunkKey(found.key),
        binding_text(found.binding),
        objects,
        found.serial,
        found.order,
        found.hits,
        found.stored_at,
    )


def decode_head(value: bytes | memoryview) -> RecordHead:
    """As :func:`decode_record`, for those who count: half the work."""
    found, table, digests = _open_record(bytes(value))
    if len(digests) != table.num_digests * EXTENT_DIGEST_BYTES:
        raise FormatError(f"record has {len(digests)} bytes of digests")
    totals = found.binding + found.key[: CHUNK_KEY_BYTES // 2]
    return RecordHead(ChunkKey(found.key), totals, found.serial, found.order, table)


def head_of(record: ChunkRecord) -> RecordHead:
    """What counts of a decoded record."""
    total = totals_key(record.binding_id, record.key)
    return RecordHead(record.key, total, record.serial, record.order, record.objects.table)


def totals_key(binding_id: str, key: ChunkKey) -> bytes:
    """The key of the totals that a chunk counts in."""
    return binding_bytes(binding_id) + key[: CHUNK_KEY_BYTES // 2]


def decode_totals_key(key: bytes) -> tuple[str, str]:
    """Binding id and fingerprint of an entry of ``totals``.

    Raises:
        FormatError: it has another length.
    """
    if len(key) != BINDING_ID_BYTES + CHUNK_KEY_BYTES // 2:
        raise FormatError(f"totals key has {len(key)} bytes")
    return binding_text(key[:BINDING_ID_BYTES]), key[BINDING_ID_BYTES:].hex()


@dataclass(slots=True)
class Totals:
    """What the chunks of one binding and fingerprint add up to."""

    chunks: int = 0
    objects: int = 0
    nbytes: int = 0

    def add(self, record: ChunkRecord, sign: int = 1) -> None:
        """Count a record in (1) or out (-1)."""
        self.chunks += sign
        self.objects += sign * len(record.objects)
        self.nbytes += sign * record.objects.table.nbytes

    def encode(self) -> bytes:
        """The stored form. ``struct.error`` if something is negative."""
        return _TOTALS.pack(self.chunks, self.objects, self.nbytes)

    @classmethod
    def decode(cls, value: bytes) -> Totals:
        """The inverse of :meth:`encode`.

        Raises:
            FormatError: it has another length.
        """
        if len(value) != _TOTALS.size:
            raise FormatError(f"totals have {len(value)} bytes, expected {_TOTALS.size}")
        return cls(*_TOTALS.unpack(value))


@dataclass(slots=True)
class Counters:
    """Numbers that only grow.

    Attributes:
        serial: the last one given to a chunk.
        order: the last one given to a use.
        evicted: chunks evicted so far.
        dropped: chunks dropped so far, because they were bad or unwanted.
        turns: transactions that only let LMDB reuse freed pages.
        pruned: chunks that operators pruned so far.
    """

    serial: int = 0
    order: int = 0
    evicted: int = 0
    dropped: int = 0
    turns: int = 0
    pruned: int = 0

    def encode(self) -> bytes:
        """The stored form."""
        return encode_meta(asdict(self))

    @classmethod
    def decode(cls, value: bytes) -> Counters:
        """The inverse of :meth:`encode`.

        Raises:
            FormatError: it is altered.
        """
        try:
            return cls(**decode_meta(value))
        except TypeError as error:
            raise FormatError(f"counters are not what they should be: {error}") from error


def encode_meta(value: dict[str, Any]) -> bytes:
    """A JSON object as ``meta`` holds it."""
    body = json.dumps(value, sort_keys=True).encode()
    return _checksum(body) + body


def decode_meta(value: bytes) -> dict[str, Any]:
    """The inverse of :func:`encode_meta`.

    Raises:
        FormatError: it is altered, or no JSON object.
    """
    body = bytes(value[_CHECKSUM.size :])
    if _checksum(body) != bytes(value[: _CHECKSUM.size]):
        raise FormatError("meta value has another checksum")
    try:
        decoded = json.loads(body)
    except ValueError as error:
        raise FormatError(f"meta value is no JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise FormatError(f"meta value is a {type(decoded).__name__}, expected an object")
    return decoded
