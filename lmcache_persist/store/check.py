"""Whether the databases of a store agree with each other and with their digests.

:func:`examine` looks at one chunk; it is the one rule for a store at rest
(:func:`check_store`), for one in use (:mod:`.check_part`) and for :mod:`.repair`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any, NamedTuple

from lmcache_persist.errors import PersistError, StoreDamaged
from lmcache_persist.hashing import EXTENT_BYTES, extent_digest, extent_lengths
from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import ChunkRecord
from lmcache_persist.store.findings import Violation
from lmcache_persist.store.lmdb_open import Databases, read_counters, read_meta
from lmcache_persist.store.tally import (
    Tally,
    entries,
    sorted_serials,
    surplus_extents,
    surplus_of_chunks,
    surplus_order,
    wrong_totals,
)

__all__ = ["Fault", "Problem", "Progress", "Violation", "check_store", "examine"]

ReadExtent = Callable[[memoryview, memoryview], None]

_ANY = fmt.Counters(serial=1 << 64, order=1 << 64)
"""Stands for counters that are lost: nothing is beyond them."""


class Progress:
    """How far a check came.

    Attributes:
        checked_objects: objects looked at, with their digests unless those are left out.
        checked_bytes: of them.
        total_objects, total_bytes: what there is to look at, as far as the totals know.
    """

    def __init__(self) -> None:
        self.checked_objects = 0
        self.checked_bytes = 0
        self.total_objects = 0
        self.total_bytes = 0

    def advance(self, objects: int, nbytes: int) -> None:
        """So many more were looked at; for subclasses that show it."""
        self.checked_objects += objects
        self.checked_bytes += nbytes


class Fault(Enum):
    """What kind of wrong something is, which decides what mends it."""

    RECORD = auto()
    """The record is bad, or another chunk's."""
    OBJECT = auto()
    """An extent is proven bad."""
    ORDER = auto()
    """The record is good, and its place in the order is not its own."""
    COUNTER = auto()
    """The record is good, and the counters are behind it."""
    UNREADABLE = auto()
    """The disk failed, which says nothing about what is on it."""


class Problem(NamedTuple):
    """One thing that is wrong with a chunk."""

    fault: Fault
    violation: Violation


def chunk_name(key: bytes) -> str:
    """A chunk in a violation."""
    return f"chunk {key.hex()}"


def examine(
    txn: Any,
    dbs: Databases,
    key: bytes,
    value: bytes,
    counters: fmt.Counters,
    read: ReadExtent | None,
) -> tuple[ChunkRecord | None, list[Problem]]:
    """Everything that is wrong with one chunk, but for what others have of it.

    Args:
        txn: with ``buffers=True``.
        dbs: the handles.
        key: of ``chunks``.
        value: what is under it.
        counters: the store's, to compare with.
        read: copies an extent's value, or None to leave out the digests.

    Returns:
        The record, None if it is none, and the problems.
    """
    name = chunk_name(key)
    try:
        record = fmt.decode_record(value)
    except fmt.FormatError as error:
        return None, [Problem(Fault.RECORD, Violation(name, str(error)))]
    if record.key != key:
        what = f"it holds the record of chunk {record.key.hex()}"
        return None, [Problem(Fault.RECORD, Violation(name, what))]
    problems = []
    if record.serial > counters.serial or record.order > counters.order:
        what = "its serial or order was never given out"
        problems.append(Problem(Fault.COUNTER, Violation(name, what)))
    if txn.get(fmt.order_key(record.order), db=dbs.order) != record.key:
        what = f"order {record.order} does not name it"
        problems.append(Problem(Fault.ORDER, Violation(name, what)))
    problems += _examine_extents(txn, dbs, record, read)
    return record, problems


def _examine_extents(
    txn: Any, dbs: Databases, record: ChunkRecord, read: ReadExtent | None
) -> Iterator[Problem]:
    scratch = memoryview(bytearray(EXTENT_BYTES)) if read else None
    for place, stored in record.objects.items():
        for index, length in enumerate(extent_lengths(stored.nbytes)):
            name = f"{chunk_name(record.key)} rank {place.rank} group {place.group} extent {index}"
            value = txn.get(fmt.extent_key(record.serial, place, index), db=dbs.extents)
            if value is None:
                yield Problem(Fault.OBJECT, Violation(name, "it is absent"))
            elif len(value) != length:
                what = f"it has {len(value)} bytes, expected {length}"
                yield Problem(Fault.OBJECT, Violation(name, what))
            elif read is not None and scratch is not None:
                try:
                    read(value, scratch[:length])
                except (OSError, PersistError) as error:
                    what = f"it cannot be read: {error}"
                    yield Problem(Fault.UNREADABLE, Violation(name, what))
                    continue
                if extent_digest(scratch[:length]) != stored.digests[index]:
                    yield Problem(Fault.OBJECT, Violation(name, "it has another digest"))


def check_store(
    txn: Any, dbs: Databases, read: ReadExtent | None, progress: Progress | None = None
) -> Iterator[Violation]:
    """All violations within one reading transaction.

    Args:
        txn: with ``buffers=True``.
        dbs: the handles.
        read: copies an extent's value, or None to leave out the digests.
        progress: told of every chunk that was looked at.
    """
    counters = _ANY
    try:
        read_meta(txn, dbs)
        counters = read_counters(txn, dbs)
    except StoreDamaged as error:
        yield Violation("meta", error.message)
    found = Tally()
    for key, value in txn.cursor(db=dbs.chunks):
        record, problems = examine(txn, dbs, bytes(key), bytes(value), counters, read)
        for problem in problems:
            yield problem.violation
        if record is not None:
            found.add(fmt.head_of(record))
            if progress is not None:
                progress.advance(len(record.objects), record.objects.table.nbytes)
    yield from check_counts(txn, dbs, found)


def check_counts(txn: Any, dbs: Databases, found: Tally) -> Iterator[Violation]:
    """What disagrees with the sum of all good records, in the transaction that added it up.

    Every record's own entries are known to be there or were named, so another number of
    entries means some of no record.
    """
    number = entries(txn, dbs.order)
    if number != found.chunks:
        named = [pair for pair in surplus_order(txn, dbs) if pair[1] is not None]
        for order, what in named:
            yield Violation(f"order {order.hex()}", str(what))
        if not named:
            yield Violation("order", f"it has {number} entries, expected {found.chunks}")
    number = entries(txn, dbs.extents)
    if number != found.extents:
        empty = True
        for walk in (
            surplus_extents(txn, dbs, sorted_serials(found)),
            surplus_of_chunks(txn, dbs),
        ):
            for key, what in walk:
                empty = False
                yield Violation(f"extents {key.hex()}", what)
        if empty:
            yield Violation("extents", f"it has {number} entries, expected {found.extents}")
    for key, what in wrong_totals(txn, dbs, found):
        yield Violation(f"totals {key.hex()}", what)
