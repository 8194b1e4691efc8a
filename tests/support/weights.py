"""Large weights that take no room: sparse safetensors files."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path


def write_sparse_folder(
    folder: Path, num_files: int, tensors_per_file: int, total_bytes: int
) -> None:
    """Safetensors files whose headers are real and whose tensors are holes.

    Args:
        folder: gets the files.
        num_files: shards.
        tensors_per_file: all of one size.
        total_bytes: of all tensors, about.
    """
    size = total_bytes // num_files // tensors_per_file
    for number in range(num_files):
        header = {
            f"model.layers.{number}.experts.{at}.weight": {
                "dtype": "U8",
                "shape": [size],
                "data_offsets": [at * size, (at + 1) * size],
            }
            for at in range(tensors_per_file)
        }
        text = json.dumps(header).encode()
        path = folder / f"model-{number:05}.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(path, 8 + len(text) + tensors_per_file * size)
