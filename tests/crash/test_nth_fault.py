"""Every I/O call fails in turn, in store and manifest; the state is the one before or after.

The scenario of each test is run with the 1st, 2nd, 3rd, ... call failing, until a run meets
no fault. What fails is a typed error; nothing else changes; the same work then succeeds.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmcache_persist import failpoints
from lmcache_persist.connector import ClientOptions
from lmcache_persist.errors import PersistError
from lmcache_persist.manifest import (
    BootRow,
    Manifest,
    ManifestSnapshot,
    RejectionRow,
    read_snapshot,
)
from lmcache_persist.store import offline
from lmcache_persist.store.base import ChunkWrite, Place
from lmcache_persist.store.lmdb_disk import LmdbDisk
from store_support import MIB, UUID, binding, read
from store_support import chunk as make_chunk
from store_support import key as make_key
from support import mounts
from support.emulated import EmulatedEngine
from support.faults import Faults, break_lmdb, break_os, break_sqlite
from support.manifest import binding as manifest_binding
from support.server import ServerProcess, run_cli

MakeServer = Callable[..., ServerProcess]
CAPACITY = 16 * MIB
MAX_CALLS = 2000
NBYTES = MIB + 5
NUMBERS = range(24)

key = functools.cache(make_key)
"""The same few chunks are made many hundred times."""
_chunk = functools.cache(lambda number, sizes: make_chunk(number, dict(sizes)))


def chunk(number: int, sizes: dict[Place, int] | int) -> ChunkWrite:
    """As :func:`store_support.chunk`, kept."""
    sizes = {Place(0, 0): sizes} if isinstance(sizes, int) else sizes
    return _chunk(number, tuple(sorted(sizes.items())))


# -- the store --------------------------------------------------------------------------------


class StoreRun:
    """One run of the scenario on a store; each step is a method, in this order."""

    STEPS = ("open", "stamp", "write", "touch", "add", "fill", "evict", "drop", "reads", "close")

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.disk: LmdbDisk | None = None

    def open(self) -> None:
        self.disk = LmdbDisk.open(self.directory, CAPACITY, uuid=UUID)

    @property
    def _disk(self) -> LmdbDisk:
        assert self.disk is not None
        return self.disk

    def stamp(self) -> None:
        self._disk.write_stamp(binding())

    def write(self) -> None:
        report = self._disk.write([chunk(number, 100_000) for number in range(4)])
        assert len(report.written) == 4

    def touch(self) -> None:
        self._disk.touch([key(0), key(1)])
        self._disk.apply_touches()

    def add(self) -> None:
        more = {Place(0, 0): 100_000, Place(1, 0): 5000}
        assert self._disk.write([chunk(2, more)]).written == [key(2)]

    def fill(self) -> None:
        for number in range(10, 24):
            if self._disk.find([key(number)])[0] is None:
                assert self._disk.write([chunk(number, NBYTES)]).written == [key(number)]

    def evict(self) -> None:
        while self._disk.evict():
            pass

    def drop(self) -> None:
        self._disk.drop({key(23): None, key(22): None})

    def reads(self) -> None:
        records = self._disk.find([key(number) for number in NUMBERS])
        for number, record in zip(NUMBERS, records, strict=True):
            sizes = {p: record.objects.nbytes(p) for p in record.objects} if record else {}
            for place in sizes:
                assert record is not None
                assert read(self._disk, record, place) == chunk(number, sizes).objects[place]

    def close(self) -> None:
        self._disk.close()


def held(directory: Path) -> tuple[Any, ...]:
    """What is on disk: the stamp, and chunks with their digests. None of it if no store."""
    if not (directory / "data.mdb").exists():
        return (None, {})
    # Bytes are compared by the scenario's own reads.
    assert [str(violation) for violation in offline.check(directory, digests=False)] == []
    with offline.OfflineStore.open(directory) as store:
        return (
            store.meta.stamp,
            {r.key: (len(r.objects), r.objects.digests) for r in store.records()},
        )


def expected_states(directory: Path) -> dict[str, tuple[Any, ...]]:
    """What is on disk after each step of an undisturbed run."""
    run, states = StoreRun(directory), {}
    for step in run.STEPS:
        getattr(run, step)()
        if step == "close":
            states[step] = held(directory)
        else:
            # A reader beside the writer of the same process is none of LMDB's habits.
            disk = run._disk
            records = filter(None, disk.find([key(number) for number in NUMBERS]))
            states[step] = (
                disk.stamp(),
                {r.key: (len(r.objects), r.objects.digests) for r in records},
            )
    return states


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("layer", "code", "after"),
    [("os", errno.EIO, False), ("os", errno.ENOSPC, True), ("lmdb", 0, False), ("lmdb", 0, True)],
)
def test_every_call_of_the_store_fails_in_turn(
    in_memory: Path, layer: str, code: int, after: bool
) -> None:
    """A typed error, the state before or after the step, and then the same work succeeds."""
    states = expected_states(in_memory / "reference")
    fired: list[str] = []
    for nth in range(1, MAX_CALLS):
        directory = in_memory / f"run-{nth}" / "store"
        directory.parent.mkdir()
        faults = Faults(directory.parent, nth, code, after=after)
        with pytest.MonkeyPatch.context() as patch:
            if layer == "os":
                break_os(patch, faults)
                failed = run_store(directory, faults, states, [])
            else:
                failed = run_store(directory, faults, states, break_lmdb(patch, faults))
        if not faults.fired:
            break
        fired.append(faults.fired)
        if failed not in MANY_TRANSACTIONS:
            assert held(directory) == states["close"], f"call {nth}, {faults.fired}"
        (directory / "data.mdb").unlink()
    print(f"{len(fired)} faults of {layer}, after={after}: {sorted(set(fired))}")
    assert len(fired) > 10, "the faults are not seen"
    assert len(fired) < MAX_CALLS - 1, "the loop never came to its end"


MANY_TRANSACTIONS = ("fill", "evict")
"""Steps that may also be left between two transactions; what is evicted later may differ."""


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder where a sync costs nothing: what fails here fails by our own hand."""
    base = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="lp-test-", dir=base if base.is_dir() else None))
    yield folder
    shutil.rmtree(folder)


