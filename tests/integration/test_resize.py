"""``resize``: another capacity for a data dir that nobody serves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import lmcache_persist
from lmcache_persist.datadir import DataDirLock
from lmcache_persist.errors import DiskTooSmall
from lmcache_persist.manifest import read_snapshot
from lmcache_persist.server.rebind import rebind
from lmcache_persist.server.resize import Resized
from lmcache_persist.server.resize import resize as carry_out
from lmcache_persist.store import preallocation
from lmcache_persist.store.lmdb_disk import LmdbDisk
from store_support import assert_reads_back
from support.data_dirs import chunk_of, key_of, make, records_of
from support.files import snapshot
from support.manifest import binding
from support.server import ServerProcess, cli_here, json_here

MIB = 1 << 20


def resize(root: Path, capacity_bytes: int) -> tuple[Resized, list[str]]:
    """The verb as a function, confirmed; what it did, and what it asked about."""
    asked: list[str] = []
    return carry_out(root, capacity_bytes, asked.extend), asked


def size_of(root: Path) -> int:
    """Length of the data file."""
    return (root / "store" / "data.mdb").stat().st_size


def all_good(root: Path) -> bool:
    """Whether verify finds nothing."""
    return list(lmcache_persist.check(root)) == []


def test_a_store_grows_and_keeps_everything(root: Path) -> None:
    """Grown, the file has all of its blocks, and records, order and bytes are the same."""
    make(root / "d", capacity_bytes=32 * MIB)
    before = records_of(root / "d")
    done, asked = resize(root / "d", 48 * MIB)
    assert (done.before, done.after, done.kept_objects, asked) == (32 * MIB, 48 * MIB, 20, [])
    assert size_of(root / "d") == 48 * MIB
    assert os.stat(root / "d" / "store" / "data.mdb").st_blocks * 512 >= 48 * MIB
    assert records_of(root / "d") == before
    assert all_good(root / "d")
    with DataDirLock.acquire(root / "d"):
        disk = LmdbDisk.open(root / "d" / "store", 48 * MIB)
        assert_reads_back(disk, [chunk_of(number, 50_000) for number in range(20)])
        disk.close()


def test_a_size_is_rounded_down_to_whole_pages(root: Path) -> None:
    """Resize and restore take 40MB; a size whose pages are too few is refused as any other."""
    make(root / "d", capacity_bytes=32 * MIB)
    rounded = 40 * 10**6 // 4096 * 4096
    flags = ("--capacity", "40MB")
    assert json_here("resize", str(root / "d"), *flags)["capacity_bytes"] == rounded
    json_here("backup", str(root / "d"), str(root / "b"))
    restored = json_here("restore", str(root / "b"), str(root / "r"), *flags)
    assert restored["capacity_bytes"] == size_of(root / "r") == size_of(root / "d") == rounded
    assert cli_here("resize", str(root / "d"), "--capacity", "16MB")[0] == 2


def test_a_store_that_fits_shrinks_without_a_word(root: Path) -> None:
    """Nothing is lost, so nothing is asked; order, hits and age are kept."""
    make(root / "d", capacity_bytes=64 * MIB)
    before = records_of(root / "d")
    done, asked = resize(root / "d", 32 * MIB)
    assert (done.dropped_objects, asked, size_of(root / "d")) == (0, [], 32 * MIB)
    after = records_of(root / "d")
    assert after.keys() == before.keys()
    for key, record in after.items():
        was = before[key]
        assert (record.order, record.hits, record.stored_at) == (
            was.order,
            was.hits,
            was.stored_at,
        )
        assert record.objects == was.objects
    assert all_good(root / "d")
    assert sorted(path.name for path in (root / "d" / "store").iterdir()) in (
        ["data.mdb"],
        ["data.mdb", "lock.mdb"],
    )


def test_shrinking_keeps_what_was_used_last(root: Path) -> None:
    """The least recently used have no room; what goes is said per model, and asked about."""
    make(root / "d", capacity_bytes=128 * MIB, chunks=(40, 10), nbytes=MIB)
    done, asked = resize(root / "d", 32 * MIB)
    kept = set(records_of(root / "d"))
    # Model 2 was stored last, and of model 1 the head of its prompt is the most recently used.
    assert {key_of(number, 2) for number in range(10)} < kept
    first = [key_of(number, 1) in kept for number in range(40)]
    assert first == sorted(first, reverse=True)
    assert 0 < sum(first) < 20
    assert (done.kept_objects, done.dropped_objects) == (len(kept), 50 - len(kept))
    assert f"{50 - len(kept)} objects" in asked[0]
    assert "model-1" in asked[1]
    assert len(asked) == 2
    assert all_good(root / "d")
    # There is room to write at once, without an eviction.
    with DataDirLock.acquire(root / "d"):
        disk = LmdbDisk.open(root / "d" / "store", 32 * MIB)
        assert disk.evict() == []
        disk.close()


def test_stale_objects_are_left_behind(root: Path) -> None:
    """What a rebind left goes when the store is made anew, and that is said."""
    make(root / "d")
    rebind(root / "d", 512, lambda losses: None)
    done, asked = resize(root / "d", 32 * MIB)
    assert (done.kept_objects, done.dropped_objects) == (0, 20)
    assert "stale" in asked[0]
    assert all_good(root / "d")
    assert json_here("inspect", str(root / "d"))["store"]["stale_objects"] == 0


def test_a_rebind_that_stopped_half_way_is_completed(root: Path) -> None:
    """The new store has no note of what its stamp replaced, so the manifest follows before."""
    make(root / "d")
    held = read_snapshot(root / "d" / "manifest.sqlite").binding
    assert held is not None
    new = binding(1088, store_uuid=held.store_uuid)
    disk = LmdbDisk.open(root / "d" / "store", 64 * MIB)
    disk.restamp(new, replaces=held.binding_id)
    disk.close()
    done, _ = resize(root / "d", 32 * MIB)
    assert done.kept_objects == 0
    assert read_snapshot(root / "d" / "manifest.sqlite").binding == new
    assert all_good(root / "d")


@pytest.mark.parametrize("capacity", [32 * MIB, 96 * MIB])
def test_an_unbound_store_is_resized(root: Path, capacity: int) -> None:
    """A data dir that was never bound keeps being so, and stays startable."""
    make(root / "d", bound=False)
    resize(root / "d", capacity)
    assert size_of(root / "d") == capacity
    assert json_here("inspect", str(root / "d"))["binding"] is None
    assert all_good(root / "d")


def test_a_bad_chunk_is_left_out(root: Path) -> None:
    """A smaller store holds only what its digests vouch for."""
    make(root / "d", chunks=(5,))
    path = root / "d" / "store" / "data.mdb"
    raw = bytearray(path.read_bytes())
    at = raw.find(bytes(chunk_of(3, 50_000).objects[(0, 0)])[1000:2000])  # type: ignore[index]
    raw[at] ^= 1
    path.write_bytes(raw)
    done, _ = resize(root / "d", 32 * MIB)
    assert (done.kept_objects, done.dropped_objects) == (4, 1)
    assert all_good(root / "d")


def refused(root: Path, *flags: str) -> tuple[int, str]:
    """The exit code and stderr of a resize that has to change nothing."""
    before = snapshot(root)
    code, out, err = cli_here("resize", str(root), *flags)
    assert snapshot(root) == before
    assert out == ""
    return code, err


def test_what_cannot_be_done_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that is none, no confirmation, no room: refused with numbers, nothing changed."""
    make(root / "d", capacity_bytes=128 * MIB, chunks=(40,), nbytes=MIB)
    assert refused(root / "d", "--capacity", "8G")[0] == 2
    assert refused(root / "d", "--capacity", "1MiB")[0] == 2
    code, err = refused(root / "d", "--capacity", "32MiB")
    assert code == 2
    assert "throws away" in err
    assert "nothing was changed" in err
    code, err = refused(root / "d", "--capacity", "1000TiB")
    assert code == 5
    assert str(1000 * MIB * MIB - 128 * MIB) in err

    def too_small(directory: Path, needed_bytes: int, **_: str) -> None:
        raise DiskTooSmall(f"no {needed_bytes}")

    monkeypatch.setattr(preallocation, "check_room", too_small)
    code, err = refused(root / "d", "--capacity", "64MiB", "--yes")
    assert (code, str(64 * MIB) in err) == (5, True)


