"""Damaged data files: a miss or a refusal, never wrong bytes, never a signal at the reader."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmcache_persist.errors import StoreDamaged
from lmcache_persist.store import aside, offline
from lmcache_persist.store.base import Place
from lmcache_persist.store.lmdb_disk import LmdbDisk
from store_support import FULL_EXTENT, MIB, UUID, binding, chunk, key, overwrite, positions

CAPACITY = 16 * MIB
CHUNKS = 8
NBYTES = MIB + 1000

# What a server does at start and for requests, in a process that may die of it.
READER = """
import json, sys
from pathlib import Path
from store_support import MIB, key, chunk, read
from lmcache_persist.errors import PersistError
from lmcache_persist.store import offline
from lmcache_persist.store.base import Place
from lmcache_persist.store.lmdb_disk import LmdbDisk
directory, chunks, nbytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
problem = offline.looks_damaged(directory) or (sys.argv[4] == "verify" and
                                               offline.verify_pages(directory))
if problem:
    print(json.dumps({"refused": problem})); sys.exit()
disk = LmdbDisk.open(directory, 16 * MIB)
result = {}
for number in range(chunks):
    record = disk.find([key(number)])[0]
    if record is None:
        result[number] = "miss"
        continue
    try:
        right = read(disk, record, Place(0, 0)) == chunk(number, nbytes).objects[Place(0, 0)]
        result[number] = "right" if right else "WRONG"
    except PersistError as error:
        result[number] = error.code
disk.apply_touches()
result["chunks"] = disk.usage().chunks
report = disk.write([chunk(100, nbytes)])
result["new"] = report.written == [key(100)]
disk.close()
print(json.dumps(result))
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A closed store with some chunks."""
    path = tmp_path / "store"
    disk = LmdbDisk.open(path, CAPACITY, uuid=UUID)
    disk.write_stamp(binding())
    disk.write([chunk(number, NBYTES) for number in range(CHUNKS)])
    disk.close()
    return path


def start(directory: Path, *, verify: bool = False) -> dict[str, Any]:
    """Start on the store in a process of its own; what it found."""
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            READER,
            str(directory),
            str(CHUNKS),
            str(NBYTES),
            "verify" if verify else "quick",
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"died with {done.returncode}: {done.stderr}"
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("at", [0, 1, 500_000, MIB - 17, NBYTES - 1])
def test_flipped_bit_in_an_extent(directory: Path, at: int) -> None:
    """One flipped bit anywhere in an object is proven, that chunk goes, all others are right."""
    body = bytes(chunk(3, NBYTES).objects[Place(0, 0)])
    end = FULL_EXTENT if at < FULL_EXTENT else NBYTES
    first = min(at, end - 32)
    # An older copy may lie in a page that is free by now.
    for where in positions(directory / "data.mdb", body[first : first + 32]):
        overwrite(directory / "data.mdb", where + at - first, bytes([body[at] ^ 0x10]))
    found = start(directory)
    assert found.pop("3") == "object_corrupt"
    assert (found.pop("chunks"), found.pop("new")) == (CHUNKS - 1, True)
    assert set(found.values()) == {"right"}


@pytest.mark.parametrize("length", ["three quarters", 4096, 0, 100, CAPACITY - 1])
def test_cut_file_is_refused(directory: Path, length: int | str) -> None:
    """A file that is too short is refused before it is mapped, and can be set aside."""
    nbytes = CAPACITY * 3 // 4 if isinstance(length, str) else length
    os.truncate(directory / "data.mdb", nbytes)
    assert "data file" in start(directory)["refused"]
    assert [violation.where for violation in offline.check(directory)] == ["data file"]
    with pytest.raises(StoreDamaged, match="data file"):
        LmdbDisk.open(directory, CAPACITY)
    assert (directory / "data.mdb").stat().st_size == nbytes
    aside.set_aside(directory)
    fresh = LmdbDisk.open(directory, CAPACITY)
    assert fresh.usage().chunks == 0
    fresh.close()


@pytest.mark.parametrize("pages", [(0, 1), (0,), (1,)])
def test_zeroed_meta_pages_are_refused(directory: Path, pages: tuple[int, ...]) -> None:
    """Without both meta pages the store is refused before it is mapped."""
    for page in pages:
        overwrite(directory / "data.mdb", page * 4096, bytes(4096))
    assert "meta page" in start(directory)["refused"]


def test_noise_anywhere(directory: Path, seed: int) -> None:
    """4 KiB of noise at any page: verified first, the store is refused or every read is right."""
    rng = random.Random(seed)
    whole = (directory / "data.mdb").read_bytes()
    used = len(whole.rstrip(b"\0")) // 4096
    refused = 0
    for attempt in range(12):
        (directory / "data.mdb").write_bytes(whole)
        # Tree pages are few among those of extents: half of the tries aim at them.
        page = rng.randrange(2, 40) if attempt % 2 else rng.randrange(2, used)
        overwrite(directory / "data.mdb", page * 4096, rng.randbytes(4096))
        found = start(directory, verify=True)
        if "refused" in found:
            refused += 1
            continue
        assert "WRONG" not in found.values(), f"seed {seed}, page {page}: {found}"
        assert found["new"]
    print(f"seed {seed}: {refused} of 12 refused")


def test_the_reader_can_fail(directory: Path) -> None:
    """An undamaged store reads right in the child: what it reports means something."""
    found = start(directory, verify=True)
    assert (found.pop("chunks"), found.pop("new")) == (CHUNKS, True)
    assert list(found.values()) == ["right"] * CHUNKS
    assert key(0) != key(1)
