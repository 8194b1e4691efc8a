"""Seconds that the weights digest of a 100 GB folder takes. Prints figures, judges nothing.

The files are sparse: headers are real, tensors are holes but for the pages that are sampled.
Cold is after those have left the page cache; the file system's own metadata stays warm.

python -m benchmarks.bench_identity
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import time
from pathlib import Path

from lmcache_persist.connector.vllm import weights

TOTAL_BYTES = 100 << 30
FILES = 20
RUNS = 5
SHAPES = {"dense, 35 tensors a file": 35, "experts, 1000 tensors a file": 1000}


def write_file(path: Path, num_tensors: int, tensor_bytes: int) -> None:
    """A safetensors file without data."""
    header = {
        f"model.layers.{at}.weight": {
            "dtype": "U8",
            "shape": [tensor_bytes],
            "data_offsets": [at * tensor_bytes, (at + 1) * tensor_bytes],
        }
        for at in range(num_tensors)
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + num_tensors * tensor_bytes)


def fill_samples(path: Path, num_tensors: int, tensor_bytes: int) -> None:
    """Have the sampled pages on disk."""
    data_at = path.stat().st_size - num_tensors * tensor_bytes
    extents = [(at * tensor_bytes, (at + 1) * tensor_bytes) for at in range(num_tensors)]
    with path.open("r+b") as file:
        for begin, end in weights._ranges(weights._samples(extents, data_at)):
            os.pwrite(file.fileno(), os.urandom(end - begin), begin)
        os.fsync(file.fileno())


def cool(folder: Path) -> None:
    """Take the files out of the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def time_digest(folder: Path) -> float:
    """Seconds."""
    begin = time.perf_counter()
    weights.digest_folder(folder)
    return time.perf_counter() - begin


def main() -> None:
    """Print a line per shape of folder."""
    for name, num_tensors in SHAPES.items():
        tensor_bytes = TOTAL_BYTES // FILES // num_tensors
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            for number in range(FILES):
                path = folder / f"{number}.safetensors"
                write_file(path, num_tensors, tensor_bytes)
                fill_samples(path, num_tensors, tensor_bytes)
            warm = min(time_digest(folder) for _ in range(RUNS))
            cold = []
            for _ in range(RUNS):
                cool(folder)
                cold.append(time_digest(folder))
        samples = FILES * num_tensors * len(weights._sample_offsets(tensor_bytes))
        print(
            f"{name:32} {samples:7} samples  warm {warm:6.2f} s  cold {min(cold):6.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
