"""What only the tier on LMDB does: files, modes, capacity, restarts."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from lmcache_persist import failpoints
from lmcache_persist.errors import (
    ConfigError,
    DiskTooSmall,
    FormatTooNew,
    StoreDamaged,
    StoreFull,
    StoreIOError,
)
from lmcache_persist.store import aside, extent_reader, lmdb_evict, meta_page, offline, unsynced
from lmcache_persist.store import format as fmt
from lmcache_persist.store.base import ChunkKey, Place
from lmcache_persist.store.lmdb_disk import LmdbDisk
from lmcache_persist.store.repair import Repair
from store_support import MIB, UUID, assert_reads_back, binding, chunk, found, key, read

CAPACITY = 16 * MIB
Opener = Callable[..., LmdbDisk]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store's folder that does not exist yet."""
    return tmp_path / "store"


@pytest.fixture
def opened(directory: Path) -> Iterator[Opener]:
    """Opens the store; closes and checks it at the end."""
    tiers: list[LmdbDisk] = []

    def open_tier(capacity: int = CAPACITY, **options: bool) -> LmdbDisk:
        tiers.append(LmdbDisk.open(directory, capacity, uuid=UUID, **options))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()
    if tiers and directory.exists():
        assert list(offline.check(directory)) == []


def _raw(directory: Path) -> lmdb.Environment:
    return lmdb.open(str(directory), map_size=CAPACITY, max_dbs=5, writemap=True)


def test_store_is_not_closed_under_a_read(directory: Path) -> None:
    """A read that does not end in time leaves the map where it is, and the close says so."""
    tier = LmdbDisk.open(directory, CAPACITY, uuid=UUID)
    write = chunk(1, 300_000)
    tier.write([write])
    with tier._reader.transaction() as txn:
        with pytest.raises(StoreIOError, match="still being read"):
            tier.close(0.01)
        assert txn.stat(tier._dbs.chunks)["entries"] == 1
    tier._env.close()


def test_restart_keeps_everything(opened: Opener) -> None:
    """Chunks, order, hits, usage, uuid and stamp are the same after a restart."""
    tier = opened()
    tier.write_stamp(binding())
    writes = [chunk(number, 300_000) for number in range(10)]
    tier.write(writes)
    tier.touch([key(3)])
    tier.apply_touches()
    records, usage = tier.find([one.key for one in writes]), tier.usage()
    tier.close()
    tier = opened()
    assert tier.find([one.key for one in writes]) == records
    assert tier.usage() == usage
    assert (tier.uuid, tier.stamp(), tier.started_clean) == (UUID, binding(), True)
    assert_reads_back(tier, writes)


def test_clean_mark_only_after_close(opened: Opener, directory: Path) -> None:
    """The mark of a clean shutdown is there after close, and gone while the store is open."""
    opened().close()
    peeked = offline.peek(directory)
    assert peeked is not None
    assert peeked.clean_shutdown
    opened()
    # A copy of the open store: what a crash would leave.
    copy = directory.with_name("copy")
    copy.mkdir()
    (copy / "data.mdb").write_bytes((directory / "data.mdb").read_bytes())
    peeked = offline.peek(copy)
    assert peeked is not None
    assert not peeked.clean_shutdown


@pytest.mark.parametrize("umask", [0, 0o777])
def test_modes_whatever_the_umask(opened: Opener, directory: Path, umask: int) -> None:
    """Folder 0700, files 0600, with an umask of 000 and of 777."""
    if umask and os.geteuid() != 0:
        pytest.skip("only root can work below a folder it made with no rights")
    before = os.umask(umask)
    try:
        tier = opened()
        tier.write([chunk(1)])
    finally:
        os.umask(before)
    assert directory.stat().st_mode & 0o777 == 0o700
    names = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}
    assert names == {"data.mdb": 0o600, "lock.mdb": 0o600}


