"""Growing a store while it is in use.

Order: all new blocks, durable, behind what is mapped -> nobody reads or writes, so that
nothing holds an address of the map -> the map is made anew, larger -> the store notes it.
A crash before the last step leaves the old capacity and a file that is longer, which the
next start cuts; afterwards the new one.

LMDB moves its map in place (``mdb_env_set_mapsize``), so environment and handles stay what
they are, also for whoever is between two transactions. It unmaps before it maps, though:
what could fail then is tried before.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import lmdb

from lmcache_persist import failpoints
from lmcache_persist.errors import StoreError, StoreIOError
from lmcache_persist.store import capacity, data_file, preallocation
from lmcache_persist.store.lmdb_errors import mapping_errors
from lmcache_persist.store.lmdb_transact import Transacts

logger = logging.getLogger(__name__)

QUIET_S = 1.0
"""Seconds that a growth waits for older reads, then, with new ones held up, for those since."""


class GrowsInUse(Transacts):
    """The part of a disk tier on LMDB that makes it larger."""

    capacity_bytes: int
    _map_lost = False

    def allocate(self, capacity_bytes: int, on_piece: Callable[[int], None]) -> None:
        """See :meth:`DiskTier.allocate`."""
        path = self.directory / data_file.DATA_NAME

        def piece(done: int) -> None:
            failpoints.hit("grow.while_allocating")
            on_piece(done)

        with mapping_errors("the store cannot grow"):
            preallocation.check_room(self.directory, capacity_bytes - self.capacity_bytes)
            in_use = self._reader.fileno()
            preallocation.extend(path, in_use, self.capacity_bytes, capacity_bytes, piece)
            try:
                _try_map(path, capacity_bytes)
            except BaseException:
                self.give_back()
                raise
            failpoints.hit("grow.after_allocate")

    def give_back(self) -> None:
        """See :meth:`DiskTier.give_back`; if that fails, the next start does it."""
        try:
            path = self.directory / data_file.DATA_NAME
            preallocation.cut_back(path, self._reader.fileno(), self.capacity_bytes)
        except StoreError as error:
            logger.warning("the next start of the store gives room back: %s", error)

    def grow(self, capacity_bytes: int, *, over_bytes: int = 0) -> None:
        """See :meth:`DiskTier.grow`."""
        budget = capacity.grown(self._budget, capacity_bytes)
        with self._writer:
            if budget.total > self._budget.total:
                self._move_map(budget)
            # Any commit notes the size of the map.
            self._transact(lambda txn: txn.note_grown(over_bytes), after="grow.after_note")

    def _move_map(self, budget: capacity.PageBudget) -> None:
        capacity_bytes = budget.total * budget.page_bytes
        check_allocated(self._reader.fileno(), capacity_bytes)
        with self._reader.nobody_reading(QUIET_S):
            self._map_lost = True
            move_map(self._env, capacity_bytes)
            self._map_lost = False
            self.capacity_bytes, self._budget = capacity_bytes, budget
            self._reader.moved(budget)
        failpoints.hit("grow.after_map")


def _try_map(path: Path, capacity_bytes: int) -> None:
    """Do what LMDB is going to do, beside the map that is there.

    Raises:
        OSError: the process has no such room among its addresses, or the disk fails.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, capacity_bytes)  # which is its length
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        mmap.mmap(fd, capacity_bytes, mmap.MAP_SHARED, writable).close()
    finally:
        os.close(fd)


def check_allocated(fd: int, capacity_bytes: int) -> None:
    """Refuse to map a file that is shorter: LMDB would lengthen it, without any blocks.

    Raises:
        StoreIOError: as said.
    """
    with mapping_errors("the store cannot grow"):
        found = os.fstat(fd).st_size
    if found < capacity_bytes:
        raise StoreIOError(f"the data file has {found} bytes, expected {capacity_bytes}")


def move_map(env: lmdb.Environment, capacity_bytes: int) -> None:
    """Map the file anew; no transaction is open, and none begins meanwhile.

    Raises:
        StoreIOError: nothing is mapped any more: ``env`` refuses all from now on, and must
            not be closed.
    """
    try:
        env.set_mapsize(capacity_bytes)
    except lmdb.Error as error:
        # Closed, by the collector too, it may unmap what is somebody else's by then.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(env))
        raise StoreIOError(
            f"the store's map is lost: {error}; what is in memory is served",
            hint="restart the server; nothing durable is lost",
        ) from error
