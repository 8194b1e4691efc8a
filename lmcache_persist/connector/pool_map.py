"""A client's mapping of the server's shared-memory pool.

The pool belongs to the server: a client opens and maps it, and never creates, deletes,
truncates or locks it. The mapping of a dead server is good to read from for as long as
loads need it; after that it must go, or the next server lacks its memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator

from lmcache_persist.errors import LeaseError, MalformedMessage
from lmcache_persist.protocol import PoolInfo
from lmcache_persist.shm import PoolPaths, server_is_gone

log = logging.getLogger(__name__)

_TOUCH_STEP_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23
"""Source: <linux/mman.h> since Linux 5.14."""


class PoolMap:
    """One mapped pool.

    Args:
        boot_id: of the server that made it.
        info: from its welcome.

    Raises:
        LeaseError: the file is not there, not readable, or not of the size that was said.
        MalformedMessage: what was said cannot be a pool's name.

    Threads: any.
    """

    def __init__(self, boot_id: str, info: PoolInfo) -> None:
        self.boot_id = boot_id
        self.paths = PoolPaths.said(info.path)
        self.size_bytes = info.size_bytes
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._pins = 0
        self._orphaned = False
        self._undo: Callable[[], None] | None = None
        self._idle_since = time.monotonic()
        self._map, self._inode = self._attach(info)
        self._view: memoryview | None = memoryview(self._map)

    def _attach(self, info: PoolInfo) -> tuple[mmap.mmap, int]:
        hint = "the engine must see the server's pool folder, also inside a container"
        try:
            fd = os.open(info.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise LeaseError(f"pool {info.path} is no file", hint=hint)
                if info.size_bytes <= 0 or status.st_size != info.size_bytes:
                    raise LeaseError(
                        f"pool {info.path} has {status.st_size} bytes, expected {info.size_bytes}",
                        hint=hint,
                    )
                mapped = mmap.mmap(fd, info.size_bytes, mmap.MAP_SHARED)
            finally:
                os.close(fd)
            # A forked child that lives on would keep a dead server's memory.
            mapped.madvise(mmap.MADV_DONTFORK)
        except (OSError, ValueError, OverflowError) as error:
            raise LeaseError(f"pool {info.path} cannot be mapped: {error}", hint=hint) from error
        return mapped, status.st_ino

    @property
    def closed(self) -> bool:
        """Whether the mapping was let go."""
        return self._view is None

    def view(self, offset: int, nbytes: int) -> memoryview:
        """``nbytes`` of the pool from ``offset`` on, writable, uint8.

        Raises:
            LeaseError: beyond the pool, or the mapping was let go.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("pool was mapped by another process, expected one of its own")
        if not 0 <= offset <= self.size_bytes or not 0 <= nbytes <= self.size_bytes - offset:
            raise LeaseError(
                f"slot at {offset} with {nbytes} bytes is outside of the pool's {self.size_bytes}"
            )
        with self._guard:
            if self._view is None:
                raise LeaseError(f"pool of boot {self.boot_id} was let go")
            return self._view[offset : offset + nbytes]

    @contextlib.contextmanager
    def pin(self) -> Iterator[PoolMap]:
        """Keep the mapping while a load is in flight.

        Raises:
            LeaseError: it was let go already.
        """
        self.acquire()
        try:
            yield self
        finally:
            self.release()

    def acquire(self) -> None:
        """:meth:`pin` for loads that begin and end in different calls."""
        with self._guard:
            if self._view is None:
                raise LeaseError(f"pool of boot {self.boot_id} was let go")
            self._pins += 1

    def release(self) -> None:
        """The end of one :meth:`acquire`."""
        with self._guard:
            if self._pins == 0:
                raise RuntimeError("pool was released more often than acquired")
            self._pins -= 1
            self._idle_since = time.monotonic()

    def prepare(self, prepare: Callable[[memoryview], Callable[[], None]]) -> None:
        """Have something done to the whole mapping, once; it is undone before the unmapping.

        Args:
            prepare: gets the mapping and returns what undoes it. Views wait meanwhile.

        Raises:
            LeaseError: the mapping was let go already.
        """
        with self._guard:
            if self._view is None:
                raise LeaseError(f"pool of boot {self.boot_id} was let go")
            if self._undo is None:
                self._undo = prepare(self._view)

    def touch(self) -> None:
        """Fault all pages in, so that no store pays for its first touch."""
        call = ctypes.CDLL(None, use_errno=True).madvise
        call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for start in range(0, self.size_bytes, _TOUCH_STEP_BYTES):
            with self._guard:
                if self._view is None:
                    return
                step = self._view[start : start + _TOUCH_STEP_BYTES]
            # In steps and through ctypes: the interpreter is free meanwhile.
            window = (ctypes.c_char * len(step)).from_buffer(step)
            failed = call(ctypes.addressof(window), len(step), _MADV_POPULATE_WRITE) != 0
            del window
            step.release()
            if failed:
                if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS):
                    log.warning("pool %s: pages cannot be touched ahead", self.paths.pool)
                return

    def owner_is_gone(self) -> bool:
        """Whether the server that made this pool has ended.

        Its lock is free, or somebody (a later server: there is one at a time) replaced or
        removed its file.
        """
        try:
            replaced = os.stat(self.paths.pool).st_ino != self._inode
        except FileNotFoundError:
            return True
        except OSError:
            replaced = False
        try:
            return replaced or server_is_gone(self.paths)
        except OSError:
            return False

    def let_go_if_idle(self, idle_s: float) -> bool:
        """Unmap the pool of a dead server, unless a load was in flight within ``idle_s``.

        The same goes for the server's end: slots that it named in its last moment may
        still be on their way to a worker.
        """
        with self._guard:
            if not self._orphaned:
                self._orphaned, self._idle_since = True, time.monotonic()
            if self._pins or time.monotonic() - self._idle_since < idle_s:
                return False
            return self._let_go()

    def close(self) -> None:
        """Unmap, whatever is in flight; memory goes when the last view of it does."""
        with self._guard:
            self._let_go()

    def _let_go(self) -> bool:
        view, self._view = self._view, None
        if view is None:
            return True
        if self._undo is not None:
            self._undo()
        view.release()
        try:
            self._map.close()
        except BufferError:
            # Somebody still holds a view: the pages go with it.
            log.info("pool of boot %s is let go while a view of it is held", self.boot_id)
        del self._map
        return True


