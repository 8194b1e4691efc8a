"""Which weights a model runs with: a digest over a folder, or a snapshot's commit.

A digest of all bytes would take minutes for a large model, names and sizes would miss
weights that are replaced in place. So: names, sizes, headers, and samples of every tensor.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3

from lmcache_persist.errors import IdentityUnknown

SAMPLES_PER_TENSOR = 3
"""Samples in every tensor at least: head, middle, tail."""

SAMPLE_BYTES = 256
"""Bytes per sample."""

BYTES_PER_SAMPLE = 4 << 20
"""Bytes of a tensor that get one sample more, so that large tensors have more than three."""

MAX_HEADER_BYTES = 100 << 20
"""Bytes. Source: the safetensors format's own bound."""

_DIGEST_LABEL = b"lmcache-persist weights 1"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def snapshot_commit(folder: Path) -> str | None:
    """The commit of a hub snapshot folder (``.../snapshots/COMMIT``), None for others."""
    resolved = Path(os.path.abspath(folder))
    if resolved.parent.name == "snapshots" and _COMMIT.fullmatch(resolved.name):
        return resolved.name
    return None


def digest_folder(folder: Path) -> str:
    """64 hex digits over the safetensors files of ``folder``.

    Raises:
        IdentityUnknown: there are none, or one cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"), key=lambda path: os.fsencode(path.name))
    if not files:
        raise IdentityUnknown(
            f"weights in {folder} have no safetensors files, so they have no digest",
            hint="convert the weights to safetensors, or load a hub snapshot by its commit",
        )
    digest = blake3(_DIGEST_LABEL)
    for path in files:
        try:
            _add_file(digest, path)
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise IdentityUnknown(f"weights {path} cannot be read: {error}") from error
    return digest.hexdigest()


def _add(digest: Any, part: bytes) -> None:
    digest.update(struct.pack("<Q", len(part)) + part)


def _add_file(digest: Any, path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size_bytes = os.fstat(fd).st_size
        (header_bytes,) = struct.unpack("<Q", _read(fd, 8, 0))
        if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size_bytes - 8):
            raise ValueError(f"header of {header_bytes} bytes in a file of {size_bytes}")
        header = _read(fd, header_bytes, 8)
        _add(digest, os.fsencode(path.name))
        _add(digest, struct.pack("<Q", size_bytes))
        _add(digest, header)
        for begin, end in _extents(header, size_bytes - 8 - header_bytes):
            for at in _sample_offsets(end - begin):
                length = min(SAMPLE_BYTES, end - begin)
                _add(digest, _read(fd, length, 8 + header_bytes + begin + at))
    finally:
        os.close(fd)


def _read(fd: int, num_bytes: int, offset: int) -> bytes:
    data = os.pread(fd, num_bytes, offset)
    if len(data) != num_bytes:
        raise ValueError(f"{len(data)} of {num_bytes} bytes at offset {offset}")
    return data


def _extents(header: bytes, data_bytes: int) -> Iterator[tuple[int, int]]:
    """Begin and end of every tensor, in the order of their names."""
    for name, tensor in sorted(json.loads(header).items()):
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        if not 0 <= begin <= end <= data_bytes:
            raise ValueError(f"tensor {name!r} spans [{begin}, {end}) of {data_bytes} bytes")
        if end > begin:
            yield begin, end


def _sample_offsets(tensor_bytes: int) -> list[int]:
    """Where the samples of a tensor begin: evenly from its head to its tail."""
    last = tensor_bytes - SAMPLE_BYTES
    if last <= 0:
        return [0]
    count = SAMPLES_PER_TENSOR + tensor_bytes // BYTES_PER_SAMPLE
    return [last * index // (count - 1) for index in range(count)]
