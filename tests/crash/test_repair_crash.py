"""A repair that is killed leaves nothing worse than it was, and a second one finishes.

The oracle: a check finds no more than before the repair, every chunk that was well is still
there byte for byte, and after a second repair the check finds nothing.
"""

from __future__ import annotations

import multiprocessing
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lmcache_persist
from lmcache_persist import failpoints
from lmcache_persist.server.repair import repair
from lmcache_persist.store.offline import OfflineStore
from support.filled import fill, hits
from support.mutilate import alter
from support.server import ServerProcess, own_server

CHUNKS = 8
CAPACITY = str(16 << 20)


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """A data dir whose store is altered in every way that can be mended."""
    with own_server(capacity=CAPACITY) as server:
        server.start()
        fill(server, CHUNKS)
        assert server.terminate() == 0
        shutil.copytree(server.data_dir, server.data_dir.with_name("well"))
        alter(server.data_dir / "store", "all")
        yield server.data_dir


def killed(data_dir: Path, spec: str) -> bool:
    """Repair in a process of its own with a failpoint; whether that killed it."""
    process = multiprocessing.get_context("fork").Process(target=_repair, args=(data_dir, spec))
    process.start()
    process.join(60)
    if process.exitcode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"the repair ended with {process.exitcode}")
    return process.exitcode != 0


def _repair(data_dir: Path, spec: str) -> None:
    failpoints.configure(spec)
    list(repair(data_dir))


def found(data_dir: Path) -> list[str]:
    """What a check finds."""
    return [str(violation) for violation in lmcache_persist.check(data_dir)]


def well(data_dir: Path) -> dict[bytes, bytes]:
    """Digests of the chunks of which neither record nor extents are bad."""
    named = " ".join(one for one in found(data_dir) if "extent" in one or "record" in one)
    with OfflineStore.open(data_dir / "store") as store:
        records = list(store.records())
    return {one.key: one.objects.digests for one in records if one.key.hex() not in named}


def at_every_pass(point: str) -> Iterator[str]:
    """The failpoint at its first pass, its second, ..."""
    yield from (f"{point}=kill@{number}" for number in range(1, 100))


@pytest.mark.parametrize("point", ["repair.before_sync", "repair.after_sync"])
def test_a_repair_that_is_killed_anywhere_can_be_finished(
    made: Path, root: Path, point: str
) -> None:
    """SIGKILL before or after each transaction: no worse, nothing lost, clean the second time."""
    before, good = len(found(made)), well(made)
    assert good
    for number, spec in enumerate(at_every_pass(point)):
        data_dir = root / str(number)
        shutil.copytree(made, data_dir)
        if not killed(data_dir, spec):
            break
        assert len(found(data_dir)) <= before, spec
        assert not killed(data_dir, ""), spec
        assert found(data_dir) == [], spec
        assert well(data_dir).items() >= good.items(), spec
        shutil.rmtree(data_dir)
    assert number >= 4, "there are that many transactions"


def test_a_drop_leaves_right_totals_right(made: Path, root: Path) -> None:
    """Killed right after a chunk was dropped: totals that were right are right still."""
    data_dir = root / "d"
    shutil.copytree(made.parent / "well", data_dir)
    alter(data_dir / "store", "flipped bit")
    assert killed(data_dir, "repair.after_sync=kill@1")
    assert found(data_dir) == []


def test_a_killed_replacement_can_be_finished(
    made: Path, root: Path, make_server: Callable[..., ServerProcess]
) -> None:
    """Killed between the old store's going and the new one's coming: the next one makes it."""
    data_dir = root / "d"
    shutil.copytree(made, data_dir)
    path = data_dir / "store" / "data.mdb"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    assert killed(data_dir, "repair.after_set_aside=kill")
    assert len(found(data_dir)) == 1
    assert not killed(data_dir, "")
    assert found(data_dir) == []
    server = make_server(name="d", capacity=CAPACITY).start()
    fill(server, 2)
    assert hits(server, 2) == 2 * 256