class PoolMaps:
    """The pools of one client by boot id: the present server's, and earlier ones still needed.

    Threads: any.
    """

    def __init__(self, idle_s: float, touch: bool) -> None:
        self._idle_s, self._touch = idle_s, touch
        self._guard = threading.Lock()
        self._maps: dict[str, PoolMap] = {}

    def get(self, boot_id: str) -> PoolMap | None:
        """The mapping of that boot, None if there is none or it was let go."""
        with self._guard:
            return self._maps.get(boot_id)

    def attach(self, boot_id: str, info: PoolInfo) -> PoolMap:
        """Map the pool of a server, unless it is mapped already.

        Raises:
            LeaseError, MalformedMessage: as :class:`PoolMap`, or it is not the one it was.
        """
        with self._guard:
            known = self._maps.get(boot_id)
            if known is not None and not known.closed:
                if (str(known.paths.pool), known.size_bytes) != (info.path, info.size_bytes):
                    raise MalformedMessage(
                        f"pool of boot {boot_id} is {info.path!r:.200} with {info.size_bytes}"
                        f" bytes, expected {known.paths.pool} with {known.size_bytes} as before"
                    )
                return known
            pool = self._maps[boot_id] = PoolMap(boot_id, info)
        if self._touch:
            threading.Thread(target=pool.touch, name="lmcache-persist-touch", daemon=True).start()
        return pool

    def reap(self, current_boot: str | None) -> bool:
        """Let go the pools of dead servers that no load needs; whether others remain."""
        with self._guard:
            others = [pool for boot, pool in self._maps.items() if boot != current_boot]
        for pool in others:
            if pool.owner_is_gone() and pool.let_go_if_idle(self._idle_s):
                with self._guard:
                    if self._maps.get(pool.boot_id) is pool:
                        del self._maps[pool.boot_id]
        with self._guard:
            return any(boot != current_boot for boot in self._maps)

    def close(self) -> None:
        """Let all go."""
        with self._guard:
            maps, self._maps = list(self._maps.values()), {}
        for pool in maps:
            pool.close()
