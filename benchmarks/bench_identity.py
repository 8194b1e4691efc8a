"""Seconds that the weights digest of a 100 GB folder takes. Prints figures, judges nothing.

The files are sparse: headers are real, tensors are holes, so it is the cost with a warm page
cache. A cold disk adds the time of as many random reads as are printed.

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


def main() -> None:
    """Print a line per shape of folder."""
    for name, num_tensors in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            tensor_bytes = TOTAL_BYTES // FILES // num_tensors
            for number in range(FILES):
                write_file(Path(folder) / f"{number}.safetensors", num_tensors, tensor_bytes)
            samples = FILES * num_tensors * len(weights._sample_offsets(tensor_bytes))
            begin = time.perf_counter()
            weights.digest_folder(Path(folder))
            took = time.perf_counter() - begin
        print(f"{name:32} {samples:7} samples {took:6.2f} s", flush=True)


if __name__ == "__main__":
    main()
