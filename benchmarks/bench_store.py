"""Throughput of the disk tier beside that of memcpy. Prints figures, judges nothing.

python benchmarks/bench_store.py [--directory DIR] [--capacity-mib 4096] [--relaxed]
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lmcache_persist.store.base import ChunkKey, ChunkWrite, Place
from lmcache_persist.store.lmdb_disk import LmdbDisk

MIB = 1 << 20
GIB = 1 << 30
BATCH_BYTES = 64 * MIB
PLACE = Place(0, 0)


def rate(nbytes: int, seconds: float) -> str:
    """Bytes per second, for people."""
    return f"{nbytes / seconds / GIB:6.2f} GiB/s"


def timed(act: Callable[[], object]) -> float:
    """Seconds that ``act`` takes."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def memcpy(source: bytearray) -> float:
    """Bytes per second of a plain copy between touched buffers, the median of five."""
    target = bytearray(len(source))
    seconds = [timed(lambda: target.__setitem__(slice(None), source)) for _ in range(6)]
    return len(source) / statistics.median(seconds[1:])


def batches(chunk_bytes: int, total_bytes: int, pool: bytearray) -> Iterator[list[ChunkWrite]]:
    """Chunks cut from ``pool``, each at another offset, in group commits of 64 MiB."""
    view = memoryview(pool)
    span = len(pool) - chunk_bytes
    number = 0
    for _ in range(total_bytes // BATCH_BYTES):
        batch = []
        for _ in range(max(1, BATCH_BYTES // chunk_bytes)):
            at = (number * 104_729 * 64) % (span or 1)
            key = ChunkKey(random.Random(f"{chunk_bytes}/{number}").randbytes(64))
            batch.append(ChunkWrite(key, {PLACE: view[at : at + chunk_bytes]}))
            number += 1
        yield batch


def drop_page_cache(path: Path) -> None:
    """Ask the kernel to forget the file's pages (mapped ones may stay)."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def read_all(disk: LmdbDisk, keys: list[ChunkKey], buffer: memoryview) -> tuple[int, float]:
    """Bytes and seconds of reading chunks, each verified."""
    records = [record for record in disk.find(keys) if record is not None]

    def read() -> None:
        for record in records:
            if not disk.read_into(record, PLACE, buffer):
                raise RuntimeError("a chunk is gone")

    seconds = timed(read)
    return len(records) * len(buffer), seconds


def bench(
    directory: Path, chunk_bytes: int, capacity: int, pool: bytearray, *, relaxed: bool, copy: float
) -> None:
    """One chunk size: writes into an empty tier, with eviction, reads warm and cold."""
    buffer = memoryview(bytearray(chunk_bytes))
    buffer[:] = bytes(chunk_bytes)
    disk = LmdbDisk.open(directory, capacity, relaxed=relaxed)
    print(f"\nchunks of {chunk_bytes // MIB} MiB, capacity {capacity / GIB:g} GiB")
    work = list(batches(chunk_bytes, capacity * 2, pool))
    filling = len(work) * 2 // 5
    written = evicted = 0
    for name, part in (("write, empty", work[:filling]), ("write, evicting", work[filling:])):
        seconds = 0.0
        nbytes = sum(len(batch) for batch in part) * chunk_bytes
        for batch in part:
            start = time.perf_counter()
            report = disk.write(batch)
            while gone := disk.evict():
                evicted += len(gone)
            seconds += time.perf_counter() - start
            written += len(report.written)
            evicted += len(report.evicted)
        print(f"  {name:16} {rate(nbytes, seconds)}  {nbytes / seconds / copy:5.2f} of memcpy")
    keys = [write.key for batch in work[-filling // 2 :] for write in batch]
    for name in ("read, warm", "read, warm", "read, cold"):
        if name == "read, cold":
            disk.close()
            drop_page_cache(directory / "data.mdb")
            disk = LmdbDisk.open(directory, capacity, relaxed=relaxed)
        nbytes, seconds = read_all(disk, keys, buffer)
        print(f"  {name:16} {rate(nbytes, seconds)}  {nbytes / seconds / copy:5.2f} of memcpy")
    print(f"  written {written}, evicted {evicted}, turns {disk.counters().turns}")
    disk.close()


def bench_find(directory: Path) -> None:
    """Records of 512 chunks with 48 objects each."""
    disk = LmdbDisk.open(directory, GIB)
    keys = [ChunkKey(bytes(32) + random.Random(number).randbytes(32)) for number in range(512)]
    data = bytes(4096)
    places = [Place(rank, group) for rank in range(8) for group in range(6)]
    disk.write([ChunkWrite(key, dict.fromkeys(places, data)) for key in keys])
    seconds = statistics.median(timed(lambda: disk.find(keys)) for _ in range(9))
    print(f"\nfind, 512 chunks of 48 objects: {seconds * 1000:.2f} ms")
    seconds = statistics.median(timed(disk.usage) for _ in range(9))
    print(f"usage: {seconds * 1000:.3f} ms")
    disk.close()


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--capacity-mib", type=int, default=2048)
    parser.add_argument("--relaxed", action="store_true")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="bench-store-", dir=options.directory))
    pool = bytearray(random.Random(1).randbytes(96 * MIB))
    copy = memcpy(pool)
    print(f"{platform.machine()}, {os.cpu_count()} cpus, Linux {platform.release()}, {root}")
    print(f"memcpy {rate(int(copy), 1.0)}, synced: {not options.relaxed}, seed 1")
    try:
        for chunk_bytes in (MIB, 32 * MIB):
            bench(
                root / f"store-{chunk_bytes}",
                chunk_bytes,
                options.capacity_mib * MIB,
                pool,
                relaxed=options.relaxed,
                copy=copy,
            )
            shutil.rmtree(root / f"store-{chunk_bytes}")
        bench_find(root / "store-find")
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
