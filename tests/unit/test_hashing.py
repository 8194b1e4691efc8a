"""The hash chain: recorded vectors, and what a hash depends on."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash
from blake3 import blake3

from lmcache_persist import hashing
from lmcache_persist.hashing import ChunkHash, ChunkHasher, ExtraKey, ExtraKind

DATA = Path(__file__).parent / "data"
VECTORS = json.loads((DATA / "hash_vectors.json").read_text())


def chain(chunk_size: int, tokens: list[int], extra: bytes | list[bytes] = b"") -> list[ChunkHash]:
    """The hashes of all complete chunks."""
    hashes: list[ChunkHash] = []
    assert ChunkHasher(chunk_size).extend(hashes, tokens, extra)
    return hashes


@pytest.mark.parametrize("hash_seed", [None, "0", "random"])
def test_vectors_in_a_process_of_their_own(hash_seed: str | None) -> None:
    """Another process computes the recorded vectors, whatever its hash seed."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    done = subprocess.run(
        [sys.executable, str(DATA / "make_hash_vectors.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == VECTORS


def test_vectors_are_of_this_version() -> None:
    """The recorded vectors are those of the version that bindings are made with."""
    assert VECTORS["hash_algorithm"] == hashing.HASH_ALGORITHM
    assert VECTORS["hash_version"] == hashing.HASH_VERSION


def test_no_extra_has_one_form() -> None:
    """None, an empty tuple and no extra at all are the same chunk; any other is another."""
    by_extra: dict[tuple[int, str], dict[str, list[str]]] = {}
    for entry in VECTORS["chains"]:
        key = (entry["chunk_size"], entry["tokens"])
        by_extra.setdefault(key, {})[entry["extra"]] = entry["hashes"]
    assert len(by_extra) == 15
    for variants in by_extra.values():
        assert variants["none"] == variants["empty"] == variants["absent"]
        assert len({tuple(hashes) for hashes in variants.values()}) == len(variants) - 2


def test_chain_is_the_documented_formula() -> None:
    """h[-1] and h[i] are the BLAKE3 of exactly the bytes that the design names."""
    tokens, extra = list(range(10)), hashing.encode_extra([ExtraKey(ExtraKind.SALT, b"s")])
    assert extra == bytes([1]) + struct.pack("<I", 1) + b"s"
    parent = blake3(b"lmcache-persist chunk chain" + struct.pack("<II", 1, 4)).digest()
    expected = []
    for start in (0, 4):
        body = (
            struct.pack("<I", len(extra)) + extra + struct.pack("<4I", *tokens[start : start + 4])
        )
        parent = blake3(parent + body).digest()
        expected.append(parent)
    assert chain(4, tokens, extra) == expected


def test_extending_in_steps_equals_one_go() -> None:
    """A sequence hashed piece by piece has the hashes of the whole; a rest waits."""
    tokens = list(range(1000))
    hasher, hashes = ChunkHasher(64), []
    for end in (10, 64, 65, 400, 1000, 1000):
        assert hasher.extend(hashes, tokens[:end])
        assert len(hashes) == end // 64
    assert hashes == chain(64, tokens)


def test_a_chunk_hash_covers_its_whole_past() -> None:
    """Changing one token changes its chunk and all later ones, and none before."""
    tokens = list(range(512))
    changed = tokens.copy()
    changed[200] += 1
    one, other = chain(64, tokens), chain(64, changed)
    assert one[:3] == other[:3]
    assert all(left != right for left, right in zip(one[3:], other[3:], strict=True))


def test_extra_of_one_chunk() -> None:
    """An extra per chunk counts from its chunk on."""
    tokens = list(range(256))
    one = chain(64, tokens)
    other = chain(
        64, tokens, [b"", b"", hashing.encode_extra([ExtraKey(ExtraKind.LORA, b"x")]), b""]
    )
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert one[3] != other[3]


def test_extra_items_do_not_run_together() -> None:
    """Where one item ends and the next begins is part of the encoding."""
    split = [ExtraKey(ExtraKind.SALT, b"ab"), ExtraKey(ExtraKind.SALT, b"c")]
    other = [ExtraKey(ExtraKind.SALT, b"a"), ExtraKey(ExtraKind.SALT, b"bc")]
    assert hashing.encode_extra(split) != hashing.encode_extra(other)


def test_same_tokens_other_chunk_size() -> None:
    """Two chunk sizes share no hash, also where their chunks have equal tokens."""
    assert not set(chain(64, [7] * 640)) & set(chain(128, [7] * 640))


@pytest.mark.parametrize("bad", [-1, 2**32, "7", 1.0, None])
def test_a_token_without_u32_form(bad: object) -> None:
    """Such a sequence is not cached: False, and nothing appended."""
    hashes: list[ChunkHash] = []
    tokens: list[object] = [*range(63), bad, *range(64)]
    assert ChunkHasher(64).extend(hashes, tokens) is False  # type: ignore[arg-type]
    assert hashes == []


@pytest.mark.parametrize("bad", [0, -1, 1.5, "64", True, None])
def test_bad_chunk_size(bad: object) -> None:
    """A hasher without a positive integer chunk size cannot be made."""
    with pytest.raises(ValueError, match="chunk_size is"):
        ChunkHasher(bad)  # type: ignore[arg-type]


def test_boundary_id_depends_on_chunk_size_only() -> None:
    """Two servers with one chunk size have one boundary id."""
    assert hashing.boundary_id(544) == hashing.boundary_id(544)
    assert hashing.boundary_id(544) != hashing.boundary_id(545)


def test_binding_id_depends_on_every_part() -> None:
    """Each of its parts makes another binding id."""
    parts = [hashing.boundary_id(544), "lmdb", "0" * 32, 1, "2026-01-01T00:00:00.000000Z"]
    others = [hashing.boundary_id(545), "files", "1" * 32, 2, "2026-01-01T00:00:00.000001Z"]
    ids = {hashing.binding_id(*parts)}  # type: ignore[arg-type]
    for index, other in enumerate(others):
        changed = [*parts[:index], other, *parts[index + 1 :]]
        ids.add(hashing.binding_id(*changed))  # type: ignore[arg-type]
    assert len(ids) == 6


def test_extent_digest_is_xxh3_128() -> None:
    """16 bytes of XXH3-128, for bytes and memoryviews alike."""
    data = bytes(range(256)) * 10
    assert hashing.extent_digest(data) == xxhash.xxh3_128(data).digest()
    assert hashing.extent_digest(memoryview(data)) == hashing.extent_digest(data)
    assert len(hashing.extent_digest(data)) == hashing.EXTENT_DIGEST_BYTES


@pytest.mark.parametrize("extra_bytes", [0, 1, hashing.EXTENT_BYTES - 1])
@pytest.mark.parametrize("full", [0, 1, 3])
def test_extent_lengths(full: int, extra_bytes: int) -> None:
    """Extents are full but the last and add up to the object."""
    size = full * hashing.EXTENT_BYTES + extra_bytes
    lengths = hashing.extent_lengths(size)
    assert sum(lengths) == size
    assert all(length == hashing.EXTENT_BYTES for length in lengths[:-1])
    assert all(0 < length <= hashing.EXTENT_BYTES for length in lengths)