def run_store(
    directory: Path, faults: Faults, states: dict[str, tuple[Any, ...]], opened: list[Any]
) -> str:
    """The scenario with one fault; the step that met it is looked at and done again.

    Returns:
        That step, empty if there was none.
    """
    run, failed = StoreRun(directory), ""
    before: tuple[Any, ...] = (None, {})
    for step in run.STEPS:
        try:
            getattr(run, step)()
        except PersistError as error:
            where = f"call {faults.nth} ({faults.fired}) in {step}: {error}"
            faults.active, failed = False, step
            for env in opened:
                env.close()
            if run.disk is not None:
                with contextlib.suppress(PersistError):
                    run.disk.close()
            found = held(directory)
            assert_between(step, found, before, states[step], where)
            run.open()
            if step != "open":
                getattr(run, step)()
        else:
            if faults.fired:
                faults.active = False  # swallowed where it does no harm
        before = states[step]
    return failed


def assert_between(
    step: str, found: tuple[Any, ...], before: tuple[Any, ...], after: tuple[Any, ...], where: str
) -> None:
    """One of the two; a step of many transactions may also be at any of them."""
    if step in MANY_TRANSACTIONS:
        for chunk_key, value in found[1].items():
            assert value in (before[1].get(chunk_key), after[1].get(chunk_key), value), where
        return
    assert found in (before, after), where


# -- the manifest -----------------------------------------------------------------------------

AT = "2026-01-02T03:04:05.000006Z"
BOOT = BootRow("b" * 32, AT, 1, "0", "k")


@dataclass
class ManifestRun:
    """One run of the scenario on a manifest."""

    path: Path
    manifest: Manifest | None = None

    STEPS = ("open", "bind", "model", "model_again", "rejection", "boot", "end", "read", "close")

    @property
    def _manifest(self) -> Manifest:
        assert self.manifest is not None
        return self.manifest

    def open(self) -> None:
        self.manifest = Manifest.open(self.path, busy_timeout_s=1.0)

    def bind(self) -> None:
        assert self._manifest.bind(manifest_binding())[0] == manifest_binding()

    def model(self) -> None:
        self._manifest.record_model(
            fingerprint="f" * 64,
            name="m",
            identity={"model": "m"},
            groups=[],
            layouts=[],
            required_alignment=544,
            at=AT,
        )

    model_again = model

    def rejection(self) -> None:
        self._manifest.record_rejections([RejectionRow(AT, "incompatible_alignment", "d", 1)])

    def boot(self) -> None:
        self._manifest.start_boot(BOOT)

    def end(self) -> None:
        self._manifest.end_boot(BOOT.boot_id, at=AT, clean=True)

    def read(self) -> None:
        assert self._manifest.binding() == manifest_binding()
        assert len(self._manifest.models()) == 1
        assert len(self._manifest.rejections()) == 1

    def close(self) -> None:
        self._manifest.close()


