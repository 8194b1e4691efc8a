"""SIGKILL at every named step of a commit and of an eviction, and at random moments."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from store_support import UUID, binding, chunk, key, read

sys.path.insert(0, str(Path(__file__).parent))
import store_child

from lmcache_persist import failpoints
from lmcache_persist.store import offline
from lmcache_persist.store.base import ChunkKey, DiskTier, Place
from lmcache_persist.store.lmdb_disk import LmdbDisk

ROUNDS = 40
CHILD_S = 60.0


@dataclass
class Printed:
    """What the child said before it died."""

    durable: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    stamped: bool = False
    done: bool = False


def run_child(
    directory: Path, seed: int, *, spec: str = "", kill_at_line: int | None = None
) -> Printed:
    """Run the child until it dies; everything it printed, to the last whole line."""
    tests = Path(__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]),
        failpoints.ENV: spec,
    }
    child = subprocess.Popen(
        [sys.executable, store_child.__file__, str(directory), str(seed), str(ROUNDS)],
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert child.stdout is not None
    printed, pending, lines = Printed(), b"", 0
    deadline = time.monotonic() + CHILD_S
    with child.stdout as pipe:
        try:
            while time.monotonic() < deadline:
                ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
                data = os.read(pipe.fileno(), 65536) if ready else b""
                if not data:
                    break
                *whole, pending = (pending + data).split(b"\n")
                for line in whole:
                    note(printed, line.decode())
                    lines += 1
                if kill_at_line is not None and lines >= kill_at_line:
                    child.send_signal(signal.SIGKILL)
        finally:
            child.kill()
            code = child.wait(10)
    assert code == (0 if printed.done else -signal.SIGKILL)
    return printed


def note(printed: Printed, line: str) -> None:
    """Take in one line."""
    word, _, rest = line.partition(" ")
    if word in ("durable", "evicted"):
        getattr(printed, word).append(rest)
    printed.stamped |= word == "stamped"
    printed.done |= word == "done"


def view(tier: DiskTier, numbers: range) -> list[object]:
    """All records and the usage."""
    return [tier.find([key(number) for number in numbers]), tier.usage()]


def assert_right(directory: Path, printed: Printed) -> int:
    """The oracle: see the module's text of the tier. Returns the number of chunks there."""
    if not printed.stamped and not (directory / "data.mdb").exists():
        return 0
    assert offline.looks_damaged(directory) is None
    assert list(offline.check(directory)) == []
    numbers = range(ROUNDS * 5)
    number_of = {key(number): number for number in numbers}
    disk = LmdbDisk.open(directory, store_child.CAPACITY)
    try:
        assert not disk.started_clean or printed.done
        assert disk.uuid == UUID
        if printed.stamped:
            assert disk.stamp() == binding()
        counters = disk.counters()
        held: set[ChunkKey] = set()
        for record in filter(None, disk.find(list(number_of))):
            held.add(record.key)
            expected = chunk(number_of[record.key], store_child.sizes(number_of[record.key]))
            assert set(record.objects) == set(expected.objects)
            for place in record.objects:
                assert read(disk, record, place) == expected.objects[place]
        assert_durable(printed, held, counters.evicted + counters.dropped)
        assert disk.usage().chunks == len(held)
        before = view(disk, numbers)
    finally:
        disk.close()
    assert list(offline.check(directory)) == []
    again = LmdbDisk.open(directory, store_child.CAPACITY)
    try:
        assert again.started_clean
        assert view(again, numbers) == before
        assert again.write([chunk(9999, {Place(0, 0): 100_000})]).written == [key(9999)]
    finally:
        again.close()
    assert list(offline.check(directory)) == []
    return len(held)


def assert_durable(printed: Printed, held: set[ChunkKey], removed: int) -> None:
    """Every durable chunk is there, or its removal is printed, or in the store's own count."""
    gone = set(printed.evicted)
    missing = [name for name in printed.durable if name not in gone]
    missing = [name for name in missing if bytes.fromhex(name) not in held]
    unprinted = removed - len(printed.evicted)
    assert unprinted >= 0
    assert len(missing) <= unprinted, f"lost without an eviction: {missing}"


PASSES = {
    "bind.after_stamp": [1],
    "commit.before_write": [1, 9, 35],
    "commit.after_extents": [1, 9, 60],
    "commit.before_sync": [1, 9, 35],
    "commit.after_sync": [1, 9, 35],
    "evict.before_sync": [1, 2, 4],
    "evict.after_sync": [1, 2, 4],
}


@pytest.mark.parametrize(
    ("point", "nth"), [(point, nth) for point, passes in PASSES.items() for nth in passes]
)
def test_kill_at_failpoint(tmp_path: Path, seed: int, point: str, nth: int) -> None:
    """The next start finds the state before or after the step, never in between."""
    print(f"seed {seed}, {point} at pass {nth}")
    printed = run_child(tmp_path / "store", seed, spec=f"{point}=kill@{nth}")
    assert not printed.done, "the failpoint was never passed"
    assert_right(tmp_path / "store", printed)


@pytest.mark.parametrize("attempt", range(6))
def test_kill_at_any_moment(tmp_path: Path, seed: int, attempt: int) -> None:
    """The same for a SIGKILL at a moment that has no name."""
    rng = random.Random(seed * 1000 + attempt)
    line = rng.randrange(0, 150)
    print(f"seed {seed}, attempt {attempt}: killed at line {line}")
    printed = run_child(tmp_path / "store", rng.randrange(1 << 30), kill_at_line=line)
    assert_right(tmp_path / "store", printed)


def test_undisturbed_run(tmp_path: Path, seed: int) -> None:
    """Without a kill the child ends, has evicted, and its store holds what it said."""
    printed = run_child(tmp_path / "store", seed)
    assert printed.done
    assert len(printed.evicted) > 10
    held = assert_right(tmp_path / "store", printed)
    assert held == len(set(printed.durable) - set(printed.evicted))
