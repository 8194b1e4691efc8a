"""Repairing a store: what was wrong is named and mended, what was well stays."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from lmcache_persist import failpoints
from lmcache_persist.errors import StoreIOError
from lmcache_persist.store import offline
from lmcache_persist.store.base import Place
from lmcache_persist.store.check import Progress
from lmcache_persist.store.findings import Mended
from lmcache_persist.store.lmdb_disk import LmdbDisk
from store_support import MIB, UUID, binding, chunk, read
from support.mutilate import WAYS, alter

CAPACITY = 16 * MIB
SIZES = {Place(0, 0): 5000, Place(0, 1): 300}
NUM_CHUNKS = 6
LOST = {
    "flipped bit": 1,
    "short extent": 1,
    "lost extent": 1,
    "copied record": 1,
    "swapped records": 2,
    "broken record": 1,
}
"""Chunks that a way costs; others cost none."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store with chunks of two models."""
    path = tmp_path_factory.mktemp("repair") / "store"
    disk = LmdbDisk.open(path, CAPACITY, uuid=UUID)
    disk.write_stamp(binding())
    disk.write([chunk(number, SIZES, model=1 + number % 2) for number in range(NUM_CHUNKS)])
    disk.close()
    return path


@pytest.fixture
def directory(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(made, tmp_path / "store")
    return tmp_path / "store"


def mend(directory: Path, **unwanted: str) -> list[Mended]:
    """Repair with digests, to the end."""
    with offline.repairing(directory, unwanted=unwanted, progress=Progress()) as work:
        return list(work.run())


def violations(directory: Path) -> list[str]:
    """What a check says."""
    return [str(found) for found in offline.check(directory)]


def good_chunks(directory: Path) -> int:
    """Chunks that read back byte for byte; anything else that is there fails."""
    disk = LmdbDisk.open(directory, CAPACITY)
    good = 0
    try:
        for number in range(NUM_CHUNKS):
            write = chunk(number, SIZES, model=1 + number % 2)
            [record] = disk.find([write.key])
            if record is not None:
                good += 1
                for place, data in write.objects.items():
                    assert read(disk, record, place) == bytes(data)
        assert disk.write([chunk(99, SIZES)]).written
    finally:
        disk.close()
    return good


@pytest.mark.parametrize("name", WAYS)
def test_each_way_is_noticed_mended_and_clean_afterwards(directory: Path, name: str) -> None:
    """Check names something, repair mends all of it, the rest reads right, writes go on."""
    alter(directory, name)
    assert violations(directory)
    mended = mend(directory)
    assert mended
    assert all(one.done for one in mended), mended
    assert violations(directory) == []
    assert mend(directory) == []
    good = good_chunks(directory)
    if name == "same serial twice":
        assert good >= NUM_CHUNKS - 1  # nothing tells which of the two is right
    elif name != "all":
        assert good == NUM_CHUNKS - LOST.get(name, 0)
    assert violations(directory) == []


def test_a_store_that_is_well_is_left_alone(directory: Path) -> None:
    """No transaction is made where nothing is wrong; LMDB's lock file does not stay."""
    before = (directory / "data.mdb").read_bytes()
    assert mend(directory) == []
    assert (directory / "data.mdb").read_bytes() == before
    assert sorted(path.name for path in directory.iterdir()) == ["data.mdb"]


def test_unwanted_models_are_dropped_with_their_reason(directory: Path) -> None:
    """Chunks of a model that cannot be there go, those of the other stay."""
    name = chunk(0, SIZES, model=1).key[:32].hex()
    mended = mend(directory, **{name: "it does not fit"})
    assert {one.violation.what for one in mended} == {"it does not fit"}
    assert good_chunks(directory) == NUM_CHUNKS // 2
    assert violations(directory) == []


def test_a_disk_that_fails_proves_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extent that cannot be read is told, once, and its chunk is kept."""

    def fails(*_: object) -> None:
        raise StoreIOError("no answer from the disk")

    monkeypatch.setattr(offline.StoreReader, "read_extent", fails)
    alter(directory, "wrong totals")
    mended = mend(directory)
    left = [one for one in mended if one.done is None]
    assert len(left) == NUM_CHUNKS * len(SIZES)
    assert len(mended) == len(left) + 1
    monkeypatch.undo()
    assert violations(directory) == []
    assert good_chunks(directory) == NUM_CHUNKS


@pytest.mark.parametrize("point", ["repair.before_sync", "repair.after_sync"])
def test_a_repair_that_ends_at_any_step_can_be_repeated(
    directory: Path, tmp_path: Path, point: str
) -> None:
    """Wherever it ends, the check finds no more than before, and a second one mends all."""
    alter(directory, "all")
    before = len(violations(directory))
    for step in itertools.count(1):
        copy = tmp_path / f"copy-{step}"
        shutil.copytree(directory, copy)
        failpoints.configure(f"{point}=error@{step}")
        try:
            mend(copy)
        except StoreIOError:
            ended = True
        else:
            ended = False
        finally:
            failpoints.configure("")
        if not ended:
            break
        assert len(violations(copy)) <= before
        mend(copy)
        assert violations(copy) == []
        assert good_chunks(copy) > 0
        shutil.rmtree(copy)
    assert step > 4, "there are that many transactions"


def test_a_full_store_is_repaired(tmp_path: Path) -> None:
    """The pages held back are enough to drop from a store without room."""
    path = tmp_path / "store"
    disk = LmdbDisk.open(path, CAPACITY, uuid=UUID)
    disk.write_stamp(binding())
    for start in range(0, 4000, 100):
        disk.write([chunk(start + number, 6000) for number in range(100)])
    disk.close()
    for name in ("orphan extents", "flipped bit", "lost order", "broken totals", "broken record"):
        alter(path, name)
    mended = mend(path)
    assert all(one.done for one in mended)
    assert violations(path) == []