NOTHING = ManifestSnapshot(0, None, [], [], [])


def manifest_state(path: Path) -> ManifestSnapshot:
    """What a start would find."""
    try:
        return read_snapshot(path)
    except FileNotFoundError:
        return NOTHING


def manifest_states(folder: Path) -> dict[str, ManifestSnapshot]:
    """After each step of undisturbed runs."""
    states = {}
    for number, last in enumerate(ManifestRun.STEPS):
        folder.joinpath(str(number)).mkdir(parents=True)
        run = ManifestRun(folder / str(number) / "manifest")
        for step in run.STEPS[: number + 1]:
            getattr(run, step)()
        run.close()
        states[last] = manifest_state(run.path)
    return states


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("layer", "code", "after"),
    [
        ("os", errno.EIO, False),
        ("os", errno.ENOSPC, True),
        ("sqlite", sqlite3.SQLITE_IOERR_WRITE, False),
        ("sqlite", sqlite3.SQLITE_IOERR_FSYNC, True),
        ("sqlite", sqlite3.SQLITE_FULL, False),
    ],
)
def test_every_call_of_the_manifest_fails_in_turn(
    tmp_path: Path, layer: str, code: int, after: bool
) -> None:
    """A typed error, the state before or after the step, and then the same work succeeds."""
    states = manifest_states(tmp_path / "reference")
    fired: list[str] = []
    for nth in range(1, MAX_CALLS):
        folder = tmp_path / f"run-{nth}"
        folder.mkdir()
        faults = Faults(folder, nth, code, after=after)
        with pytest.MonkeyPatch.context() as patch:
            if layer == "os":
                break_os(patch, faults)
            else:
                break_sqlite(patch, faults, code)
            run_manifest(folder / "manifest", faults, states)
        if not faults.fired:
            break
        fired.append(faults.fired)
        assert manifest_state(folder / "manifest") == states["close"]
    print(f"{len(fired)} faults of {layer}, after={after}: {sorted(set(fired))}")
    assert len(fired) > (2 if layer == "os" else 10), "the faults are not seen"
    assert len(fired) < MAX_CALLS - 1, "the loop never came to its end"


def run_manifest(path: Path, faults: Faults, states: dict[str, ManifestSnapshot]) -> None:
    """The scenario with one fault; the step that met it is looked at, and done if it was not."""
    run, before = ManifestRun(path), NOTHING
    for step in run.STEPS:
        try:
            getattr(run, step)()
        except PersistError as error:
            where = f"call {faults.nth} ({faults.fired}) in {step}: {error}"
            faults.active = False
            if run.manifest is not None:
                run.manifest.close()
            found = manifest_state(path)
            assert found in (before, states[step]), where
            run.open()
            if found == before and step != "open":
                getattr(run, step)()
        else:
            if faults.fired:
                faults.active = False
        before = states[step]


def test_a_disk_that_fills_up_under_the_manifest(root: Path) -> None:
    """SQLite's own writes meet a full disk at every page: before or after, never in between."""
    states = manifest_states(root / "reference")
    refused = 0
    with mounts.tmpfs(root / "small", "2m") as small:
        for pages in range(0, 60, 2):
            folder = small / "d"
            folder.mkdir()
            foreign = mounts.fill(small, leave_bytes=0)
            full = foreign.stat().st_size
            with foreign.open("r+b") as file:
                file.truncate(full - pages * 4096)
            refused += fill_up(folder / "manifest", foreign, states)
            foreign.unlink(missing_ok=True)
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
    print(f"{refused} of 30 runs met a full disk")
    assert 0 < refused < 30