def test_file_has_exactly_the_capacity(opened: Opener, directory: Path) -> None:
    """The data file has the capacity's bytes, all of its blocks, before anything is stored."""
    tier = opened()
    stat = (directory / "data.mdb").stat()
    assert stat.st_size == CAPACITY
    assert stat.st_blocks * 512 >= CAPACITY
    tier.write([chunk(number, MIB) for number in range(30)])
    assert (directory / "data.mdb").stat().st_size == CAPACITY


def test_sparse_file_is_filled_at_start(opened: Opener, directory: Path) -> None:
    """Blocks that a copy left out are allocated again before the file is mapped."""
    opened().close()
    path = directory / "data.mdb"
    data = path.read_bytes()
    used = len(data.rstrip(b"\0"))
    path.unlink()
    with path.open("wb") as file:
        file.write(data[:used])
        file.truncate(CAPACITY)
    assert path.stat().st_blocks * 512 < CAPACITY
    opened()
    assert path.stat().st_blocks * 512 >= CAPACITY


def test_capacity_grows_and_does_not_shrink(opened: Opener, directory: Path) -> None:
    """A larger capacity extends the file, contents stay; a smaller one is refused."""
    tier = opened()
    tier.write_stamp(binding())
    tier.write([chunk(number, MIB) for number in range(8)])
    tier.close()
    tier = opened(2 * CAPACITY)
    assert (directory / "data.mdb").stat().st_size == 2 * CAPACITY
    assert tier.usage().capacity_bytes == 2 * CAPACITY
    more = [chunk(number, MIB) for number in range(8, 20)]
    assert tier.write(more).evicted == []
    assert_reads_back(tier, [chunk(number, MIB) for number in range(20)])
    tier.close()
    before = (directory / "data.mdb").read_bytes()
    with pytest.raises(ConfigError, match=r"is 16.00 MiB .16777216 bytes.*32.00 MiB .33554432 b"):
        LmdbDisk.open(directory, CAPACITY)
    assert (directory / "data.mdb").read_bytes() == before


def test_interrupted_growth_is_taken_up(opened: Opener, directory: Path) -> None:
    """A file that was extended by a start that then died opens with either capacity."""
    opened().close()
    with (directory / "data.mdb").open("r+b") as file:
        file.truncate(2 * CAPACITY)
    opened().close()
    assert (directory / "data.mdb").stat().st_size == CAPACITY


def test_too_small_disk_leaves_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room the start is refused with both numbers and nothing is left."""
    free = os.statvfs(directory.parent)
    free_bytes = free.f_bavail * free.f_frsize
    capacity = (free_bytes // 4096 + 100_000) * 4096
    with pytest.raises(
        DiskTooSmall, match=r"has .*\(\d+ bytes\) available, expected .*\(\d+ bytes\) more"
    ):
        LmdbDisk.open(directory, capacity)
    assert not directory.exists()

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(DiskTooSmall):
        LmdbDisk.open(directory, CAPACITY)
    assert not directory.exists()
    directory.mkdir()
    with pytest.raises(DiskTooSmall):
        LmdbDisk.open(directory, CAPACITY)
    assert list(directory.iterdir()) == []


def test_too_small_disk_for_growth(
    opened: Opener, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that cannot grow is left as it was and opens with its old capacity."""
    opened().close()
    before = (directory / "data.mdb").read_bytes()
    with monkeypatch.context() as patch:

        def no_space(fd: int, _: int, length: int) -> None:
            os.ftruncate(fd, length - 4096)
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "posix_fallocate", no_space)
        with pytest.raises(DiskTooSmall):
            LmdbDisk.open(directory, 2 * CAPACITY)
    assert (directory / "data.mdb").read_bytes() == before
    opened()


def test_leftovers_of_a_crash_are_removed(opened: Opener, directory: Path) -> None:
    """A half-made store and a lock file of the dead do not matter."""
    (directory / ".new").mkdir(parents=True)
    (directory / ".new" / "data.mdb").write_bytes(b"half")
    (directory / "lock.mdb").write_bytes(b"no lock file of LMDB's")
    tier = opened()
    tier.write([chunk(1)])
    tier.close()
    assert sorted(path.name for path in directory.iterdir()) == ["data.mdb", "lock.mdb"]
    (directory / "lock.mdb").write_bytes(b"again")
    assert found(opened(), [key(1)]) == [True]


