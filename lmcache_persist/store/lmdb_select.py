"""Walking a store's chunks in the order of use, a bounded way at a time."""

from __future__ import annotations

import time
from typing import Any

from lmcache_persist.errors import StoreDamaged
from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import ChunkKey, ChunkRecord
from lmcache_persist.store.lmdb_open import Databases
from lmcache_persist.store.selection import Chooser, Selection, bytes_in_scope


def chooser_of(
    txn: Any, dbs: Databases, selection: Selection, binding_id: str, counted_bytes: int = 0
) -> Chooser:
    """A chooser for the store as this transaction sees it.

    Args:
        txn: any transaction.
        dbs: the handles.
        selection: what is meant.
        binding_id: of the present binding.
        counted_bytes: of what a preview has counted as taken away already.

    Raises:
        StoreDamaged: the totals are damaged.
    """
    held = []
    for key, value in txn.cursor(db=dbs.totals):
        try:
            owner, fingerprint = fmt.decode_totals_key(bytes(key))
            held.append((owner, fingerprint, fmt.Totals.decode(bytes(value)).nbytes))
        except fmt.FormatError as error:
            raise StoreDamaged(f"the totals are damaged: {error}") from error
    held_bytes = bytes_in_scope(selection, held, binding_id) - counted_bytes
    return Chooser(selection, binding_id, held_bytes=held_bytes, now=time.time())


def walk(
    txn: Any, dbs: Databases, chooser: Chooser, start: bytes, *, max_looks: int, max_chunks: int
) -> list[ChunkRecord]:
    """The chunks that are meant from ``start`` on; ``chooser.picked.cursor`` says where to go on.

    A bad record is passed over: dropping those is another duty.

    Args:
        txn: any transaction.
        dbs: the handles.
        chooser: judges them.
        start: key of ``order`` to begin at, empty for the first.
        max_looks: where to stop.
        max_chunks: where to stop, too.
    """
    found: list[ChunkRecord] = []
    cursor = txn.cursor(db=dbs.order)
    more = cursor.set_range(start) if start else cursor.first()
    for _ in range(max_looks):
        if not more or chooser.done or len(found) == max_chunks:
            break
        key = ChunkKey(bytes(cursor.value()))
        record = record_of(txn, dbs, key) if chooser.needs(key) else None
        own = record is not None and fmt.order_key(record.order) == bytes(cursor.key())
        if record is not None and own and chooser.judge(record):
            found.append(record)
        more = cursor.next()
    chooser.picked.cursor = bytes(cursor.key()) if more and not chooser.done else None
    return found


def record_of(txn: Any, dbs: Databases, key: ChunkKey) -> ChunkRecord | None:
    """The record of a chunk; None if it is absent or bad."""
    value = txn.get(key, db=dbs.chunks)
    if value is None:
        return None
    try:
        record = fmt.decode_record(bytes(value))
    except fmt.FormatError:
        return None
    return record if record.key == key else None
