"""Keys, contents and bindings for tests of the store."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from lmcache_persist.binding import MODE_AUTO, Binding
from lmcache_persist.hashing import EXTENT_BYTES, ChunkHash
from lmcache_persist.identity import Fingerprint
from lmcache_persist.store.base import (
    ChunkKey,
    ChunkRecord,
    ChunkWrite,
    DiskTier,
    Place,
    chunk_key,
)

MIB = 1 << 20
UUID = "0123456789abcdef" * 2


def binding(chunk_size: int = 640, bound_at: str = "2026-01-01T00:00:00.000000Z") -> Binding:
    """A binding of a store with :data:`UUID`."""
    return Binding.make(
        chunk_size=chunk_size,
        required_alignment=chunk_size,
        base_chunk_size=256,
        mode=MODE_AUTO,
        bound_at=bound_at,
        winner="a test",
        backend="lmdb",
        store_uuid=UUID,
        store_format_version=1,
    )


def key(number: int, model: int = 1) -> ChunkKey:
    """The key of a numbered chunk of a numbered model."""
    rng = random.Random(f"{model}/{number}")
    fingerprint = Fingerprint(random.Random(model).randbytes(32).hex())
    return chunk_key(fingerprint, ChunkHash(rng.randbytes(32)))


def content(chunk: ChunkKey, place: Place, nbytes: int) -> bytes:
    """Bytes that only this object has."""
    return random.Random(chunk + bytes(place) + bytes(str(nbytes), "ascii")).randbytes(nbytes)


def chunk(number: int, sizes: dict[Place, int] | int = 100_000, *, model: int = 1) -> ChunkWrite:
    """A numbered chunk with objects of these sizes, or one object of this size."""
    name = key(number, model)
    if isinstance(sizes, int):
        sizes = {Place(0, 0): sizes}
    return ChunkWrite(
        name, {place: content(name, place, nbytes) for place, nbytes in sizes.items()}
    )


def read(tier: DiskTier, record: ChunkRecord, place: Place) -> bytes | None:
    """An object's bytes as the tier yields them, None if it is gone."""
    buffer = bytearray(b"\xa5") * record.objects.nbytes(place)
    return bytes(buffer) if tier.read_into(record, place, memoryview(buffer)) else None


def found(tier: DiskTier, keys: Sequence[ChunkKey]) -> list[bool]:
    """Which chunks are there."""
    return [record is not None for record in tier.find(keys)]


def assert_reads_back(tier: DiskTier, writes: Sequence[ChunkWrite]) -> None:
    """Every object of ``writes`` is there, byte for byte."""
    records = tier.find([write.key for write in writes])
    for write, record in zip(writes, records, strict=True):
        assert record is not None, f"chunk {write.key.hex()[-8:]} is not there"
        assert record.key == write.key
        for place, data in write.objects.items():
            assert read(tier, record, place) == bytes(data)


def positions(data_file: Path, needle: bytes) -> list[int]:
    """Where ``needle`` lies in a file."""
    data, at, where = data_file.read_bytes(), -1, []
    while (at := data.find(needle, at + 1)) >= 0:
        where.append(at)
    return where


def overwrite(data_file: Path, at: int, data: bytes) -> None:
    """Change bytes in the middle of a file."""
    with data_file.open("r+b") as file:
        file.seek(at)
        file.write(data)


FULL_EXTENT = EXTENT_BYTES