def test_relaxed_is_marked(opened: Opener, directory: Path) -> None:
    """A relaxed store says so while it is open, with the kernel's boot id; not after."""
    tier = opened(relaxed=True)
    tier.write_stamp(binding())
    tier.write([chunk(1)])
    assert (directory / "unsynced").read_text() == unsynced.kernel_boot_id()
    assert offline.looks_damaged(directory) is None
    tier.close()
    assert not (directory / "unsynced").exists()
    (directory / "unsynced").write_text("another boot")
    assert unsynced.lost_power_unsynced(directory)
    assert offline.looks_damaged(directory) is None, "verified, and found whole"
    tier = opened()
    assert not (directory / "unsynced").exists()
    assert_reads_back(tier, [chunk(1)])


def test_unsynced_and_broken_is_noticed(opened: Opener, directory: Path) -> None:
    """After a power loss in relaxed mode broken tree pages are found before mapping."""
    tier = opened()
    tier.write([chunk(number, 3000) for number in range(300)])
    tier.close()
    data = bytearray((directory / "data.mdb").read_bytes())
    for page in range(2, 300):
        data[page * 4096 : page * 4096 + 16] = b"\xff" * 16
    (directory / "data.mdb").write_bytes(data)
    assert offline.looks_damaged(directory) is None
    (directory / "unsynced").write_text("another boot")
    assert offline.looks_damaged(directory) is not None
    aside.set_aside(directory)


