"""Data dirs as a server leaves them, made without one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from lmcache_persist.datadir import DataDirLock, make_data_dir
from lmcache_persist.hashing import ChunkHash
from lmcache_persist.identity import Fingerprint, fingerprint
from lmcache_persist.manifest import Manifest
from lmcache_persist.store.base import ChunkKey, ChunkRecord, ChunkWrite, Place, chunk_key
from lmcache_persist.store.lmdb_disk import LmdbDisk
from lmcache_persist.store.offline import OfflineStore
from support.emulated import identity
from support.manifest import AT, binding

GROUPS = [{"kind": "full", "tokens_per_block": 544, "slots_per_block": 544, "window": 0}]


def model_of(number: int) -> Fingerprint:
    """The fingerprint of a numbered model."""
    return fingerprint(identity(model=f"model-{number}"), GROUPS, [{}])


def key_of(number: int, model: int = 1) -> ChunkKey:
    """The key of a numbered chunk of a numbered model."""
    return chunk_key(model_of(model), ChunkHash(blake3(f"{number}".encode()).digest()))


def chunk_of(number: int, nbytes: int, model: int = 1) -> ChunkWrite:
    """A chunk with one object of that size."""
    key = key_of(number, model)
    return ChunkWrite(key, {Place(0, 0): blake3(key).digest(length=nbytes)})


def make(
    root: Path,
    *,
    capacity_bytes: int = 64 << 20,
    chunks: Sequence[int] = (20,),
    nbytes: int = 50_000,
    bound: bool = True,
) -> Path:
    """A bound data dir with so many chunks of model 1, 2, ...; chunk 0 was used last of each."""
    paths = make_data_dir(root)
    with DataDirLock.acquire(paths.root), contextlib.ExitStack() as stack:
        manifest = stack.enter_context(contextlib.closing(Manifest.open(paths.manifest)))
        disk = LmdbDisk.open(paths.store, capacity_bytes)
        stack.callback(disk.close)
        if not bound:
            return root
        held = binding(544, store_uuid=disk.uuid, store_format_version=disk.format_version)
        manifest.bind(held)
        disk.write_stamp(held)
        for model, count in enumerate(chunks, start=1):
            manifest.record_model(
                fingerprint=model_of(model),
                name=f"model-{model}",
                identity=identity(model=f"model-{model}"),
                groups=GROUPS,
                layouts=[{}],
                required_alignment=544,
                at=AT,
            )
            disk.write([chunk_of(number, nbytes, model) for number in range(count)])
    return root


def records_of(root: Path) -> dict[ChunkKey, ChunkRecord]:
    """What the store of a data dir holds, by key."""
    with OfflineStore.open(root / "store") as store:
        return {record.key: record for record in store.records()}
