"""``inspect`` and ``verify`` on a data dir with many small objects. Prints figures.

python -m benchmarks.bench_inspect [--objects 1000000] [--directory DIR] [--keep]

The data dir is bound and has three models: two groups each, every second chunk of one
group only, as with recurrent states. All of it is what a server would have written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmcache_persist.binding import Binding
from lmcache_persist.datadir import DataDirLock, make_data_dir
from lmcache_persist.hashing import ChunkHash
from lmcache_persist.identity import Fingerprint, fingerprint
from lmcache_persist.manifest import Manifest
from lmcache_persist.server.state import utc_now
from lmcache_persist.store.base import ChunkWrite, Place, chunk_key
from lmcache_persist.store.lmdb_disk import LmdbDisk

MIB = 1 << 20
CHUNK_SIZE = 256
BATCH = 1000
OBJECT_BYTES = 48
BYTES_PER_OBJECT_ON_DISK = 1024
"""Room for record, extent, order entry and half-filled pages, generously."""
MODELS = 3
GROUPS = [
    {"kind": "full", "tokens_per_block": 64, "slots_per_block": 64, "window": 0},
    {"kind": "recurrent", "tokens_per_block": 256, "slots_per_block": 256, "window": 0},
]


def identity(number: int) -> dict[str, Any]:
    """A complete identity; the numbers differ in their weights."""
    return {
        "connector": "benchmark",
        "connector_format": 1,
        "model": "bench/model",
        "revision": None,
        "weights": f"w{number}",
        "config": {"hidden_size": 8},
        "kv_dtype": "bfloat16",
        "quantization": None,
        "max_model_len": None,
        "parallel": {"tp": 1, "pp": 1, "dcp": 1},
    }


def register(manifest: Manifest, number: int) -> Fingerprint:
    """A model's row in the manifest."""
    layouts = [{"rank": 0, "object_bytes": [OBJECT_BYTES, OBJECT_BYTES]}]
    name = fingerprint(identity(number), GROUPS, layouts)
    manifest.record_model(
        fingerprint=name,
        name="bench/model",
        identity=identity(number),
        groups=GROUPS,
        layouts=layouts,
        required_alignment=CHUNK_SIZE,
        at=utc_now(),
    )
    return name


def batches(models: list[Fingerprint], objects: int) -> Iterator[list[ChunkWrite]]:
    """Chunks of one object and of two, in turn, until there are so many objects."""
    rng, data, made = random.Random(1), bytes(OBJECT_BYTES), 0
    while made < objects:
        batch: list[ChunkWrite] = []
        for number in range(BATCH):
            groups = 1 + number % 2 if objects - made > 1 else 1
            key = chunk_key(models[rng.randrange(len(models))], ChunkHash(rng.randbytes(32)))
            batch.append(ChunkWrite(key, {Place(0, group): data for group in range(groups)}))
            made += groups
            if made >= objects:
                break
        yield batch


def fill(root: Path, objects: int) -> int:
    """Make the data dir; its capacity in bytes."""
    capacity = max(16 * MIB, -(-objects * BYTES_PER_OBJECT_ON_DISK // MIB) * MIB)
    paths = make_data_dir(root)
    with DataDirLock.acquire(paths.root), contextlib.ExitStack() as stack:
        manifest = stack.enter_context(contextlib.closing(Manifest.open(paths.manifest)))
        disk = LmdbDisk.open(paths.store, capacity, relaxed=True)
        stack.enter_context(contextlib.closing(disk))
        binding = Binding.make(
            chunk_size=CHUNK_SIZE,
            required_alignment=CHUNK_SIZE,
            base_chunk_size=CHUNK_SIZE,
            mode="auto",
            bound_at=utc_now(),
            winner="benchmark",
            backend="lmdb",
            store_uuid=disk.uuid,
            store_format_version=disk.format_version,
        )
        manifest.bind(binding)
        disk.write_stamp(binding)
        models = [register(manifest, number) for number in range(MODELS)]
        for batch in batches(models, objects):
            report = disk.write(batch)
            if len(report.written) != len(batch) or report.evicted:
                raise RuntimeError(f"the tier is too small: {report.dropped[:1]}")
    return capacity


def timed(*verb: str) -> None:
    """Run a verb as a process of its own; print its seconds and the memory it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "lmcache_persist.cli", *verb],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    memory = f"{peak // 1024} MiB" if peak > before else f"at most {before // 1024} MiB"
    shown = " ".join(word for word in verb if not word.startswith("/"))
    print(f"  {shown:32} exit {done.returncode}  {seconds:6.2f} s  {memory}", flush=True)


def measure(root: Path, *, verify: bool) -> None:
    """Every form of looking, as often as a person would."""
    timed("inspect", str(root), "--json")
    timed("inspect", str(root), "--models")
    timed("inspect", str(root), "--objects", "--limit", "1000")
    if verify:
        timed("verify", str(root), "--json")


@contextlib.contextmanager
def serving(root: Path, capacity: int) -> Iterator[None]:
    """A server on the data dir."""
    flags = ["--data-dir", str(root), "--capacity", str(capacity), "--pool-size", "32MiB"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lmcache_persist.cli", "serve", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        if process.stdout is None or not process.stdout.readline().startswith("ready"):
            raise RuntimeError("the server did not start")
        yield
    finally:
        process.terminate()
        process.wait(60)


def main() -> None:
    """Fill, look with nobody there, look at a live server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--verify", action="store_true", help="measure verify, too")
    parser.add_argument("--keep", action="store_true", help="leave the data dir there")
    options = parser.parse_args([] if __name__ != "__main__" else None)
    folder = Path(tempfile.mkdtemp(prefix="bench-inspect-", dir=options.directory))
    root = folder / "data"
    print(f"{platform.machine()}, {os.cpu_count()} cpus, Linux {platform.release()}, seed 1")
    try:
        start = time.perf_counter()
        capacity = fill(root, options.objects)
        seconds = time.perf_counter() - start
        print(f"{options.objects} objects in {root} made in {seconds:.0f} s")
        print("nobody serves it:")
        measure(root, verify=options.verify)
        with serving(root, capacity):
            print("a live server:")
            measure(root, verify=options.verify)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
