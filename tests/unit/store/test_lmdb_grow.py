"""A store that grows while it is in use."""

from __future__ import annotations

import errno
import gc
import operator
import os
import random
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest

from lmcache_persist.errors import (
    ConfigError,
    DiskTooSmall,
    StoreBusy,
    StoreError,
    StoreIOError,
)
from lmcache_persist.store import lmdb_grow, offline, preallocation
from lmcache_persist.store.base import ChunkWrite, Place
from lmcache_persist.store.capacity import PageBudget
from lmcache_persist.store.lmdb_disk import LmdbDisk
from store_support import MIB, UUID, assert_reads_back, binding, chunk, read
from support.faults import Faults, break_lmdb, break_os
from support.forked import in_child
from support.waiting import wait_until

BEFORE, AFTER = 16 * MIB, 48 * MIB
SMALL = {Place(0, 0): 100_000}


def nothing(done: int) -> None:
    """Nobody wants to know how far it is."""


def grow(disk: LmdbDisk, capacity_bytes: int = AFTER) -> None:
    """Both steps."""
    disk.allocate(capacity_bytes, nothing)
    disk.grow(capacity_bytes)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store's folder that does not exist yet."""
    return tmp_path / "store"


@pytest.fixture
def disk(directory: Path) -> Iterator[LmdbDisk]:
    """A store with ten chunks; closed and checked at the end."""
    disk = LmdbDisk.open(directory, BEFORE, uuid=UUID)
    disk.write_stamp(binding())
    disk.write(WRITES)
    yield disk
    disk.close()
    assert list(offline.check(directory)) == []


WRITES = [chunk(number, 300_000) for number in range(10)]


def length(directory: Path) -> int:
    """Of the data file."""
    return (directory / "data.mdb").stat().st_size


@pytest.mark.parametrize("relaxed", [False, True])
def test_a_store_grows_while_it_is_open(directory: Path, relaxed: bool) -> None:
    """All blocks are there, all bytes read back, watermarks are the new ones, and a start keeps."""
    disk = LmdbDisk.open(directory, BEFORE, uuid=UUID, relaxed=relaxed)
    disk.write_stamp(binding())
    disk.write(WRITES)
    base = disk._reader._extents._base
    grow(disk)
    assert disk.capacity_bytes == disk.usage().capacity_bytes == AFTER
    assert disk._budget == disk._reader.budget == PageBudget.of(AFTER)
    assert os.stat(directory / "data.mdb").st_blocks * 512 >= AFTER
    assert length(directory) == AFTER
    assert_reads_back(disk, WRITES)
    assert disk._reader._extents.direct
    print(f"the map was at {base}, it is at {disk._reader._extents._base}")
    # More than was there before has room now, without an eviction.
    more = [chunk(number, MIB) for number in range(100, 125)]
    report = disk.write(more)
    assert (len(report.written), report.evicted, disk.evict()) == (25, [], [])
    assert_reads_back(disk, [*WRITES, *more])
    disk.close()
    assert list(offline.check(directory)) == []
    disk = LmdbDisk.open(directory, AFTER, relaxed=relaxed)
    assert_reads_back(disk, [*WRITES, *more])
    disk.close()
    with pytest.raises(ConfigError, match="does not shrink"):
        LmdbDisk.open(directory, BEFORE)