def test_serve_and_resize_agree(server: ServerProcess) -> None:
    """Who shrinks stops the server; a start grows what it is told to, and never shrinks."""
    code, _, err = cli_here("resize", str(server.data_dir), "--capacity", "32MiB")
    assert code == 2
    assert "stop that server" in err
    server.terminate()
    document: dict[str, Any] = json_here("resize", str(server.data_dir), "--capacity", "32MiB")
    assert document["capacity_before_bytes"] == 64 * MIB
    # The server's flag still says 64 MiB: a start grows the store.
    server.start().terminate()
    assert size_of(server.data_dir) == 64 * MIB
    assert "the store grows from 32MiB to 64MiB" in server.log()
    at = server.command.index("--capacity")
    server.command[at + 1] = "32MiB"
    code, log = server.refused()
    assert code == 2
    assert f"lmcache-persist resize {server.data_dir} --capacity 32MiB\n" in log
    assert str(32 * MIB) in log
    json_here("resize", str(server.data_dir), "--capacity", "32MiB")
    del server.command[at : at + 2]
    server.start()
    last_start = server.log()[len(log) :].rpartition("setting data_dir")[2]
    assert last_start.count("capacity = ") == 1
    assert "capacity = 32MiB (not set: the store keeps its size)" in last_start
    assert f"ready at {server.url}" in last_start
    assert json_here("inspect", str(server.data_dir))["store"]["capacity_bytes"] == 32 * MIB
