"""SIGKILL at every step of prune, resize, backup and restore.

Whoever looks next finds the state before the step that decides or the one after it, all of
it good, and the verb can be given again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lmcache_persist
from lmcache_persist import failpoints
from lmcache_persist.cli import backup as cli_backup
from lmcache_persist.datadir import DataDir, DataDirLock
from lmcache_persist.errors import DataDirUnusable
from lmcache_persist.server import reset
from lmcache_persist.server.backup import FilesSource, back_up
from lmcache_persist.server.looking import inspect_offline
from lmcache_persist.server.prune import prune
from lmcache_persist.server.resize import resize
from lmcache_persist.server.restore import restore
from lmcache_persist.store.lmdb_disk import LmdbDisk
from lmcache_persist.store.pieces import Part
from lmcache_persist.store.selection import Selection
from support.data_dirs import make, records_of
from support.filled import fill
from support.forked import dies_at
from support.server import ServerProcess, cli_here

MIB = 1 << 20
BEFORE, AFTER = 64 * MIB, 32 * MIB

RESIZE_OUTCOMES = {
    "commit.after_extents=kill@7": BEFORE,
    "resize.before_rename=kill": BEFORE,
    "resize.after_rename=kill": AFTER,
}
BACKUP_OUTCOMES = {
    "commit.after_extents=kill@7": False,
    "backup.before_descriptor=kill": False,
    "backup.before_rename=kill": False,
    "backup.after_rename=kill": True,
}
RESTORE_POINTS = (
    "restore.after_mark=kill",
    "commit.after_extents=kill@7",
    "restore.after_store=kill",
    "restore.after_manifest=kill",
)


def test_the_steps_are_the_ones_tested() -> None:
    """A new step has to be given its outcome here."""
    outcomes = (*RESIZE_OUTCOMES, *BACKUP_OUTCOMES, *RESTORE_POINTS)
    tested = {spec.split("=")[0] for spec in outcomes} | {"resize.after_preallocate"}
    verbs = ("resize.", "backup.", "restore.")
    assert {name for name in failpoints.NAMES if name.startswith(verbs)} <= tested


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


def back_up_files(data_dir: Path, dest: Path) -> None:
    """A backup of a data dir that nobody serves."""
    with FilesSource.open(data_dir) as source:
        back_up(source, dest)


@pytest.mark.parametrize("spec", BACKUP_OUTCOMES)
def test_a_killed_backup_is_none_or_a_whole_one(root: Path, spec: str) -> None:
    """Nothing has a backup's name that is not whole, and the next try clears what was left."""
    make(root / "d")
    dies_at(spec, lambda: back_up_files(root / "d", root / "b"))
    assert (root / "b").exists() is BACKUP_OUTCOMES[spec]
    if not BACKUP_OUTCOMES[spec]:
        partial = root / "b.partial"
        if (partial / "backup.json").exists():
            # All of it is there but the name; whoever trusts it gets what it says.
            assert restore(partial, root / "other").objects == 20
        else:
            with pytest.raises(DataDirUnusable):
                restore(partial, root / "other")
        back_up_files(root / "d", root / "b")
        assert not partial.exists()
    assert all_good(root / "b")
    assert restore(root / "b", root / "r").objects == 20
    assert records_of(root / "r").keys() == records_of(root / "d").keys()


@pytest.mark.parametrize(
    ("spec", "then"),
    list(zip(RESTORE_POINTS, ("restore", "start", "restore", "start"), strict=True)),
)
def test_a_killed_restore_counts_for_nothing(root: Path, spec: str, then: str) -> None:
    """What was restored so far is never taken for a data dir; a start or a restore clears it."""
    make(root / "d")
    back_up_files(root / "d", root / "b")
    dies_at(spec, lambda: restore(root / "b", root / "r"))
    for verb in (inspect_offline, lambda path: list(lmcache_persist.check(path))):
        with pytest.raises(DataDirUnusable, match="restored"):
            verb(root / "r")
    if then == "start":
        with DataDirLock.acquire(root / "r"):
            reset.finish(DataDir(root / "r"))  # what a start does first
        assert [path.name for path in (root / "r").iterdir()] == ["server.lock"]
    assert restore(root / "b", root / "r").objects == 20
    assert all_good(root / "r")
    assert records_of(root / "r").keys() == records_of(root / "d").keys()


def killed_server(make_server: Callable[..., ServerProcess], spec: str) -> ServerProcess:
    """A server with 300 small durable chunks that will die at a failpoint."""
    server = make_server(env={failpoints.ENV: spec}).start()
    fill(server, 300)
    return server


def test_a_server_killed_while_it_prunes(make_server: Callable[..., ServerProcess]) -> None:
    """The verb says how far it came and that nobody answers; what is left is whole steps."""
    server = killed_server(make_server, "evict.before_sync=kill@3")
    code, _, err = cli_here(
        "prune", str(server.data_dir), "--down-to", "0", "--timeout", "5", "--yes"
    )
    assert code == 4
    assert "pruned 128 chunks" in err
    assert server.wait() == -9
    assert all_good(server.data_dir)
    assert len(records_of(server.data_dir)) == 172


def test_a_server_killed_while_it_is_backed_up(
    make_server: Callable[..., ServerProcess], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has the backup's name, nothing is left of it, and the data dir is well."""
    server = killed_server(make_server, "")
    real, pieces_seen = cli_backup._LiveSource.parts, []

    def parts(self: cli_backup._LiveSource) -> Iterator[list[Part]]:
        for some in real(self):
            pieces_seen.append(len(some))
            server.kill()
            yield some

    monkeypatch.setattr(cli_backup._LiveSource, "parts", parts)
    code, out, _ = cli_here("backup", str(server.data_dir), str(root / "b"), "--timeout", "2")
    assert (code, out, len(pieces_seen)) == (4, "", 1)
    assert not list(root.glob("b*"))
    assert all_good(server.data_dir)
    back_up_files(server.data_dir, root / "b")
    assert restore(root / "b", root / "r").objects == 300
