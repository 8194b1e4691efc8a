"""Counting a store's databases, and what no record speaks of. No digest is looked at.

All of it within the caller's transaction; cheap per chunk, so that a million take a
second or two.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lmcache_persist.errors import StoreDamaged
from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import CHUNK_KEY_BYTES
from lmcache_persist.store.lmdb_open import Databases

_LAST_SERIAL = (1 << 64) - 1


@dataclass(slots=True)
class Tally:
    """What the good records of a store add up to.

    Attributes:
        chunks: good records.
        extents: that they speak of.
        totals: by key of the database ``totals``.
        serials: of all of them, unsorted.
    """

    chunks: int = 0
    extents: int = 0
    totals: dict[bytes, fmt.Totals] = field(default_factory=dict)
    serials: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, record: fmt.RecordHead) -> None:
        """Count one record."""
        self.chunks += 1
        self.extents += record.table.num_digests
        self.serials.append(record.serial)
        totals = self.totals.get(record.totals_key)
        if totals is None:
            totals = self.totals[record.totals_key] = fmt.Totals()
        totals.chunks += 1
        totals.objects += len(record.table.entries)
        totals.nbytes += record.table.nbytes


def tally(txn: Any, dbs: Databases) -> Tally:
    """Count all good records. Bad ones count nowhere."""
    found = Tally()
    for key, value in txn.cursor(db=dbs.chunks):
        try:
            record = fmt.decode_head(value)
        except fmt.FormatError:
            continue
        if record.key == key:
            found.add(record)
    return found


def entries(txn: Any, handle: Any) -> int:
    """How many entries a database has."""
    return int(txn.stat(handle)["entries"])


def read_totals(txn: Any, dbs: Databases) -> dict[bytes, fmt.Totals | None]:
    """The stored totals; None for what cannot be decoded."""
    stored: dict[bytes, fmt.Totals | None] = {}
    for key, value in txn.cursor(db=dbs.totals):
        try:
            fmt.decode_totals_key(bytes(key))
            stored[bytes(key)] = fmt.Totals.decode(bytes(value))
        except fmt.FormatError:
            stored[bytes(key)] = None
    return stored


def wrong_totals(txn: Any, dbs: Databases, expected: Tally) -> Iterator[tuple[bytes, str]]:
    """Keys of ``totals`` whose value is not what the records add up to, and how it differs."""
    stored = read_totals(txn, dbs)
    for key in sorted(stored.keys() | expected.totals.keys()):
        found, right = stored.get(key), expected.totals.get(key)
        if key in stored and found is None:
            yield key, "it cannot be decoded"
        elif found != right:
            yield key, f"found {found}, expected {right}"


def surplus_order(
    txn: Any, dbs: Databases, after: bytes = b"", limit: int | None = None
) -> Iterator[tuple[bytes, str | None]]:
    """Walk ``order``: each key, and what is wrong with its entry (None: nothing).

    Args:
        txn: for reading.
        dbs: the handles.
        after: where to go on, empty for the first.
        limit: entries to look at, None for all.
    """
    cursor = txn.cursor(db=dbs.order)
    more = cursor.set_range(after) if after else cursor.first()
    if more and bytes(cursor.key()) == after:
        more = cursor.next()
    looked = 0
    while more and (limit is None or looked < limit):
        order, chunk = bytes(cursor.key()), bytes(cursor.value())
        yield order, _order_problem(txn, dbs, order, chunk)
        looked += 1
        more = cursor.next()


def _order_problem(txn: Any, dbs: Databases, order: bytes, chunk: bytes) -> str | None:
    try:
        number = fmt.decode_order_key(order)
    except fmt.FormatError as error:
        return str(error)
    value = txn.get(chunk, db=dbs.chunks) if len(chunk) == CHUNK_KEY_BYTES else None
    if value is None:
        return "it names a chunk that is not there"
    try:
        record = fmt.decode_head(value)
    except fmt.FormatError:
        return "it names a chunk whose record is bad"
    if record.key != chunk or record.order != number:
        return f"it names chunk {chunk.hex()}, which has another place"
    return None


def surplus_extents(txn: Any, dbs: Databases, serials: array[int]) -> Iterator[tuple[bytes, str]]:
    """Keys of extents that belong to no chunk.

    Args:
        txn: for reading.
        dbs: the handles.
        serials: of all good records, sorted.
    """
    cursor = txn.cursor(db=dbs.extents)
    more = cursor.first()
    while more:
        key = bytes(cursor.key())
        try:
            serial, _, _ = fmt.decode_extent_key(key)
        except fmt.FormatError as error:
            yield key, str(error)
            more = cursor.next()
            continue
        at = bisect_left(serials, serial)
        if at == len(serials) or serials[at] != serial:
            yield key, f"no chunk has serial {serial}"
            more = cursor.next()
        elif serial == _LAST_SERIAL:
            return
        else:  # its other extents are looked at where the chunk is
            more = cursor.set_range(struct.pack(">Q", serial + 1))


def surplus_of_chunks(txn: Any, dbs: Databases) -> Iterator[tuple[bytes, str]]:
    """Keys of extents under the serial of a chunk that has no such extent."""
    for key, value in txn.cursor(db=dbs.chunks):
        try:
            record = fmt.decode_head(value)
        except fmt.FormatError:
            continue
        if record.key != key:
            continue
        own = {
            fmt.extent_key(record.serial, place, index)
            for place, entry in record.table.entries.items()
            for index in range(entry.num_digests)
        }
        prefix = struct.pack(">Q", record.serial)
        cursor = txn.cursor(db=dbs.extents)
        more = cursor.set_range(prefix)
        while more and bytes(cursor.key()).startswith(prefix):
            extent = bytes(cursor.key())
            if extent not in own and len(extent) == fmt.EXTENT_KEY_BYTES:
                yield extent, f"chunk {record.key.hex()} has no such extent"
            more = cursor.next()


def sorted_serials(found: Tally) -> array[int]:
    """The serials in order, as :func:`surplus_extents` wants them."""
    return array("Q", sorted(found.serials))


def last_serial_and_order(txn: Any, dbs: Databases) -> tuple[int, int]:
    """The largest that is in use, by the databases that have them in their keys.

    Raises:
        StoreDamaged: a last key has another length.
    """
    serial = order = 0
    extents, orders = txn.cursor(db=dbs.extents), txn.cursor(db=dbs.order)
    try:
        if extents.last():
            serial = fmt.decode_extent_key(bytes(extents.key()))[0]
        if orders.last():
            order = fmt.decode_order_key(bytes(orders.key()))
    except fmt.FormatError as error:
        raise StoreDamaged(f"the counters are lost, and what they counted: {error}") from error
    return serial, order
