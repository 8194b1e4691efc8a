"""The gate that all reading of a store goes through, so that its map can be moved or closed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import lmdb

from lmcache_persist.errors import StoreBusy, StoreIOError
from lmcache_persist.store.base import READERS_GONE_S
from lmcache_persist.store.lmdb_errors import mapping_errors


class ReadGate:
    """Knows which reads are in progress. Threads: any."""

    def __init__(self, env: lmdb.Environment) -> None:
        self._env = env
        self._state = threading.Condition()
        self._reads: dict[int, None] = {}  # numbers of those in progress
        self._last_read = 0
        self._closed = False
        self._held_up = False

    @contextmanager
    def transaction(self) -> Iterator[lmdb.Transaction[memoryview]]:
        """A short reading transaction; closing waits for it."""
        with self._state:
            if self._held_up:
                self._wait_until_let_in()
            if self._closed:
                raise StoreIOError("the store is closed")
            self._last_read += 1
            number = self._last_read
            self._reads[number] = None
        try:
            with mapping_errors("a read from the store failed"):
                with self._env.begin(buffers=True) as txn:
                    yield txn
        finally:
            with self._state:
                del self._reads[number]
                self._state.notify_all()

    def _wait_until_let_in(self) -> None:
        if not self._state.wait_for(lambda: not self._held_up, READERS_GONE_S):
            raise StoreIOError("the store cannot be read: it is about to grow, and does not end")

    @contextmanager
    def nobody_reading(self, timeout_s: float) -> Iterator[None]:
        """Within, no reading transaction is open, and new ones wait: the map may be moved.

        A read that hangs delays nobody: new ones are held up only once all have ended that
        were in progress before, and no longer than ``timeout_s`` and what is done within.

        Raises:
            StoreBusy: reads do not end in time; nobody is held up any more.
        """
        busy = StoreBusy(
            f"the store is being read for more than {timeout_s:g} s, by a disk that is slow or"
            " hangs; nothing was changed",
            hint="try again",
        )
        if not self.older_reads_ended(timeout_s):
            raise busy
        with self._state:
            self._held_up = True
            ended = self._state.wait_for(lambda: not self._reads, timeout_s)
        try:
            if not ended:
                raise busy
            yield
        finally:
            with self._state:
                self._held_up = False
                self._state.notify_all()

    def older_reads_ended(self, timeout_s: float) -> bool:
        """Wait until no read that is in progress now keeps freed pages; False if one does."""
        with self._state:
            last = self._last_read
            return self._state.wait_for(
                lambda: all(number > last for number in self._reads), timeout_s
            )

    def close(self, timeout_s: float) -> None:
        """Refuse new reads and wait for those in progress; the environment stays open.

        Raises:
            StoreIOError: they did not end in time; the environment must stay open.
        """
        with self._state:
            self._closed = True
            if not self._state.wait_for(lambda: not self._reads, timeout_s):
                raise StoreIOError(
                    f"the store is still being read after {timeout_s} s and stays open"
                )
