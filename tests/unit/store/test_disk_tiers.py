"""The suite, on every backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_persist.store import offline
from lmcache_persist.store.base import ChunkRecord, DiskTier, Place
from lmcache_persist.store.lmdb_disk import LmdbDisk
from lmcache_persist.store.memory_disk import MemoryDisk
from store_suite import Opener, StoreSuite
from store_support import MIB, UUID, content, overwrite, positions

CAPACITY = 64 * MIB


class TestMemoryDisk(StoreSuite):
    """The oracle itself."""

    @pytest.fixture
    def opener(self) -> Opener:
        """A tier of 64 MiB."""
        return lambda: MemoryDisk(CAPACITY, uuid=UUID)

    def alter(self, tier: DiskTier, record: ChunkRecord, place: Place) -> DiskTier:
        """Flip the last byte."""
        assert isinstance(tier, MemoryDisk)
        held = bytearray(tier._contents[record.serial, place])
        held[-1] ^= 1
        tier._contents[record.serial, place] = bytes(held)
        return tier


class TestLmdbDisk(StoreSuite):
    """The real one; its check runs after every test."""

    altered = False

    @pytest.fixture
    def opener(self, tmp_path: Path) -> Iterator[Opener]:
        """A tier of 64 MiB in a folder of its own."""
        opened: list[LmdbDisk] = []

        def open_tier() -> DiskTier:
            opened.append(LmdbDisk.open(tmp_path / "store", CAPACITY, uuid=UUID))
            return opened[-1]

        self._open = open_tier
        yield open_tier
        for tier in opened:
            tier.close()
        assert list(offline.check(tmp_path / "store")) == []

    def alter(self, tier: DiskTier, record: ChunkRecord, place: Place) -> DiskTier:
        """Flip the last byte, in the file."""
        assert isinstance(tier, LmdbDisk)
        tier.close()
        data_file = tier.directory / "data.mdb"
        tail = content(record.key, place, record.objects.nbytes(place))[-16:]
        for at in positions(data_file, tail):
            overwrite(data_file, at + 15, bytes([tail[-1] ^ 1]))
        return self._open()
