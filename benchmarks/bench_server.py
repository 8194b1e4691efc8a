"""A real server under an emulated paged worker: start, store, lookup, load. Judges nothing.

The work is that of the peers' figures: 32 chunks of 32 MiB, each 32 layers of 16 blocks of
16 tokens with 8 KV heads of 128, bfloat16, keys and values: 256 tokens. Every loaded byte
is compared with what was stored.

python -m benchmarks.bench_server [--directory DIR] [--chunks 32] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lmcache_persist.connector import CacheClient, ClientOptions, Registration
from lmcache_persist.connector.pages import PageSet
from lmcache_persist.geometry import Group, GroupKind
from lmcache_persist.hashing import ChunkHash, ChunkHasher

GIB = 1 << 30
NUM_LAYERS = 32
BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
BLOCKS_PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS
PAGE_SHAPE = (2, BLOCK_TOKENS, 8, 128)
GROUPS = (Group(GroupKind.FULL, BLOCK_TOKENS, BLOCK_TOKENS),)
SEED = 1
WAIT_S = 60.0
OPTIONS = ClientOptions(request_timeout_s=10.0, lookup_timeout_s=60.0)
IDENTITY: dict[str, Any] = {
    "connector": "bench",
    "connector_format": 1,
    "model": "bench",
    "revision": None,
    "weights": "none",
    "config": {"layers": NUM_LAYERS},
    "kv_dtype": "bfloat16",
    "quantization": None,
    "max_model_len": None,
    "parallel": {"tp": 1},
}


class Server:
    """``lmcache-persist serve`` for this benchmark."""

    def __init__(self, folder: Path, chunks: int) -> None:
        total = chunks * 32 << 20
        self.command = [sys.executable, "-m", "lmcache_persist.cli", "serve"]
        self.command += ["--data-dir", str(folder / "data"), "--log-level", "warning"]
        self.command += ["--capacity", str(2 * total), "--pool-size", str(3 * total)]
        self.process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> float:
        """Start; seconds until ready."""
        begin = time.perf_counter()
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        if self.process.stdout is None:
            raise RuntimeError("no stdout")
        word, _, self.url = self.process.stdout.readline().strip().partition(" ")
        if word != "ready":
            raise RuntimeError("the server did not start")
        return time.perf_counter() - begin

    def anonymous_mib(self) -> float:
        """Anonymous memory of the server, MiB."""
        if self.process is None:
            raise RuntimeError("not started")
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) / 1024

    def stop(self) -> None:
        """SIGTERM, so that nothing stays behind."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(WAIT_S)

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(WAIT_S)


