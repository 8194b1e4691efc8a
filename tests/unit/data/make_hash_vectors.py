"""Prints the hash vectors that this code computes, as JSON; run by the tests in a child.

`python make_hash_vectors.py > hash_vectors.json` would record them anew, which only a new
HASH_VERSION may ask for: every chunk on every disk hangs on them.
"""

from __future__ import annotations

import json
from typing import Any

from lmcache_persist import hashing
from lmcache_persist.hashing import ChunkHash, ChunkHasher, ExtraKey, ExtraKind

EXTRAS: dict[str, tuple[ExtraKey, ...]] = {
    "salt": (ExtraKey(ExtraKind.SALT, b"tenant-a"),),
    "lora": (ExtraKey(ExtraKind.LORA, b"sql\0" + bytes(range(32))),),
    "salt_and_image": (
        ExtraKey(ExtraKind.SALT, b""),
        ExtraKey(ExtraKind.MULTIMODAL, (-3).to_bytes(8, "little", signed=True) + b"\xff" * 32),
    ),
}
SEQUENCES: dict[str, list[int]] = {
    "counting": list(range(1, 1633)),
    "zeros": [0] * 1632,
    "extremes": [0, 2**32 - 1, 2**31, 1] * 408,
}


def _chain(chunk_size: int, tokens: list[int], extra: bytes) -> list[str]:
    hashes: list[ChunkHash] = []
    if not ChunkHasher(chunk_size).extend(hashes, tokens, extra):
        raise ValueError("a token has no u32 form")
    return [value.hex() for value in hashes]


def compute() -> dict[str, Any]:
    """All vectors as plain JSON."""
    chains = []
    for chunk_size in (1, 16, 256, 544, 640):
        for name, tokens in SEQUENCES.items():
            length = min(len(tokens), 3 * chunk_size)
            for extra_name, extra in [("none", None), ("empty", ()), *EXTRAS.items()]:
                encoded = hashing.encode_extra(extra)
                chains.append(
                    {
                        "chunk_size": chunk_size,
                        "tokens": name,
                        "num_tokens": length,
                        "extra": extra_name,
                        "hashes": _chain(chunk_size, tokens[:length], encoded),
                    }
                )
            absent: list[ChunkHash] = []
            ChunkHasher(chunk_size).extend(absent, tokens[:length])
            chains.append(
                {
                    "chunk_size": chunk_size,
                    "tokens": name,
                    "num_tokens": length,
                    "extra": "absent",
                    "hashes": [value.hex() for value in absent],
                }
            )
    return {
        "hash_algorithm": hashing.HASH_ALGORITHM,
        "hash_version": hashing.HASH_VERSION,
        "roots": {str(size): ChunkHasher(size).root.hex() for size in (1, 256, 544, 16384)},
        "boundary_ids": {str(size): hashing.boundary_id(size) for size in (1, 256, 544, 16384)},
        "binding_id": hashing.binding_id(
            hashing.boundary_id(544),
            "lmdb",
            "0123456789abcdef" * 2,
            1,
            "2026-01-01T00:00:00.000001Z",
        ),
        "extras": {name: hashing.encode_extra(extra).hex() for name, extra in EXTRAS.items()},
        "extent_digests": {
            "": hashing.extent_digest(b"").hex(),
            "00" * 16: hashing.extent_digest(bytes(16)).hex(),
            "counting": hashing.extent_digest(bytes(range(256)) * 4096).hex(),
        },
        "chains": chains,
    }


if __name__ == "__main__":
    print(json.dumps(compute(), indent=1))
