"""Whether the databases of a store agree with each other and with their digests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lmcache_persist.errors import PersistError, StoreDamaged
from lmcache_persist.hashing import EXTENT_BYTES, extent_digest, extent_lengths
from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import ChunkRecord
from lmcache_persist.store.lmdb_open import Databases, read_counters, read_meta

ReadExtent = Callable[[memoryview, memoryview], None]


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that is not as it must be.

    Attributes:
        where: the database and the key, for people.
        what: what is wrong.
    """

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def check_store(txn: Any, dbs: Databases, read: ReadExtent | None) -> Iterator[Violation]:
    """All violations within one reading transaction.

    Args:
        txn: with ``buffers=True``.
        dbs: the handles.
        read: copies an extent's value, or None to leave out the digests.
    """
    try:
        read_meta(txn, dbs)
        counters = read_counters(txn, dbs)
    except StoreDamaged as error:
        yield Violation("meta", error.message)
        return
    totals: dict[bytes, fmt.Totals] = {}
    extents = chunks = 0
    for key, value in txn.cursor(db=dbs.chunks):
        name = f"chunk {bytes(key).hex()}"
        try:
            record = fmt.decode_record(bytes(value))
        except fmt.FormatError as error:
            yield Violation(name, str(error))
            continue
        if record.key != bytes(key):
            yield Violation(name, f"it holds the record of chunk {record.key.hex()}")
            continue
        chunks += 1
        extents += record.objects.table.num_digests
        totals.setdefault(fmt.totals_key(record.binding_id, record.key), fmt.Totals()).add(record)
        if record.serial > counters.serial or record.order > counters.order:
            yield Violation(name, "its serial or order was never given out")
        if txn.get(fmt.order_key(record.order), db=dbs.order) != record.key:
            yield Violation(name, f"order {record.order} does not name it")
        yield from _check_extents(txn, dbs, record, read)
    yield from _check_counts(txn, dbs, chunks, extents)
    yield from _check_totals(txn, dbs, totals)


def _check_extents(
    txn: Any, dbs: Databases, record: ChunkRecord, read: ReadExtent | None
) -> Iterator[Violation]:
    scratch = memoryview(bytearray(EXTENT_BYTES)) if read else None
    for place, stored in record.objects.items():
        for index, length in enumerate(extent_lengths(stored.nbytes)):
            name = f"chunk {record.key.hex()} rank {place.rank} group {place.group} extent {index}"
            value = txn.get(fmt.extent_key(record.serial, place, index), db=dbs.extents)
            if value is None:
                yield Violation(name, "it is absent")
            elif len(value) != length:
                yield Violation(name, f"it has {len(value)} bytes, expected {length}")
            elif read is not None and scratch is not None:
                try:
                    read(value, scratch[:length])
                except (OSError, PersistError) as error:
                    yield Violation(name, f"it cannot be read: {error}")
                    continue
                if extent_digest(scratch[:length]) != stored.digests[index]:
                    yield Violation(name, "it has another digest")


def _check_counts(txn: Any, dbs: Databases, chunks: int, extents: int) -> Iterator[Violation]:
    # Every record's own entries were found, so another number means entries of no record.
    for name, handle, expected in (
        ("order", dbs.order, chunks),
        ("extents", dbs.extents, extents),
    ):
        found = txn.stat(handle)["entries"]
        if found != expected:
            yield Violation(name, f"it has {found} entries, expected {expected}")


def _check_totals(
    txn: Any, dbs: Databases, expected: dict[bytes, fmt.Totals]
) -> Iterator[Violation]:
    stored: dict[bytes, fmt.Totals] = {}
    for key, value in txn.cursor(db=dbs.totals):
        try:
            stored[bytes(key)] = fmt.Totals.decode(bytes(value))
        except fmt.FormatError as error:
            yield Violation(f"totals {bytes(key).hex()}", str(error))
    for key in sorted(stored.keys() | expected.keys()):
        if stored.get(key) != expected.get(key):
            yield Violation(
                f"totals {key.hex()}", f"found {stored.get(key)}, expected {expected.get(key)}"
            )
