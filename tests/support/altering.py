"""Bytes of a stored chunk altered on disk, as a bad disk would."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import lmdb

from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import ChunkRecord, Place
from lmcache_persist.store.offline import OfflineStore


def alter_chunk(data_dir: Path, key: bytes, place: Place | None = None) -> ChunkRecord:
    """Flip a bit in the first extent of a chunk's object; no server may be running.

    Args:
        data_dir: the server's.
        key: the chunk's, fingerprint and hash.
        place: of the object; None for the chunk's first one.

    Returns:
        The record of the chunk, which is left as it was.
    """
    record, _, value = _first_extent(data_dir, key, place)
    path = data_dir / "store" / "data.mdb"
    content = path.read_bytes()
    if not value or content.count(value) != 1:
        raise RuntimeError(f"extent is there {content.count(value)} times, expected once")
    at = content.index(value) + len(value) // 2
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))
    return record


def remove_object(data_dir: Path, key: bytes, place: Place) -> None:
    """Remove the bytes of one object, and nothing of what names it; no server may be running."""
    _, extent, _ = _first_extent(data_dir, key, place)
    folder = data_dir / "store"
    size = (folder / "data.mdb").stat().st_size
    store = lmdb.open(str(folder), writemap=True, map_size=size, max_dbs=9, lib_version=0)
    with closing(store) as env, env.begin(write=True) as txn:
        if not txn.delete(extent, db=env.open_db(b"extents", txn=txn)):
            raise RuntimeError(f"there is no extent {extent.hex()}")
    (folder / "lock.mdb").unlink()


def _first_extent(
    data_dir: Path, key: bytes, place: Place | None
) -> tuple[ChunkRecord, bytes, bytes]:
    """A chunk's record, and key and bytes of the first extent of one of its objects."""
    with OfflineStore.open(data_dir / "store") as store:
        record = next(one for one in list(store.records()) if one.key == key)
        extent = fmt.extent_key(record.serial, place or next(iter(record.objects)), 0)
        with store._reader.transaction() as txn:
            return record, extent, bytes(txn.get(extent, b"", db=store._dbs.extents))