def fill_up(path: Path, foreign: Path, states: dict[str, ManifestSnapshot]) -> bool:
    """The scenario until the disk is full; then there is room, and it goes on."""
    run, before, met = ManifestRun(path), NOTHING, False
    for step in run.STEPS:
        try:
            getattr(run, step)()
        except PersistError:
            met = True
            if run.manifest is not None:
                run.manifest.close()
            foreign.unlink(missing_ok=True)
            found = manifest_state(path)
            assert found in (before, states[step]), step
            run.open()
            if found == before and step != "open":
                getattr(run, step)()
        before = states[step]
    assert manifest_state(path) == states["close"]
    return met


# -- a real server ----------------------------------------------------------------------------

OPTIONS = ClientOptions(request_timeout_s=10.0)
NUM_CHUNKS = 10


@pytest.mark.parametrize("point", [name for name in failpoints.NAMES if name.startswith("bind.")])
def test_a_bind_that_fails_can_be_done_again(make_server: MakeServer, point: str) -> None:
    """The client is told, the server lives, and the next bind holds in manifest and store."""
    server = make_server(env={failpoints.ENV: f"{point}=error@1"}).start()
    with EmulatedEngine(server.url, [544], options=OPTIONS) as engine:
        engine.client.wait_connected(20)
        with pytest.raises(PersistError):
            engine.client.bind(engine.groups, timeout_s=20)
        engine.join()
        assert engine.chunk_size == 544
        hashes = engine.hashes(list(range(545)))
        assert engine.store(hashes) == 1
        engine.client.flush(20)
    assert server.terminate() == 0
    assert run_cli("verify", str(server.data_dir)).returncode == 0


@pytest.mark.parametrize(
    "point", ["commit.before_write", "commit.after_extents", "commit.before_sync"]
)
def test_a_store_that_fails_is_never_promised_later(make_server: MakeServer, point: str) -> None:
    """The write of chunk 5 of 10 fails: counted, and after a restart 4 chunks are hit."""
    server = make_server(env={failpoints.ENV: f"{point}=error@5"}).start()
    with EmulatedEngine(server.url, [256], options=OPTIONS) as engine:
        engine.join()
        hashes = engine.hashes(list(range(256 * NUM_CHUNKS + 1)))
        for chunk_hash in hashes:
            assert engine.store([chunk_hash]) == 1
            engine.client.flush(20)
        found = engine.client.stats(20)
        assert found["counters"]["dropped_chunks"] == 1
        assert found["writer"]["failures"] == 1
        assert not found["writer"]["failing"]
        # In the pool it is whole, so it may be served while this server lives.
        assert engine.lookup(hashes, 256 * NUM_CHUNKS + 1).tokens == 256 * NUM_CHUNKS
    server.kill()
    assert run_cli("verify", str(server.data_dir)).returncode == 0
    server._env.pop(failpoints.ENV)
    server.start()
    with EmulatedEngine(server.url, [256], options=OPTIONS) as engine:
        engine.join()
        assert engine.lookup(hashes, 256 * NUM_CHUNKS + 1).tokens == 256 * 4
        assert engine.store(hashes) == NUM_CHUNKS
        engine.client.flush(20)
        assert engine.lookup(hashes, 256 * NUM_CHUNKS + 1).tokens == 256 * NUM_CHUNKS
    server.terminate()
    assert run_cli("verify", str(server.data_dir)).returncode == 0


@pytest.mark.parametrize("point", ["evict.before_sync", "evict.after_sync", "commit.after_sync"])
def test_an_eviction_that_fails_stops_nothing(make_server: MakeServer, point: str) -> None:
    """Far more than the capacity goes through, though one transaction in the middle fails."""
    server = make_server(
        capacity="16MiB", pool_size="16MiB", env={failpoints.ENV: f"{point}=error@2"}
    ).start()
    with EmulatedEngine(server.url, [256], object_bytes=1 << 20, options=OPTIONS) as engine:
        engine.join()
        for prompt in range(10):
            hashes = engine.hashes([prompt, *range(256 * 3)])
            assert engine.store(hashes) == 3
            engine.client.flush(20)
        assert engine.client.stats(20)["writer"]["failures"] == 1
        assert engine.lookup(hashes, 256 * 3 + 1).tokens == 256 * 3
    server.terminate()
    assert run_cli("verify", str(server.data_dir)).returncode == 0
