"""Several engines that store, look up and flush through real clients, until they are stopped.

What a flush confirmed is written down: the ledger is what a crash is judged by.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lmcache_persist.connector import ClientOptions
from lmcache_persist.errors import PersistError
from lmcache_persist.hashing import EXTENT_BYTES, ChunkHash, extent_digest
from lmcache_persist.identity import Fingerprint
from lmcache_persist.server.offline import check
from lmcache_persist.store.base import ChunkKey, ChunkRecord, chunk_key
from lmcache_persist.store.format import Counters
from lmcache_persist.store.offline import OfflineStore
from support.emulated import EmulatedEngine, pattern

CHUNK = 256
OPTIONS = ClientOptions(request_timeout_s=5.0, reconnect_max_s=0.1)
OBJECT_BYTES = (40_000, 200_000, EXTENT_BYTES + 100)
WORLD_SIZES = (1, 2, 1)
MAX_CHUNKS = 6
LATEST = 40
"""Prompts that are looked up; older ones are evicted from a small store."""


@dataclass
class Ledger:
    """What the engines did, over all servers of a data dir.

    Attributes:
        known: every chunk that was ever offered, with the bytes of its objects and its ranks.
        durable: those that a flush confirmed.
        dropped: chunks that servers said they dropped; they are not confirmed.
        checked_objects: objects whose bytes were compared.
        gone: durable chunks that were missing when it was last judged, all of them evicted.
        removed: what the store had counted as evicted or dropped then.
    """

    known: dict[ChunkKey, tuple[int, int]] = field(default_factory=dict)
    durable: set[ChunkKey] = field(default_factory=set)
    dropped: int = 0
    checked_objects: int = 0
    gone: set[ChunkKey] = field(default_factory=set)
    removed: int = 0
    prompts: dict[str, list[list[ChunkHash]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Worker:
    """One engine in a thread of its own.

    Args:
        url: the server's.
        number: of the engine; its model and sizes follow from it.
        ledger: shared.
        seed: what it stores and in which order.
    """

    def __init__(self, url: str, number: int, ledger: Ledger, seed: int) -> None:
        self.number = number
        self.ledger = ledger
        self.fingerprint = Fingerprint("")
        self.failure: BaseException | None = None
        self.rounds = 0
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self.engine = EmulatedEngine(
            url,
            [CHUNK],
            object_bytes=OBJECT_BYTES[number],
            world_size=WORLD_SIZES[number],
            name=f"engine-{number}",
            changes={"weights": f"w{number}"},
            options=OPTIONS,
        )
        self._thread = threading.Thread(target=self._run, name=f"load-{number}", daemon=True)

    def join(self) -> None:
        """Connect, bind, register."""
        self.engine.client.wait_connected(30)
        self.engine.client.bind(self.engine.groups, who=self.engine.name, timeout_s=20)
        for rank in range(self.engine.world_size):
            self.fingerprint = Fingerprint(self.engine.register(rank))

    def start(self) -> None:
        """Join, then begin."""
        self.join()
        self._thread.start()

    def stop(self) -> None:
        """End the thread and the client."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(60)
        alive = self._thread.is_alive()
        self.engine.client.close()
        if alive:
            raise AssertionError(f"engine {self.number} hangs")

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._round()
                self.rounds += 1
        except PersistError:
            pass  # the server is dead, as it should be
        except RuntimeError as error:
            if "pool" not in str(error) and "bound" not in str(error):
                self.failure = error
        except BaseException as error:  # noqa: BLE001 - told by the main thread
            self.failure = error

    def _round(self) -> None:
        hashes = self.store(self._rng.randint(1, MAX_CHUNKS))
        if self._rng.random() < 0.7:
            self.flush([hashes])
        if self._rng.random() < 0.5:
            self.look_up(1)

    def store(self, num_chunks: int) -> list[ChunkHash]:
        """Store a new prompt; what had no room in the pool is not stored."""
        tokens = [self._rng.randrange(1 << 30), *range(CHUNK * num_chunks)]
        hashes = self.engine.hashes(tokens)
        with self.ledger.lock:
            for chunk_hash in hashes:
                key = chunk_key(self.fingerprint, chunk_hash)
                self.ledger.known[key] = (self.engine.object_bytes, self.engine.world_size)
            self.ledger.prompts.setdefault(self.fingerprint, []).append(list(hashes))
        granted = self.engine.store(hashes)
        return list(hashes[:granted]) if granted == len(hashes) else []

    def flush(self, prompts: Sequence[Sequence[ChunkHash]]) -> None:
        """Flush, and write down what is durable now."""
        client = self.engine.client
        boot = client.boot_id
        client.flush(30)
        dropped = client.stats(10)["counters"]["dropped_chunks"]
        with self.ledger.lock:
            self.ledger.dropped = max(self.ledger.dropped, dropped)
            if dropped or client.boot_id != boot:
                return  # of which prompt cannot be told
            for hashes in prompts:
                self.ledger.durable.update(chunk_key(self.fingerprint, h) for h in hashes)

    def look_up(self, count: int) -> int:
        """Look up some prompts, each promised byte compared; the number of tokens hit."""
        tokens = 0
        with self.ledger.lock:
            prompts = list(self.ledger.prompts.get(self.fingerprint, []))[-LATEST:]
        for hashes in self._rng.sample(prompts, min(count, len(prompts))):
            found = self.engine.lookup(hashes, len(hashes) * CHUNK + 1)
            tokens += found.tokens
            with self.ledger.lock:
                self.ledger.checked_objects += (found.tokens // CHUNK) * self.engine.world_size
        return tokens


@contextmanager
def running(url: str, ledger: Ledger, seed: int) -> Iterator[list[Worker]]:
    """All engines at work; stopped at the end, and what went wrong in them is raised."""
    workers = [Worker(url, number, ledger, seed + number) for number in range(len(OBJECT_BYTES))]
    try:
        for worker in workers:
            worker.start()
        yield workers
    finally:
        for worker in workers:
            worker.stop()
    for worker in workers:
        if worker.failure is not None:
            raise AssertionError(f"engine {worker.number}: {worker.failure}") from worker.failure


@dataclass(frozen=True)
class Contents:
    """What a store holds: records by key, its counters."""

    records: dict[ChunkKey, ChunkRecord]
    counters: Counters


def contents(directory: Path) -> Contents:
    """Read a store that nobody serves."""
    with OfflineStore.open(directory) as store:
        return Contents({r.key: r for r in store.records()}, store.counters())


def judge(data_dir: Path, ledger: Ledger) -> Contents:
    """The oracle after a crash; returns what is there.

    ``verify`` is clean (digests against bytes, usage exact, nothing dangling); every record is
    of a chunk that was offered, with the digests of its bytes; what was durable is there, or
    its removal is in the store's own count.
    """
    violations = [str(violation) for violation in check(data_dir)]
    assert violations == []
    found = contents(data_dir / "store")
    for key, record in found.records.items():
        assert key in ledger.known, "a chunk that nobody stored"
        nbytes, world_size = ledger.known[key]
        assert len(record.objects) == world_size, "a chunk lacks a rank"
        for place, stored in record.objects.items():
            wanted = pattern(key[32:], place.group, place.rank, nbytes)
            digests = tuple(
                extent_digest(wanted[at : at + EXTENT_BYTES])
                for at in range(0, nbytes, EXTENT_BYTES)
            )
            assert (stored.nbytes, tuple(stored.digests)) == (nbytes, digests), "wrong bytes"
            ledger.checked_objects += 1
    # Since the last crash, so that many evictions long ago excuse nothing now.
    gone = ledger.durable - found.records.keys()
    removed = found.counters.evicted + found.counters.dropped
    excused = removed - ledger.removed
    assert len(gone - ledger.gone) <= excused, (
        f"{len(gone - ledger.gone)} durable chunks are gone, {excused} were removed"
    )
    ledger.gone, ledger.removed = gone, removed
    return found
