"""SIGKILL at every step of prune, resize, backup and restore.

Whoever looks next finds the state before the step that decides or the one after it, all of
it good, and the verb can be given again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import lmcache_persist
from lmcache_persist import failpoints
from lmcache_persist.server.prune import prune
from lmcache_persist.server.resize import resize
from lmcache_persist.store.lmdb_disk import LmdbDisk
from lmcache_persist.store.selection import Selection
from support.data_dirs import make, records_of
from support.forked import dies_at

MIB = 1 << 20
BEFORE, AFTER = 64 * MIB, 32 * MIB

RESIZE_OUTCOMES = {
    "commit.after_extents=kill@7": BEFORE,
    "resize.before_rename=kill": BEFORE,
    "resize.after_rename=kill": AFTER,
}


def test_the_steps_are_the_ones_tested() -> None:
    """A new step has to be given its outcome here."""
    tested = {spec.split("=")[0] for spec in RESIZE_OUTCOMES} | {"resize.after_preallocate"}
    assert {name for name in failpoints.NAMES if name.startswith("resize.")} <= tested


def all_good(root: Path) -> bool:
    """Whether verify finds nothing in a data dir that nobody serves."""
    return list(lmcache_persist.check(root)) == []


def opens(root: Path, capacity_bytes: int) -> int:
    """Objects in the store as a server opens it, which clears what a crash left."""
    disk = LmdbDisk.open(root / "store", capacity_bytes)
    try:
        return disk.usage().objects
    finally:
        disk.close()


@pytest.mark.parametrize(
    ("spec", "left"), [("evict.before_sync=kill@2", 236), ("evict.after_sync=kill@2", 172)]
)
def test_a_killed_prune_has_done_whole_steps(root: Path, spec: str, left: int) -> None:
    """What was removed is removed with all that belongs to it; again, it goes on from there."""
    make(root / "d", chunks=(300,), nbytes=3000)
    everything = Selection(down_to_bytes=0)
    dies_at(spec, lambda: list(prune(root / "d", everything)))
    assert all_good(root / "d")
    assert len(records_of(root / "d")) == left
    assert sum(len(step.keys) for step in prune(root / "d", everything)) == left
    assert all_good(root / "d")


@pytest.mark.parametrize("spec", RESIZE_OUTCOMES)
def test_a_shrinking_store_is_the_old_one_or_the_new_one(root: Path, spec: str) -> None:
    """Killed while the smaller store is made, nothing has happened; afterwards all has."""
    make(root / "d", capacity_bytes=BEFORE)
    before = records_of(root / "d")
    dies_at(spec, lambda: resize(root / "d", AFTER, lambda losses: None))
    capacity = RESIZE_OUTCOMES[spec]
    assert (root / "d" / "store" / "data.mdb").stat().st_size == capacity
    assert all_good(root / "d")
    assert records_of(root / "d").keys() == before.keys()
    assert opens(root / "d", capacity) == 20
    assert not (root / "d" / "store" / ".new").exists()
    assert resize(root / "d", AFTER, lambda losses: None).kept_objects == 20
    assert all_good(root / "d")


@pytest.mark.parametrize("then", [BEFORE, 96 * MIB])
def test_a_killed_growth_is_harmless(root: Path, then: int) -> None:
    """The file is longer than its store: the old capacity starts, and the new one does."""
    make(root / "d", capacity_bytes=BEFORE)
    dies_at("resize.after_preallocate=kill", lambda: resize(root / "d", 96 * MIB, lambda _: None))
    assert (root / "d" / "store" / "data.mdb").stat().st_size == 96 * MIB
    assert all_good(root / "d")
    assert opens(root / "d", then) == 20
    assert resize(root / "d", 96 * MIB, lambda _: None).after == 96 * MIB
    assert all_good(root / "d")