def test_reads_without_the_map(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the place of values is unknown, reads come from the map, said once."""
    tier = opened()
    assert tier._reader._extents.direct
    tier.write([chunk(1, 3 * MIB)])
    tier.close()
    monkeypatch.setattr(extent_reader, "_map_base", lambda *_: None)
    with caplog.at_level(logging.WARNING):
        tier = opened()
        assert not tier._reader._extents.direct
        for _ in range(3):
            assert_reads_back(tier, [chunk(1, 3 * MIB)])
    assert len(caplog.records) == 1


def test_wrong_base_is_noticed(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offset that does not lead to the probe's bytes is not used."""
    real = extent_reader._map_base
    monkeypatch.setattr(extent_reader, "_map_base", lambda *args: (real(*args) or 0) - 4096)
    assert not opened()._reader._extents.direct


def test_disk_error_is_no_proof(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing read raises an I/O error and drops nothing; the next one succeeds."""
    tier = opened()
    tier.write([chunk(1)])
    record = tier.find([key(1)])[0]
    assert record is not None

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(StoreIOError):
            read(tier, record, Place(0, 0))
    tier.apply_touches()
    assert tier.corrupt_found == 0
    assert_reads_back(tier, [chunk(1)])


@pytest.mark.parametrize(
    ("point", "there"),
    [
        ("commit.before_write", False),
        ("commit.after_extents", False),
        ("commit.before_sync", False),
        ("commit.after_sync", True),
    ],
)
def test_nth_error_of_a_commit(opened: Opener, point: str, there: bool) -> None:
    """An error at any step leaves the state before or after, and the next write succeeds."""
    tier = opened()
    tier.write([chunk(1)])
    before = tier.usage()
    failpoints.configure(f"{point}=error@1")
    try:
        with pytest.raises(StoreIOError, match="failpoint"):
            tier.write([chunk(2), chunk(3)])
    finally:
        failpoints.configure("")
    assert found(tier, [key(1), key(2), key(3)]) == [True, there, there]
    assert there or tier.usage() == before
    assert set(tier.write([chunk(2), chunk(3)]).written) == {key(2), key(3)}
    assert_reads_back(tier, [chunk(1), chunk(2), chunk(3)])


def test_stamp_is_durable_before_its_failpoint(opened: Opener) -> None:
    """An error after the stamp leaves the store stamped."""
    tier = opened()
    failpoints.configure("bind.after_stamp=error")
    try:
        with pytest.raises(StoreIOError):
            tier.write_stamp(binding())
    finally:
        failpoints.configure("")
    tier.close()
    assert opened().stamp() == binding()


def test_newer_format_is_refused(opened: Opener, directory: Path) -> None:
    """A store of a newer version is refused by name, peeked at or opened."""
    opened().close()
    with _raw(directory) as env, env.begin(write=True) as txn:
        meta = env.open_db(b"meta", txn=txn)
        value = fmt.encode_meta({"format_version": 2, "uuid": UUID})
        txn.put(fmt.META_STORE, value, db=meta)
    with pytest.raises(FormatTooNew, match="format 2, expected at most 1"):
        offline.peek(directory)
    with pytest.raises(FormatTooNew):
        LmdbDisk.open(directory, CAPACITY)
    aside.set_aside(directory)


def test_swapped_records_are_misses(opened: Opener, directory: Path) -> None:
    """Case B6: two records swapped by hand are misses, counted, and dropped; totals stay exact."""
    tier = opened()
    tier.write([chunk(1, 5000), chunk(2, 90_000), chunk(3)])
    tier.close()
    with _raw(directory) as env, env.begin(write=True) as txn:
        chunks = env.open_db(b"chunks", txn=txn)
        one, two = txn.get(key(1), db=chunks), txn.get(key(2), db=chunks)
        txn.put(key(1), two, db=chunks)
        txn.put(key(2), one, db=chunks)
    where = {violation.where for violation in offline.check(directory)}
    assert {f"chunk {key(1).hex()}", f"chunk {key(2).hex()}"} <= where
    tier = opened()
    assert found(tier, [key(1), key(2), key(3)]) == [False, False, True]
    assert tier.corrupt_found == 2
    tier.apply_touches()
    usage = tier.usage()
    assert (usage.chunks, usage.bytes) == (1, 100_000)
    tier.write([chunk(1, 5000)])
    assert_reads_back(tier, [chunk(1, 5000), chunk(3)])


@pytest.mark.parametrize("value", [b"", b"short", b"\0" * 300])
def test_bad_record_is_replaced(opened: Opener, directory: Path, value: bytes) -> None:
    """A record of garbage is a miss; writing its chunk, or evicting, repairs the store."""
    tier = opened()
    tier.write([chunk(1), chunk(2)])
    tier.close()
    with _raw(directory) as env, env.begin(write=True) as txn:
        txn.put(key(1), value, db=env.open_db(b"chunks", txn=txn))
    tier = opened()
    assert found(tier, [key(1), key(2)]) == [False, True]
    assert tier.write([chunk(1)]).written == [key(1)]
    assert_reads_back(tier, [chunk(1), chunk(2)])
    assert tier.usage().bytes == 200_000


LOST, KEPT = 120, 20


@pytest.fixture
def many_lost(directory: Path) -> Path:
    """A store in which most records are bad."""
    tier = LmdbDisk.open(directory, CAPACITY, uuid=UUID)
    tier.write([chunk(number, 5000) for number in range(LOST + KEPT)])
    tier.close()
    with _raw(directory) as env, env.begin(write=True) as txn:
        chunks = env.open_db(b"chunks", txn=txn)
        for number in range(LOST):
            txn.put(key(number), b"garbage", db=chunks)
    (directory / "lock.mdb").unlink()
    return directory


def lose(tier: LmdbDisk) -> None:
    """Have every bad record found and dropped."""
    keys = [key(number) for number in range(LOST + KEPT)]
    assert found(tier, keys) == [False] * LOST + [True] * KEPT
    tier.apply_touches()


def test_many_lost_records_take_bounded_transactions(
    many_lost: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they leave behind is removed in pieces that the pages held back allow for."""
    deletes: Counter[int] = Counter()
    delete = Repair._delete

    def counted(self: Repair, txn: lmdb.Transaction, handle: Any, key: bytes) -> None:
        deletes[txn.id()] += 1
        delete(self, txn, handle, key)

    monkeypatch.setattr(Repair, "_delete", counted)
    tier = opened()
    lose(tier)
    assert sum(deletes.values()) == 2 * LOST, "an extent and a place in the order each"
    assert max(deletes.values()) <= tier._budget.chunks_per_eviction < LOST
    usage = tier.usage()
    assert (usage.chunks, usage.bytes, usage.dropped_chunks) == (KEPT, KEPT * 5000, LOST)


@pytest.mark.parametrize("piece", [1, 2, 3])
def test_a_death_between_two_pieces_is_made_up_for(
    many_lost: Path, opened: Opener, piece: int
) -> None:
    """The next server goes on where the one before it died, without being told by a read."""
    tier = LmdbDisk.open(many_lost, CAPACITY)
    failpoints.configure(f"repair.before_sync=error@{piece}")
    try:
        with pytest.raises((StoreIOError, OSError)):
            lose(tier)
    finally:
        failpoints.configure("")
    tier._reader.close(0)
    tier._env.close()
    assert list(offline.check(many_lost, digests=False)) != []
    tier = opened()
    tier.apply_touches()
    assert tier.usage().chunks == KEPT
    assert not tier._unsettled
    tier.close()
    # Walked once: the note of it is gone, too.
    assert not opened()._unsettled


@pytest.mark.parametrize("change", ["shorter", "longer", "gone", "swapped"])
def test_bad_extents_are_noticed(opened: Opener, directory: Path, change: str) -> None:
    """Case C3: a value of another length, an absent and a swapped one are proven bad."""
    tier = opened()
    tier.write([chunk(1, 5000), chunk(2, 5000)])
    serials = [record.serial for record in tier.find([key(1), key(2)]) if record]
    tier.close()
    with _raw(directory) as env, env.begin(write=True) as txn:
        extents = env.open_db(b"extents", txn=txn)
        one, two = (fmt.extent_key(serial, Place(0, 0), 0) for serial in serials)
        value = txn.get(one, db=extents)
        if change == "gone":
            txn.delete(one, db=extents)
        elif change == "swapped":
            txn.put(one, txn.get(two, db=extents), db=extents)
        else:
            txn.put(one, value[:-1] if change == "shorter" else value + b"x", db=extents)
    assert len(list(offline.check(directory))) in (1, 2)
    tier = opened()
    record = tier.find([key(1)])[0]
    assert record is not None
    with pytest.raises(Exception, match="is bad"):
        read(tier, record, Place(0, 0))
    tier.apply_touches()
    assert found(tier, [key(1), key(2)]) == [False, True]
    assert tier.usage().chunks == 1


def test_altered_totals_are_found(opened: Opener, directory: Path) -> None:
    """Check compares totals, order and extents with the records."""
    tier = opened()
    tier.write([chunk(1), chunk(2)])
    tier.close()
    with _raw(directory) as env, env.begin(write=True) as txn:
        totals, order, extents = (
            env.open_db(name, txn=txn) for name in (b"totals", b"order", b"extents")
        )
        total, order_entry = txn.cursor(db=totals), txn.cursor(db=order)
        total.first()
        order_entry.first()
        kept = (total.item(), order_entry.item())
        txn.put(kept[0][0], fmt.Totals(2, 2, 1).encode(), db=totals)
        txn.delete(kept[1][0], db=order)
        orphan = fmt.extent_key(999, Place(0, 0), 0)
        txn.put(orphan, b"orphan", db=extents)
    where = [violation.where.split()[0] for violation in offline.check(directory)]
    assert sorted(where) == ["chunk", "extents", "order", "totals"]
    with _raw(directory) as env, env.begin(write=True) as txn:
        txn.put(*kept[0], db=env.open_db(b"totals", txn=txn))
        txn.put(*kept[1], db=env.open_db(b"order", txn=txn))
        txn.delete(orphan, db=env.open_db(b"extents", txn=txn))


def test_peek_changes_nothing(opened: Opener, directory: Path) -> None:
    """Peek and check read an offline store and leave the folder byte for byte."""
    assert offline.peek(directory) is None
    assert not directory.exists()
    tier = opened()
    tier.write_stamp(binding())
    tier.write([chunk(1), chunk(2)])
    tier.close()
    (directory / "lock.mdb").unlink()
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    directory.chmod(0o500)
    peeked = offline.peek(directory)
    assert peeked is not None
    assert (peeked.uuid, peeked.stamp, peeked.has_objects) == (UUID, binding(), True)
    assert (peeked.capacity_bytes, peeked.size_bytes) == (CAPACITY, CAPACITY)
    with offline.OfflineStore.open(directory) as store:
        assert store.usage().objects == 2
        assert [record.key for record in store.records()] == sorted([key(1), key(2)])
    assert list(offline.check(directory)) == []
    directory.chmod(0o700)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_a_damaged_store_tells_its_size_or_nothing(directory: Path) -> None:
    """Its meta page is believed within bounds: a wild number is no size to make a store of."""
    assert meta_page.capacity_told(directory, at_most=MIB) == 0
    LmdbDisk.open(directory, CAPACITY).close()
    path = directory / "data.mdb"
    assert meta_page.capacity_told(directory, at_most=MIB) == CAPACITY
    os.truncate(path, 3 * 4096)
    assert meta_page.capacity_told(directory, at_most=CAPACITY) == CAPACITY
    assert meta_page.capacity_told(directory, at_most=CAPACITY - 1) == 0
    with path.open("r+b") as file:
        file.write(b"\0" * 8192)
    assert meta_page.capacity_told(directory, at_most=CAPACITY) == 0
    for length, told in ((CAPACITY, CAPACITY), (CAPACITY + 1, 0), (CAPACITY - 4096, 0)):
        os.truncate(path, length)
        assert meta_page.capacity_told(directory, at_most=MIB) == told * (told >= 16 * MIB)


def test_set_aside_keeps_one(tmp_path: Path) -> None:
    """A damaged store is moved to one sibling; the one before it is deleted."""
    for text in ("first", "second"):
        (tmp_path / "store").mkdir()
        (tmp_path / "store" / "data.mdb").write_text(text)
        assert aside.set_aside(tmp_path / "store") == tmp_path / "store.damaged"
    assert (tmp_path / "store.damaged" / "data.mdb").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["store.damaged"]


@pytest.mark.parametrize("target", ["there", "gone"])
def test_a_linked_store_is_set_aside_and_given_up(tmp_path: Path, target: str) -> None:
    """A store's folder on another disk: its room is given back, and the link is in nobody's way."""
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "data.mdb").write_text("first")
    (elsewhere / ".new").mkdir()
    (elsewhere / "somebody's").mkdir()  # the disk may be there for others, too
    store.symlink_to(elsewhere)
    assert aside.set_aside(store) == tmp_path / "store.damaged"
    if target == "gone":
        elsewhere.rename(tmp_path / "unmounted")
    store.mkdir()
    (store / "data.mdb").write_text("second")
    assert aside.has_set_aside(store)
    aside.set_aside(store)
    assert (tmp_path / "store.damaged" / "data.mdb").read_text() == "second"
    assert target == "gone" or [path.name for path in elsewhere.iterdir()] == ["somebody's"]
    store.symlink_to(elsewhere)
    elsewhere.mkdir(exist_ok=True)
    aside.set_aside(store)
    assert aside.discard_set_aside(store) == tmp_path / "store.damaged"
    assert not aside.has_set_aside(store)


def test_a_store_that_cannot_be_set_aside_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is a mount point, for instance."""

    def rename(source: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    (tmp_path / "store").mkdir()
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(StoreIOError, match="busy") as caught:
        aside.set_aside(tmp_path / "store")
    assert f"remove what is in {tmp_path / 'store'} by hand" in str(caught.value.hint)


def test_use_after_close(opened: Opener) -> None:
    """A closed store raises a typed error, and closing again does nothing."""
    tier = opened()
    tier.close()
    tier.close()
    for use in (lambda: tier.find([key(1)]), tier.usage):
        with pytest.raises(StoreIOError, match="closed"):
            use()


def test_open_twice_is_refused(opened: Opener, directory: Path) -> None:
    """The same store opened twice in a process is an error of its own, and harmless."""
    tier = opened()
    tier.write([chunk(1)])
    with pytest.raises((StoreIOError, StoreDamaged), match="already open"):
        offline.peek(directory)
    assert_reads_back(tier, [chunk(1)])


def test_readers_beside_the_writer(opened: Opener) -> None:
    """Four reading threads beside a writer that evicts see right bytes or a miss."""
    tier = opened()
    done, problems, reads = threading.Event(), [], [0] * 4
    names: list[ChunkKey] = [key(number) for number in range(60)]

    def reader(index: int) -> None:
        turn = 0
        while not done.is_set():
            turn += 1
            number = (turn * 7 + index) % len(names)
            record = tier.find([names[number]])[0]
            if record is None:
                continue
            got = read(tier, record, Place(0, 0))
            if got is not None:
                reads[index] += 1
                if got != bytes(contents[number]):
                    problems.append(number)

    writes = [chunk(number, 700_000) for number in range(60)]
    contents = [write.objects[Place(0, 0)] for write in writes]
    threads = [threading.Thread(target=reader, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    evicted = 0
    try:
        for _ in range(3):
            for start in range(0, 60, 5):
                evicted += len(tier.write(writes[start : start + 5]).evicted)
    finally:
        done.set()
        for thread in threads:
            thread.join(30)
    assert problems == []
    assert tier.corrupt_found == 0
    assert evicted > 50
    assert sum(reads) > 0


def test_slow_read_is_no_one_way_street(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a read keeps freed pages, writes are dropped and evict little; then they go on."""
    monkeypatch.setattr(lmdb_evict, "SLOW_READ_S", 0.01)
    tier = opened()
    dropped = 0
    with tier._reader.transaction() as txn:
        txn.stat(tier._dbs.main)
        for number in range(40):
            report = tier.write([chunk(number, MIB)])
            dropped += len(report.dropped)
            tier.evict()
    assert dropped > 10
    assert tier.usage().chunks >= 5
    for number in range(100, 130):
        assert tier.write([chunk(number, MIB)]).written == [key(number)]
    assert_reads_back(tier, [chunk(number, MIB) for number in range(122, 130)])


def test_pages_are_held_back(opened: Opener) -> None:
    """Writes never enter the reserve, so that an eviction always fits; it is never map-full."""
    tier = opened()
    limit = tier._budget.limit * tier._budget.page_bytes
    for number in range(120):
        assert tier.write([chunk(number, 3000 if number % 3 else MIB)]).dropped == []
        assert tier.usage().used_bytes <= limit
    turns = tier.counters().turns
    assert tier._evict_once(0, ()) != []
    assert tier.counters().turns == turns


def test_what_cannot_be_dropped_is_said(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever dropped it hears that it is still there; touches and writes go on; later it goes."""
    tier = opened()
    tier.write([chunk(1), chunk(2)])
    real, left = tier._transact, [0]

    def full(*args: Any, **fields: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise StoreFull("no page is free")
        return real(*args, **fields)

    monkeypatch.setattr(tier, "_transact", full)
    left[0] = 100
    with pytest.raises(StoreFull, match="1 bad chunks are not dropped"):
        tier.drop({key(1): None})
    assert found(tier, [key(1)]) == [True]
    tier._reader._found_bad(key(2), tier.find([key(2)])[0].serial)  # type: ignore[union-attr]
    tier.apply_touches()
    # Fewer at once are less to ask for.
    left[0] = 1
    assert tier.drop({key(1): None, key(2): None}) == [key(1), key(2)]
