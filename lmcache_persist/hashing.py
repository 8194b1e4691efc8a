"""The chunk hash chain, boundary and binding ids, and extent digests. Pure.

``h[-1] = BLAKE3(label, hash version, chunk size, namespace)``, the namespace empty but for
an engine that shares with nobody, and
``h[i] = BLAKE3(h[i-1], u32 length, extra, tokens as little-endian u32)`` where *extra* is
each :class:`ExtraKey` as (u8 kind, u32 length, bytes) and has length 0 for none. The
result is the same in every process, on every machine, under every ``PYTHONHASHSEED``;
``tests/unit/data/hash_vectors.json`` holds recorded values.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NewType

import xxhash
from blake3 import blake3

ChunkHash = NewType("ChunkHash", bytes)
"""32 bytes: a chunk's place in a token sequence, all that came before included."""
BoundaryId = NewType("BoundaryId", str)
"""64 hex digits, equal on every server that cuts and hashes alike."""
BindingId = NewType("BindingId", str)
"""64 hex digits, one per binding of one disk."""

HASH_ALGORITHM = "blake3-chain"
HASH_VERSION = 1
CHUNK_HASH_BYTES = 32

EXTENT_BYTES = (1 << 20) - 16
"""Bytes of an extent. With LMDB's 16-byte page header it takes 256 pages of 4096;
a full MiB would take 257. Source: LMDB 0.9.36, overflow pages."""

EXTENT_DIGEST_BYTES = 16

_LABEL = b"lmcache-persist chunk chain"


class ExtraKind(IntEnum):
    """What besides tokens decides a chunk's KV. Numbers are part of the format."""

    SALT = 1
    LORA = 2
    MULTIMODAL = 3


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """One item of a chunk's extra: its kind and its identity as bytes."""

    kind: ExtraKind
    value: bytes


def encode_extra(extra: Iterable[ExtraKey] | None) -> bytes:
    """The extra of a chunk as it is hashed; ``None`` and ``()`` are both empty."""
    return b"".join(
        struct.pack("<BI", int(item.kind), len(item.value)) + item.value for item in extra or ()
    )


def encode_tokens(tokens: Sequence[int]) -> bytes | None:
    """Token ids as little-endian u32, or None if one does not fit (then: not cached)."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError):
        return None
    if packed.itemsize != 4 or sys.byteorder != "little":
        try:
            return struct.pack(f"<{len(tokens)}I", *tokens)
        except struct.error:
            return None
    return packed.tobytes()


class ChunkHasher:
    """Hashes prompts chunk by chunk for one bound chunk size.

    Args:
        chunk_size: tokens, the bound one.
        namespace: empty for hashes that everybody agrees on. Otherwise random bytes: the
            root has them too, so no chunk has a hash in common with another namespace.

    Threads: immutable, any.
    """

    def __init__(self, chunk_size: int, namespace: bytes = b"") -> None:
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size <= 0:
            raise ValueError(f"chunk_size is {chunk_size!r}, expected a positive integer")
        self.chunk_size = chunk_size
        self.root = ChunkHash(
            blake3(_LABEL + struct.pack("<II", HASH_VERSION, chunk_size) + namespace).digest()
        )

    def step(self, parent: ChunkHash, token_bytes: bytes | memoryview, extra: bytes) -> ChunkHash:
        """The hash of the chunk after ``parent``; ``token_bytes`` is one whole chunk."""
        hasher = blake3(parent + struct.pack("<I", len(extra)) + extra)
        hasher.update(token_bytes)
        return ChunkHash(hasher.digest())

    def extend(
        self,
        hashes: list[ChunkHash],
        tokens: Sequence[int],
        extra_of_chunk: Sequence[bytes] | bytes = b"",
    ) -> bool:
        """Append to ``hashes`` the chunks of ``tokens`` that they do not cover yet.

        Args:
            hashes: the chain so far, of the same sequence.
            tokens: all tokens of the sequence; a last part of a chunk is left out.
            extra_of_chunk: encoded extra (:func:`encode_extra`), one for all chunks or
                one per chunk of the sequence.

        Returns:
            False if a token has no u32 form; nothing was appended then.
        """
        done, total = len(hashes), len(tokens) // self.chunk_size
        if done >= total:
            return True
        raw = encode_tokens(tokens[done * self.chunk_size : total * self.chunk_size])
        if raw is None:
            return False
        view, width = memoryview(raw), 4 * self.chunk_size
        parent = hashes[-1] if hashes else self.root
        for index in range(total - done):
            extra = (
                extra_of_chunk
                if isinstance(extra_of_chunk, bytes)
                else extra_of_chunk[done + index]
            )
            parent = self.step(parent, view[index * width : (index + 1) * width], extra)
            hashes.append(parent)
        return True


def boundary_id(chunk_size: int) -> BoundaryId:
    """Digest of how token sequences are cut and hashed: chunk size, algorithm, version."""
    text = f"boundary|{HASH_ALGORITHM}|{HASH_VERSION}|{chunk_size}"
    return BoundaryId(blake3(text.encode()).hexdigest())


def binding_id(
    boundary: BoundaryId, backend: str, store_uuid: str, format_version: int, bound_at: str
) -> BindingId:
    """Digest of a binding of this disk; ``bound_at`` makes every one new."""
    text = f"binding|{boundary}|{backend}|{store_uuid}|{format_version}|{bound_at}"
    return BindingId(blake3(text.encode()).hexdigest())


def extent_digest(extent: bytes | memoryview) -> bytes:
    """16 bytes: XXH3-128 of an extent, the digest that its chunk's record holds.

    Guards against accidents of disks and memory, not against forgery.
    """
    return xxhash.xxh3_128_digest(extent)


def extent_lengths(object_bytes: int) -> list[int]:
    """Bytes of each extent of an object of ``object_bytes``: all full but the last."""
    full, rest = divmod(object_bytes, EXTENT_BYTES)
    return [EXTENT_BYTES] * full + ([rest] if rest else [])