class Worker:
    """Paged KV tensors, and a client that stores and loads them."""

    def __init__(self, url: str, chunks: int) -> None:
        torch.manual_seed(SEED)
        torch.set_num_threads(1)
        self.blocks = chunks * BLOCKS_PER_CHUNK
        shape = (self.blocks, *PAGE_SHAPE)
        self.layers = [torch.randn(shape).to(torch.bfloat16) for _ in range(NUM_LAYERS)]
        self.pages = PageSet(self.layers)
        self.object_bytes = self.pages.object_bytes(BLOCKS_PER_CHUNK)
        self.client = CacheClient(url, kind="client", label="bench", options=OPTIONS)
        self.client.wait_connected(WAIT_S)
        self.client.bind(GROUPS, who="bench")
        self.client.register(Registration("bench", 0, 1, IDENTITY, {}, GROUPS, [self.object_bytes]))
        binding = self.client.binding
        if binding is None:
            raise RuntimeError("not bound")
        self.hasher = ChunkHasher(binding.chunk_size)

    def hashes(self, tokens: list[int]) -> list[ChunkHash]:
        """The chunk hashes of a prompt."""
        found: list[ChunkHash] = []
        self.hasher.extend(found, tokens)
        return found

    def block_ids(self, chunk: int) -> list[int]:
        """Blocks of a chunk, spread over the whole cache as an engine's are."""
        return [
            (chunk + step * self.blocks // BLOCKS_PER_CHUNK) % self.blocks
            for step in range(BLOCKS_PER_CHUNK)
        ]

    def store(self, hashes: list[ChunkHash]) -> None:
        """Reserve, gather, commit; returns when all is committed."""
        wanted = [1] * len(hashes)
        grants = self.client.reserve(engine="bench", rank=0, hashes=hashes, masks=wanted)
        reply = grants.result(WAIT_S)
        pool = self.client.pool(reply.boot)
        if pool is None or len(reply.grants) != len(hashes):
            raise RuntimeError("not all slots were granted")
        futures = []
        for grant in reply.grants:
            view = pool.view(grant.offsets[0], self.object_bytes)
            self.pages.gather(self.block_ids(grant.index), view)
            futures.append(self.client.commit([grant.reservation]))
        for future in futures:
            if future.result(WAIT_S).refused:
                raise RuntimeError("a commit was refused")

    def load(self, hashes: list[ChunkHash], num_tokens: int) -> tuple[float, float, int]:
        """Look up and scatter; seconds of either, and chunks that came from disk."""
        for layer in self.layers:
            layer.zero_()
        begin = time.perf_counter()
        handle = self.client.lookup(engine="bench", hashes=hashes, num_tokens=num_tokens)
        result = handle.wait(WAIT_S)
        found = time.perf_counter()
        if result is None or result.tokens != len(hashes) * CHUNK_TOKENS:
            raise RuntimeError(f"lookup gave {result}")
        pool = self.client.pool(result.boot_id)
        if pool is None:
            raise RuntimeError("no pool")
        for run in result.runs:
            for step, offset in enumerate(run.offsets):
                view = pool.view(offset, self.object_bytes)
                self.pages.scatter(self.block_ids(run.first_chunk + step), view)
        done = time.perf_counter()
        handle.release()
        return found - begin, done - found, result.disk_chunks

    def lookup_cold_s(self, num_tokens: int, salt: int) -> float:
        """Seconds to hash and look up a prompt of which nothing is cached."""
        tokens = [salt, *range(num_tokens - 1)]
        begin = time.perf_counter()
        hashes = self.hashes(tokens)
        handle = self.client.lookup(engine="bench", hashes=hashes, num_tokens=num_tokens)
        handle.wait(WAIT_S)
        seconds = time.perf_counter() - begin
        handle.release()
        return seconds


def memcpy_rate() -> float:
    """Bytes per second of one thread copying 256 MiB."""
    source, target = (
        torch.ones(32 << 20, dtype=torch.int64),
        torch.empty(32 << 20, dtype=torch.int64),
    )
    return (256 << 20) / statistics.median(timed(lambda: target.copy_(source)) for _ in range(5))


def timed(act: Callable[[], object]) -> float:
    """Seconds that ``act`` takes."""
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def measure(folder: Path, chunks: int) -> dict[str, float]:
    """All figures."""
    server = Server(folder, chunks)
    figures: dict[str, float] = {"start_empty_s": server.start()}
    total = chunks * 32 << 20
    try:
        worker = Worker(server.url, chunks)
        originals = [layer.clone() for layer in worker.layers]
        tokens = [random.Random(SEED).randrange(50_000) for _ in range(chunks * CHUNK_TOKENS + 1)]
        hashes = worker.hashes(tokens)
        seconds = timed(lambda: worker.store(hashes))
        figures["store_gib_per_s"] = total / seconds / GIB
        figures["flush_s"] = timed(lambda: worker.client.flush(WAIT_S))
        figures["durable_gib_per_s"] = total / (seconds + figures["flush_s"]) / GIB
        for name, restart in (("memory", False), ("disk", True)):
            if restart:
                worker.client.close()  # or it would say on stderr that its server is gone
                server.kill()
                figures["restart_s"] = server.start()
                again = Worker(server.url, chunks)
                worker.client = again.client
            lookup_s, scatter_s, from_disk = worker.load(hashes, len(tokens))
            if (from_disk == chunks) != restart:
                raise RuntimeError(f"{from_disk} chunks from disk")
            if not all(map(torch.equal, worker.layers, originals)):
                raise RuntimeError("loaded bytes differ from stored ones")
            figures[f"{name}_lookup_ms"] = 1000 * lookup_s
            figures[f"{name}_copy_gib_per_s"] = total / scatter_s / GIB
            figures[f"{name}_load_gib_per_s"] = total / (lookup_s + scatter_s) / GIB
        for length in (8192, 131_072):
            times = [worker.lookup_cold_s(length, salt) for salt in range(15)]
            figures[f"lookup_{length}_tokens_ms"] = 1000 * statistics.median(times)
        figures["anonymous_mib"] = server.anonymous_mib()
        worker.client.close()
    finally:
        server.stop()
    figures["memcpy_gib_per_s"] = memcpy_rate() / GIB
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="lp-bench-", dir=options.directory))
    try:
        figures = measure(folder, options.chunks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(figures))
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, seed {SEED}")
    for name, value in figures.items():
        print(f"{name:28} {value:10.2f}")


if __name__ == "__main__":
    main()