def test_it_grows_again_and_never_shrinks(disk: LmdbDisk, directory: Path) -> None:
    """The same capacity again changes nothing, a smaller one is refused."""
    grow(disk)
    disk.grow(AFTER)
    grow(disk, 2 * AFTER)
    for wrong in (AFTER, BEFORE, 0):
        with pytest.raises(ConfigError, match="only grows"):
            disk.grow(wrong)
    with pytest.raises(ConfigError, match="multiple"):
        disk.grow(3 * AFTER + 1)
    disk.give_back()
    assert (disk.capacity_bytes, length(directory)) == (2 * AFTER, 2 * AFTER)
    assert_reads_back(disk, WRITES)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_room_that_is_not_there_is_given_back(
    disk: LmdbDisk, directory: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Whatever piece fails, the file is as it was, the numbers are named, the store goes on."""
    monkeypatch.setattr(preallocation, "_PIECE_BYTES", 8 * MIB)
    real, pieces = os.posix_fallocate, []

    def allocate(fd: int, start: int, nbytes: int) -> None:
        pieces.append((start, nbytes))
        real(fd, start, nbytes)
        if len(pieces) == 3:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    expected = StoreIOError if code == errno.EIO else DiskTooSmall
    with pytest.raises(expected) as caught:
        disk.allocate(AFTER, nothing)
    if expected is DiskTooSmall:
        assert caught.value.fields["needed"] == AFTER - BEFORE
        assert str(AFTER - BEFORE) in str(caught.value)
    # Never where the map is: an emulated allocation writes there.
    assert pieces == [(BEFORE, 8 * MIB), (BEFORE + 8 * MIB, 8 * MIB), (BEFORE + 16 * MIB, 8 * MIB)]
    assert (length(directory), disk.capacity_bytes) == (BEFORE, BEFORE)
    assert_reads_back(disk, WRITES)
    monkeypatch.undo()
    grow(disk)
    assert_reads_back(disk, WRITES)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_room_that_cannot_be_made_durable_is_given_back(
    disk: LmdbDisk, directory: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A sync that fails is a failure like any other: nothing stays taken until the next start."""

    def fsync(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreIOError if code == errno.EIO else DiskTooSmall):
        disk.allocate(AFTER, nothing)
    monkeypatch.undo()
    assert (length(directory), disk.capacity_bytes) == (BEFORE, BEFORE)
    grow(disk)


def test_a_disk_without_the_room_is_not_begun(
    disk: LmdbDisk, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot fit is refused before a block is taken."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: pytest.fail("it was begun"))
    with pytest.raises(DiskTooSmall, match="available, expected"):
        disk.allocate(1000 * MIB * MIB, nothing)
    assert length(directory) == BEFORE


def test_a_growth_that_is_ended_early_is_given_back(disk: LmdbDisk, directory: Path) -> None:
    """What a piece's listener raises ends it, and the file is as it was."""

    def stop(done: int) -> None:
        raise StoreBusy("enough")

    with pytest.raises(StoreBusy):
        disk.allocate(AFTER, stop)
    assert length(directory) == BEFORE


def test_a_map_that_the_process_cannot_have_is_refused_before(
    disk: LmdbDisk, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB unmaps before it maps, so the new map is tried beside the old one."""

    def refused(*args: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(lmdb_grow.mmap, "mmap", refused)
    with pytest.raises(StoreIOError, match="Cannot allocate memory"):
        disk.allocate(AFTER, nothing)
    assert length(directory) == BEFORE
    assert_reads_back(disk, WRITES)


def test_a_file_without_its_blocks_is_not_mapped(disk: LmdbDisk) -> None:
    """LMDB would make it longer without any blocks: a full disk would be a signal then."""
    with pytest.raises(StoreIOError, match=f"has {BEFORE} bytes, expected {AFTER}"):
        disk.grow(AFTER)
    assert disk.capacity_bytes == BEFORE
    assert_reads_back(disk, WRITES)


def test_another_file_in_its_place_is_left_alone(disk: LmdbDisk, directory: Path) -> None:
    """Neither lengthened nor cut: what is mapped is the file that was opened."""
    path, away = directory / "data.mdb", directory / "away"
    path.rename(away)
    path.write_bytes(b"somebody else's" * 5_000_000)
    others = length(directory)
    with pytest.raises(StoreIOError, match="another file"):
        disk.allocate(2 * AFTER, nothing)
    os.truncate(path, 2 * AFTER)
    with pytest.raises(StoreIOError, match=f"has {BEFORE} bytes"):
        disk.grow(2 * AFTER)
    disk.give_back()
    assert (length(directory), others > BEFORE) == (2 * AFTER, True)
    away.rename(path)
    grow(disk)
    assert_reads_back(disk, WRITES)


def test_a_read_in_progress_keeps_the_map(
    disk: LmdbDisk, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The growth gives up, nothing was changed, and again it works."""
    monkeypatch.setattr(lmdb_grow, "QUIET_S", 0.05)
    disk.allocate(AFTER, nothing)
    with disk._reader.transaction() as txn:
        assert not disk.reads_end(0.01)
        with pytest.raises(StoreBusy, match="try again"):
            disk.grow(AFTER)
        assert txn.stat(disk._dbs.chunks)["entries"] == 10
        assert disk.capacity_bytes == BEFORE
        assert_reads_back(disk, WRITES)
    disk.give_back()
    assert length(directory) == BEFORE
    grow(disk)
    assert_reads_back(disk, WRITES)


def test_a_read_that_hangs_delays_no_other(disk: LmdbDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a growth waits for it, others begin and end as ever; then it grows."""
    monkeypatch.setattr(lmdb_grow, "QUIET_S", 20.0)
    disk.allocate(AFTER, nothing)
    with disk._reader.transaction() as txn:
        thread = threading.Thread(target=disk.grow, args=(AFTER,))
        thread.start()
        for _ in range(20):
            assert_reads_back(disk, WRITES)
            assert not disk._reader._held_up
        assert txn.stat(disk._dbs.chunks)["entries"] == 10
        assert disk.capacity_bytes == BEFORE
    thread.join(20)
    assert disk.capacity_bytes == AFTER
    assert_reads_back(disk, WRITES)


def test_a_read_that_begins_too_late_ends_the_wait(disk: LmdbDisk) -> None:
    """One that begins just before the others are held up is waited for, for so long."""
    reader = disk._reader
    inside, leave = threading.Event(), threading.Event()

    def ended(timeout_s: float) -> bool:
        thread.start()
        return inside.wait(10)

    def read_on() -> None:
        with reader.transaction():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=read_on)
    reader.older_reads_ended = ended  # type: ignore[method-assign]
    with pytest.raises(StoreBusy), reader.nobody_reading(0.05):
        pytest.fail("somebody reads")
    del reader.older_reads_ended
    leave.set()
    thread.join()
    with reader.nobody_reading(0.05):
        assert not reader._reads


def test_reads_wait_while_the_map_moves(disk: LmdbDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that begins meanwhile is held up, then gets the right bytes from the new map."""
    results: list[object] = []
    waiting = threading.Event()
    record = disk.find([WRITES[3].key])[0]
    assert record is not None

    def late() -> None:
        results.append(read(disk, record, Place(0, 0)))

    real_wait, real_move = disk._reader._wait_until_let_in, lmdb_grow.move_map

    def wait() -> None:
        waiting.set()
        real_wait()

    def move(env: lmdb.Environment, capacity_bytes: int) -> None:
        thread.start()
        assert waiting.wait(10)
        real_move(env, capacity_bytes)
        assert results == []

    thread = threading.Thread(target=late)
    monkeypatch.setattr(disk._reader, "_wait_until_let_in", wait)
    monkeypatch.setattr(lmdb_grow, "move_map", move)
    grow(disk)
    thread.join(10)
    assert results == [WRITES[3].objects[Place(0, 0)]]


def test_a_closed_store_lets_no_waiting_read_in(disk: LmdbDisk) -> None:
    """A read that waits for a growth that does not end is refused, after a bounded while."""
    disk._reader._held_up = True
    disk._reader._state.wait_for = lambda predicate, timeout: False  # type: ignore[method-assign]
    with pytest.raises(StoreIOError, match="does not end"):
        disk.usage()
    del disk._reader._state.wait_for
    disk._reader._held_up = False


def lose_the_map(directory: Path) -> None:
    """Have LMDB fail after it has unmapped, for real."""
    disk = LmdbDisk.open(directory, BEFORE, uuid=UUID)
    disk.write(WRITES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BEFORE, BEFORE))
    lmdb_grow.check_allocated = nothing_to_check  # type: ignore[assignment]
    for action in (
        lambda: disk.grow(1024 * MIB),
        disk.usage,
        lambda: disk.find([WRITES[0].key]),
        lambda: disk.write([chunk(50)]),
        lambda: disk.grow(AFTER),
        disk.close,
    ):
        try:
            action()
        except StoreError:
            continue
        raise AssertionError("a map that is lost serves")
    assert disk.capacity_bytes == BEFORE
    disk.close()


def nothing_to_check(fd: int, capacity_bytes: int) -> None:
    """The file is as long as it has to be."""


def test_a_map_that_is_lost_is_errors_and_no_signal(directory: Path) -> None:
    """Reads, writes and the close are refused; the process lives on, and the store is good."""

    def child() -> None:
        lose_the_map(directory)
        gc.collect()  # nor is it unmapped when nobody has it any more

    in_child(child)
    disk = LmdbDisk.open(directory, BEFORE)
    assert_reads_back(disk, WRITES)
    disk.close()
    assert list(offline.check(directory)) == []


@pytest.mark.parametrize(
    ("layer", "code", "after"),
    [("os", errno.EIO, False), ("os", errno.ENOSPC, True), ("lmdb", 0, False), ("lmdb", 0, True)],
)
def test_every_call_of_a_growth_fails_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: str, code: int, after: bool
) -> None:
    """A typed error, the old capacity or the new one, all bytes there, and again it works."""
    monkeypatch.setattr(preallocation, "_PIECE_BYTES", 16 * MIB)
    fired: list[str] = []
    for nth in range(1, 200):
        directory = tmp_path / f"run-{nth}" / "store"
        directory.parent.mkdir()
        faults = Faults(directory.parent, nth, code, after=after)
        faults.active = False
        with pytest.MonkeyPatch.context() as patch:
            break_os(patch, faults) if layer == "os" else break_lmdb(patch, faults)
            disk = LmdbDisk.open(directory, BEFORE, uuid=UUID)
            disk.write(WRITES[:4])
            faults.active, failed = True, ""
            try:
                grow(disk)
            except StoreError as error:
                failed = str(error)
                faults.active = False
                disk.give_back()
            except DiskTooSmall as error:
                failed = str(error)
            faults.active = False
            assert length(directory) == disk.capacity_bytes
            if layer == "os":
                grow(disk)
            try:
                disk.close()
            except StoreError:
                assert layer == "lmdb"
        grown = disk.capacity_bytes
        disk = LmdbDisk.open(directory, AFTER if grown == AFTER else BEFORE)
        assert_reads_back(disk, WRITES[:4])
        grow(disk) if grown == BEFORE else disk.grow(AFTER)
        disk.close()
        assert list(offline.check(directory)) == []
        if not faults.fired:
            break
        fired.append(f"{faults.fired}: {failed[:40]}")
    print(f"{len(fired)} faults of {layer}, after={after}: {fired}")
    assert len(fired) >= (8 if layer == "os" else 3)


def grow_patiently(disk: LmdbDisk, capacity_bytes: int) -> None:
    """Both steps, however often reads in progress are in the way."""
    disk.allocate(capacity_bytes, nothing)

    def grown() -> bool:
        try:
            disk.grow(capacity_bytes)
        except StoreBusy:
            return False
        return True

    wait_until(grown, "it grows")


def test_loads_and_stores_go_on_while_it_grows(directory: Path, seed: int) -> None:
    """Readers and the writer beside a store that grows again and again: every byte is right."""
    print(f"seed {seed}")
    disk = LmdbDisk.open(directory, BEFORE, uuid=UUID)
    disk.write_stamp(binding())
    disk.write(WRITES)
    stop, failures, reads = threading.Event(), [], [0, 0, 0]

    def guarded(work: Callable[[int], None]) -> Callable[[int], None]:
        def run(number: int) -> None:
            try:
                while not stop.is_set():
                    work(number)
            except BaseException as error:  # noqa: BLE001 - told to the test
                failures.append(error)
                stop.set()

        return run

    @guarded
    def load(number: int) -> None:
        write = random.Random(f"{seed} {number} {reads[number]}").choice(WRITES)
        record = disk.find([write.key])[0]
        assert record is not None
        assert read(disk, record, Place(0, 0)) == write.objects[Place(0, 0)]
        reads[number] += 1

    @guarded
    def look(number: int) -> None:
        disk.usage()
        part = disk.check_part(b"", 0.02)
        assert part.violations == []
        disk.page(b"", 5)
        reads[number] += 1

    threads = [threading.Thread(target=load, args=(number,)) for number in range(2)]
    threads.append(threading.Thread(target=look, args=(2,)))
    for thread in threads:
        thread.start()
    written: list[ChunkWrite] = []
    try:
        for step in range(1, 13):
            before = list(reads)
            written += [chunk(1000 * step + number, MIB) for number in range(2)]
            assert len(disk.write(written[-2:]).written) == 2
            grow_patiently(disk, BEFORE + step * 4 * MIB)
            wait_until(
                lambda: failures or all(map(operator.gt, reads, before)),  # noqa: B023
                "all have read since",
            )
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert failures == []
    print(f"{reads} reads")
    assert disk.capacity_bytes == BEFORE + 48 * MIB
    assert_reads_back(disk, [*WRITES, *written])
    disk.close()
    assert list(offline.check(directory)) == []
