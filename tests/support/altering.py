"""Bytes of a stored chunk altered on disk, as a bad disk would."""

from __future__ import annotations

from pathlib import Path

from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import ChunkRecord
from lmcache_persist.store.offline import OfflineStore


def alter_chunk(data_dir: Path, key: bytes) -> ChunkRecord:
    """Flip a bit in the first extent of a chunk; no server may be running.

    Args:
        data_dir: the server's.
        key: the chunk's, fingerprint and hash.

    Returns:
        The record of the chunk, which is left as it was.
    """
    with OfflineStore.open(data_dir / "store") as store:
        record = next(one for one in list(store.records()) if one.key == key)
        extent = fmt.extent_key(record.serial, next(iter(record.objects)), 0)
        with store._reader.transaction() as txn:
            value = bytes(txn.get(extent, b"", db=store._dbs.extents))
    path = data_dir / "store" / "data.mdb"
    content = path.read_bytes()
    if not value or content.count(value) != 1:
        raise RuntimeError(f"extent is there {content.count(value)} times, expected once")
    at = content.index(value) + len(value) // 2
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))
    return record
