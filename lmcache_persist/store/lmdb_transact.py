"""The one way that a store on LMDB is changed while it is in use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import lmdb

from lmcache_persist import failpoints
from lmcache_persist.binding import Binding
from lmcache_persist.store import capacity
from lmcache_persist.store import format as fmt
from lmcache_persist.store.lmdb_errors import mapping_errors
from lmcache_persist.store.lmdb_open import Databases
from lmcache_persist.store.lmdb_reader import StoreReader
from lmcache_persist.store.lmdb_txn import StoreTxn

_T = TypeVar("_T")

SLOW_READ_S = 1.0
"""Seconds that a write without room waits for reads that keep freed pages."""


class Transacts:
    """What the parts of a disk tier on LMDB share. Threads: who changes holds ``_writer``."""

    directory: Path
    relaxed: bool
    _env: lmdb.Environment
    _dbs: Databases
    _reader: StoreReader
    _budget: capacity.PageBudget
    _writer: AbstractContextManager[bool]
    _stamp: Binding | None
    _unsettled: bool

    @property
    def _binding_id(self) -> str:
        return self._stamp.binding_id if self._stamp else fmt.NO_BINDING

    def _transact(self, change: Callable[[StoreTxn], _T], before: str = "", after: str = "") -> _T:
        """Run ``change`` in one transaction and commit it; passes the failpoints named."""
        with mapping_errors("a write to the store failed"):
            with self._env.begin(write=True) as txn:
                changes = StoreTxn(txn, self._dbs, self._binding_id)
                result = change(changes)
                changes.finish()
                if before:
                    failpoints.hit(before)
            self._unsettled |= changes.lost
            if after:
                failpoints.hit(after)
            return result
