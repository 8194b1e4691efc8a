"""A store's databases altered by hand, one way each; no server may be running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb

from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import ChunkRecord, Place

Alter = Callable[[Any, dict[str, Any]], None]
NAMES = ("meta", "chunks", "extents", "order", "totals")


@contextmanager
def raw(directory: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A writing transaction on a store, and its databases by name."""
    size = (directory / "data.mdb").stat().st_size
    with lmdb.open(
        str(directory), map_size=size, max_dbs=8, create=False, lib_version=0, writemap=True
    ) as env:
        handles = {name: env.open_db(name.encode(), create=False) for name in NAMES}
        with env.begin(write=True) as txn:
            yield txn, handles
    (directory / "lock.mdb").unlink(missing_ok=True)


def alter(directory: Path, name: str) -> None:
    """Alter a store in the way that :data:`WAYS` names."""
    with raw(directory) as (txn, dbs):
        (WAYS | WAYS_TO_LOSE_ALL)[name](txn, dbs)


def records(txn: Any, dbs: dict[str, Any]) -> list[ChunkRecord]:
    """All records, in the order of keys."""
    return [fmt.decode_record(value) for _, value in txn.cursor(db=dbs["chunks"])]


def _put(txn: Any, dbs: dict[str, Any], record: ChunkRecord) -> None:
    txn.put(record.key, fmt.encode_record(record), db=dbs["chunks"])


def _first_extent(record: ChunkRecord) -> bytes:
    return fmt.extent_key(record.serial, next(iter(record.objects)), 0)


def _flip(txn: Any, dbs: dict[str, Any]) -> None:
    key = _first_extent(records(txn, dbs)[1])
    value = bytearray(txn.get(key, db=dbs["extents"]))
    value[len(value) // 2] ^= 1
    txn.put(key, bytes(value), db=dbs["extents"])


def _shorten(txn: Any, dbs: dict[str, Any]) -> None:
    key = _first_extent(records(txn, dbs)[1])
    txn.put(key, txn.get(key, db=dbs["extents"])[:-1], db=dbs["extents"])


def _lose_extent(txn: Any, dbs: dict[str, Any]) -> None:
    txn.delete(_first_extent(records(txn, dbs)[0]), db=dbs["extents"])


def _orphan_extents(txn: Any, dbs: dict[str, Any]) -> None:
    for serial in (0, 777, (1 << 64) - 1):
        txn.put(fmt.extent_key(serial, Place(0, 0), 0), b"orphan" * 100, db=dbs["extents"])
    txn.put(b"no key of ours", b"x", db=dbs["extents"])


def _surplus_extent(txn: Any, dbs: dict[str, Any]) -> None:
    record = records(txn, dbs)[0]
    txn.put(fmt.extent_key(record.serial, Place(5, 5), 0), b"surplus", db=dbs["extents"])


def _low_counters(txn: Any, dbs: dict[str, Any]) -> None:
    txn.put(fmt.META_COUNTERS, fmt.Counters(serial=1, order=1).encode(), db=dbs["meta"])


def _lost_counters(txn: Any, dbs: dict[str, Any]) -> None:
    txn.put(fmt.META_COUNTERS, b"garbage, not counters", db=dbs["meta"])


def _lose_order(txn: Any, dbs: dict[str, Any]) -> None:
    txn.delete(fmt.order_key(records(txn, dbs)[0].order), db=dbs["order"])


def _swap_order(txn: Any, dbs: dict[str, Any]) -> None:
    one, two = records(txn, dbs)[:2]
    txn.put(fmt.order_key(one.order), two.key, db=dbs["order"])
    txn.put(fmt.order_key(two.order), one.key, db=dbs["order"])


def _surplus_order(txn: Any, dbs: dict[str, Any]) -> None:
    one = records(txn, dbs)[0]
    txn.put(fmt.order_key(one.order + 5000), one.key, db=dbs["order"])
    txn.put(fmt.order_key(one.order + 5001), bytes(64), db=dbs["order"])
    txn.put(b"short", b"x", db=dbs["order"])


def _same_order(txn: Any, dbs: dict[str, Any]) -> None:
    one, two = records(txn, dbs)[:2]
    txn.delete(fmt.order_key(two.order), db=dbs["order"])
    _put(txn, dbs, replace(two, order=one.order))


def _swap_records(txn: Any, dbs: dict[str, Any]) -> None:
    one, two = records(txn, dbs)[:2]
    txn.put(one.key, fmt.encode_record(two), db=dbs["chunks"])
    txn.put(two.key, fmt.encode_record(one), db=dbs["chunks"])


def _copy_record(txn: Any, dbs: dict[str, Any]) -> None:
    one, two = records(txn, dbs)[:2]
    txn.put(two.key, fmt.encode_record(one), db=dbs["chunks"])


def _break_record(txn: Any, dbs: dict[str, Any]) -> None:
    one = records(txn, dbs)[0]
    value = bytearray(fmt.encode_record(one))
    value[40] ^= 4
    txn.put(one.key, bytes(value), db=dbs["chunks"])


def _same_serial(txn: Any, dbs: dict[str, Any]) -> None:
    one = records(txn, dbs)[0]
    key = type(one.key)(one.key[:-1] + bytes([one.key[-1] ^ 1]))
    other = replace(one, key=key, order=1 << 20)
    _put(txn, dbs, other)
    txn.put(fmt.order_key(other.order), other.key, db=dbs["order"])


def _wrong_totals(txn: Any, dbs: dict[str, Any]) -> None:
    with txn.cursor(db=dbs["totals"]) as cursor:
        cursor.first()
        key = cursor.key()
    txn.put(key, fmt.Totals(1, 1, 1).encode(), db=dbs["totals"])


def _broken_totals(txn: Any, dbs: dict[str, Any]) -> None:
    with txn.cursor(db=dbs["totals"]) as cursor:
        cursor.first()
        key = cursor.key()
    txn.put(key, b"short", db=dbs["totals"])


def _lost_totals(txn: Any, dbs: dict[str, Any]) -> None:
    txn.drop(dbs["totals"], delete=False)


def _surplus_totals(txn: Any, dbs: dict[str, Any]) -> None:
    txn.put(bytes(64), fmt.Totals(3, 3, 3).encode(), db=dbs["totals"])
    txn.put(b"odd", b"x", db=dbs["totals"])


def _all(txn: Any, dbs: dict[str, Any]) -> None:
    for name, way in WAYS.items():
        if name not in ("all", "lost counters", "broken record", "swapped records"):
            way(txn, dbs)


WAYS: dict[str, Alter] = {
    "flipped bit": _flip,
    "short extent": _shorten,
    "lost extent": _lose_extent,
    "orphan extents": _orphan_extents,
    "surplus extent": _surplus_extent,
    "counters behind": _low_counters,
    "lost counters": _lost_counters,
    "lost order": _lose_order,
    "swapped order": _swap_order,
    "surplus order": _surplus_order,
    "same order twice": _same_order,
    "same serial twice": _same_serial,
    "wrong totals": _wrong_totals,
    "broken totals": _broken_totals,
    "lost totals": _lost_totals,
    "surplus totals": _surplus_totals,
    "copied record": _copy_record,
    "swapped records": _swap_records,
    "broken record": _break_record,
    "all": _all,
}
"""Every way by its name, for parametrised tests."""


def _lose_description(txn: Any, dbs: dict[str, Any]) -> None:
    txn.put(fmt.META_STORE, b"no description of a store", db=dbs["meta"])


WAYS_TO_LOSE_ALL: dict[str, Alter] = {"lost description": _lose_description}
"""After these nothing can be mended: the store is replaced."""
