"""What a store on LMDB says, whoever has it open: its server, or a verb while there is none."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import ChunkKey, ChunkRecord, Page, Place, Usage
from lmcache_persist.store.findings import CheckPart
from lmcache_persist.store.lmdb_reader import StoreReader
from lmcache_persist.store.selection import Picked, Selection


class StoreReads:
    """The reading half of :class:`~.base.DiskTier`, by a reader. Threads: any."""

    _reader: StoreReader

    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkRecord | None]:
        """See :meth:`DiskTier.find`."""
        return self._reader.find(keys)

    def scan(
        self, after: bytes, limit: int, bad: list[ChunkKey] | None = None
    ) -> list[ChunkRecord]:
        """See :meth:`DiskTier.scan`."""
        return self._reader.scan(after, limit, bad)

    def preview(self, selection: Selection, cursor: bytes, counted_bytes: int) -> Picked:
        """See :meth:`DiskTier.preview`."""
        return self._reader.preview(selection, cursor, counted_bytes)

    def read_into(self, record: ChunkRecord, place: Place, buffer: memoryview) -> bool:
        """See :meth:`DiskTier.read_into`."""
        return self._reader.read_into(record, place, buffer)

    def read_part(self, record: ChunkRecord, place: Place, index: int, buffer: memoryview) -> bool:
        """See :meth:`DiskTier.read_part`."""
        return self._reader.read_part(record, place, index, buffer)

    def page(self, after: bytes, limit: int, fingerprint: bytes = b"") -> Page:
        """See :meth:`DiskTier.page`."""
        return self._reader.page(after, limit, fingerprint)

    def check_part(self, cursor: bytes, budget_s: float, *, note: bool = False) -> CheckPart:
        """See :meth:`DiskTier.check_part`."""
        return self._reader.check_part(cursor, budget_s, note=note)

    def reads_end(self, timeout_s: float) -> bool:
        """See :meth:`DiskTier.reads_end`."""
        return self._reader.older_reads_ended(timeout_s)

    def usage(self) -> Usage:
        """See :meth:`DiskTier.usage`."""
        return self._reader.usage()

    @property
    def corrupt_found(self) -> int:
        """See :class:`DiskTier`."""
        return self._reader.corrupt_found

    def counters(self) -> fmt.Counters:
        """Numbers that only grow, kept over restarts."""
        return self._reader.counters()

    def last_serial(self) -> int:
        """See :meth:`DiskTier.last_serial`."""
        return self.counters().serial
