"""A server in this process, whose disk does what a test tells it: for what no kill can show."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from lmcache_persist.config import Settings
from lmcache_persist.datadir import DataDir, make_data_dir
from lmcache_persist.errors import StoreIOError
from lmcache_persist.manifest import Manifest
from lmcache_persist.server import sessions
from lmcache_persist.server.assembly import assemble
from lmcache_persist.server.http import HttpServer
from lmcache_persist.server.own_files import OwnFiles
from lmcache_persist.server.service import Service
from lmcache_persist.server.state import ServerState
from lmcache_persist.shm import PoolPaths
from lmcache_persist.store.base import ChunkRecord, ChunkWrite, Place, WriteReport
from lmcache_persist.store.memory_disk import MemoryDisk
from lmcache_persist.store.pool import Pool

POOL_BYTES = 8 << 20
WAIT_S = 60.0


class ObedientDisk(MemoryDisk):
    """A disk tier whose reads and writes can be held up, and whose writes can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.writes = threading.Event(), threading.Event()
        self.reads.set()
        self.writes.set()
        self.reading, self.writing = threading.Event(), threading.Event()
        self.fails = False

    def read_into(self, record: ChunkRecord, place: Place, buffer: memoryview) -> bool:
        self.reading.set()
        self.reads.wait(WAIT_S)
        return super().read_into(record, place, buffer)

    def write(self, batch: Sequence[ChunkWrite]) -> WriteReport:
        self.writing.set()
        self.writes.wait(WAIT_S)
        if self.fails:
            raise StoreIOError("disk is on strike")
        return super().write(batch)


@dataclass
class LocalServer:
    """A server that runs in a thread.

    Attributes:
        url: its endpoint.
        http: where its pages are.
        state: its parts.
        service: its verbs.
        disk: obeys the test.
    """

    url: str
    http: str
    state: ServerState
    service: Service
    disk: ObedientDisk

    def empty_pool(self) -> None:
        """Evict all that nobody holds, so that it has to be read from disk."""
        done = threading.Event()

        def evict() -> None:
            while self.state.memory._evict_one():
                pass
            done.set()

        self.state.mailbox.post(evict)
        if not done.wait(WAIT_S):
            raise TimeoutError("the loop does not turn")


@contextlib.contextmanager
def local_server(folder: Path, pool_bytes: int = POOL_BYTES) -> Iterator[LocalServer]:
    """A server on ``folder``, unbound and empty, until the end of the block."""
    settings = Settings(data_dir=folder / "d", pool_dir=folder)
    paths = make_data_dir(settings.data_dir, group_id=None)
    DataDir(settings.data_dir).store.mkdir()
    disk = ObedientDisk()
    pool = Pool.create(PoolPaths.of(folder, disk.uuid), pool_bytes, wait_s=1)
    manifest = Manifest.open(paths.manifest)
    files = OwnFiles(paths.root, [paths.manifest])
    state, service, loop = assemble(settings, "b" * 32, manifest, disk, pool, files)
    url = loop.listen(settings.listen)
    http = HttpServer("127.0.0.1:0")
    http.start(service)
    thread = threading.Thread(target=loop.run, name="loop", daemon=True)
    thread.start()
    # Locks of the own process look free to it: here the clients live as long as they say.
    living = mock.patch.object(sessions, "client_is_dead", return_value=False)
    living.start()
    try:
        yield LocalServer(url, f"http://127.0.0.1:{http.port}", state, service, disk)
    finally:
        living.stop()
        disk.reads.set()
        disk.writes.set()
        loop.stop()
        thread.join(WAIT_S)
        loop.close()
        http.close()
        state.writer.close(WAIT_S)
        state.end_readers()
        state.end_clerk(WAIT_S)
        disk.close()
        manifest.close()
        pool.close(remove=True)
        files.close()
        state.mailbox.close()
