"""The weights digest."""

import json
import os
import struct
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import pytest

from lmcache_persist.connector.vllm import weights
from lmcache_persist.connector.vllm.weights import digest_folder, snapshot_commit
from lmcache_persist.errors import IdentityUnknown
from support.weights import write_sparse_folder

TENSORS = {"b.weight": 100_000, "a.weight": 64, "c.empty": 0, "d.large": 9 << 20}


def write_weights(path: Path, fill: bytes = b"\0", tensors: dict[str, int] = TENSORS) -> dict:
    """A safetensors file; returns where each tensor's bytes begin in it."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + fill * at)
    return {name: 8 + len(text) + header[name]["data_offsets"][0] for name in tensors}


def poke(path: Path, offset: int) -> None:
    """Change one byte in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ 0xFF]))


def test_equal_bytes_have_equal_digests(tmp_path: Path) -> None:
    """Neither the folder's path nor times of files count."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_weights(tmp_path / name / "model.safetensors")
    os.utime(tmp_path / "two" / "model.safetensors", (1, 1))
    assert digest_folder(tmp_path / "one") == digest_folder(tmp_path / "two")


@pytest.mark.parametrize("name", ["a.weight", "b.weight", "d.large"])
@pytest.mark.parametrize("where", ["head", "middle", "tail"])
def test_change_in_place_is_noticed_in_every_tensor(tmp_path: Path, name: str, where: str) -> None:
    """Same names, sizes and headers, one byte of a sample changed: another digest."""
    path = tmp_path / "model.safetensors"
    begin = write_weights(path)[name]
    size = TENSORS[name]
    before = digest_folder(tmp_path)
    # The large tensor has five samples, its middle one is in the middle too.
    poke(path, begin + {"head": 0, "middle": size // 2, "tail": size - 1}[where])
    assert digest_folder(tmp_path) != before


def test_new_weights_in_place_are_noticed(tmp_path: Path) -> None:
    """Other values everywhere under the same header: another digest."""
    path = tmp_path / "model.safetensors"
    write_weights(path)
    before = digest_folder(tmp_path)
    write_weights(path, fill=b"\1")
    assert digest_folder(tmp_path) != before


def test_renamed_file_is_noticed(tmp_path: Path) -> None:
    """A file's name counts: shards that swap names are other weights."""
    path = tmp_path / "model-1.safetensors"
    write_weights(path)
    before = digest_folder(tmp_path)
    path.rename(tmp_path / "model-2.safetensors")
    assert digest_folder(tmp_path) != before


def test_header_is_noticed(tmp_path: Path) -> None:
    """A tensor under another name is another tensor, whatever its bytes."""
    path = tmp_path / "model.safetensors"
    write_weights(path, tensors={"x.weight": 64})
    before = digest_folder(tmp_path)
    write_weights(path, tensors={"y.weight": 64})
    assert digest_folder(tmp_path) != before


def test_further_file_is_noticed(tmp_path: Path) -> None:
    """Weights beside the weights count."""
    write_weights(tmp_path / "model.safetensors")
    before = digest_folder(tmp_path)
    write_weights(tmp_path / "more.safetensors")
    assert digest_folder(tmp_path) != before


def test_every_tensor_has_three_samples_or_is_read_whole() -> None:
    """The head, the tail and one between, for any size."""
    for size in (1, 255, 256, 257, 600, 1 << 20, 5 << 20, 1 << 30):
        offsets = weights._sample_offsets(size)
        if size <= weights.SAMPLE_BYTES:
            assert offsets == [0]
            continue
        assert len(offsets) >= weights.SAMPLES_PER_TENSOR
        assert offsets[0] == 0
        assert offsets[-1] + weights.SAMPLE_BYTES == size


@pytest.mark.parametrize(("tensors_per_file", "most_reads"), [(35, 5_000), (1000, 45_000)])
def test_cost_of_a_100_gb_folder_is_in_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors_per_file: int, most_reads: int
) -> None:
    """100 GiB in 20 (sparse) files, dense or of many experts: 0.02 % of it is read, at most."""
    reads: list[int] = []
    preadv = os.preadv

    def counting(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        reads.append(sum(len(one) for one in buffers))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    write_sparse_folder(tmp_path, 20, tensors_per_file, 100 << 30)
    digest_folder(tmp_path)
    # A tensor's tail and the next one's head are one read.
    assert 2 * 20 * tensors_per_file < len(reads) < most_reads
    assert sum(reads) < 20 << 20


@pytest.mark.parametrize(
    ("sizes", "ranges"),
    [
        ([1000, 1000], [(0, 256), (372, 628), (744, 1256), (1372, 1628), (1744, 2000)]),
        ([100, 100, 100], [(0, 300)]),
        ([0], []),
        ([256, 2000], [(0, 512), (1128, 1384), (2000, 2256)]),
    ],
)
def test_neighbours_are_read_in_one_go(sizes: list[int], ranges: list[tuple[int, int]]) -> None:
    """Whatever the order of the header, each sample is in exactly one range."""
    ends = list(accumulate(sizes))
    extents = [(end - size, end) for size, end in zip(sizes, ends, strict=True) if size]
    assert list(weights._ranges(weights._samples(reversed(extents), 0))) == ranges


def test_range_is_bounded() -> None:
    """A million small tensors side by side are not one buffer."""
    extents = [(at * 200, at * 200 + 200) for at in range(10_000)]
    ranges = list(weights._ranges(weights._samples(extents, 0)))
    assert max(end - begin for begin, end in ranges) <= weights.MAX_RANGE_BYTES
    assert sum(end - begin for begin, end in ranges) == 2_000_000
    assert len(ranges) < 40


def test_folders_in_the_folder_count(tmp_path: Path) -> None:
    """Some models keep a part of their weights one level down; hidden folders are not theirs."""
    write_weights(tmp_path / "model.safetensors")
    before = digest_folder(tmp_path)
    for name in (".cache", "encoder"):
        (tmp_path / name).mkdir()
    write_weights(tmp_path / ".cache" / "model.safetensors")
    assert digest_folder(tmp_path) == before
    write_weights(tmp_path / "encoder" / "model.safetensors")
    assert digest_folder(tmp_path) != before


def test_small_files_are_digested_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte counts; a file that is no small one, or no file, is said."""
    path = tmp_path / "config.json"
    path.write_bytes(b"a" * 1000)
    before = weights.digest_whole(path)
    poke(path, 500)
    assert weights.digest_whole(path) != before
    monkeypatch.setattr(weights, "MAX_SMALL_FILE_BYTES", 999)
    with pytest.raises(IdentityUnknown, match="1000 bytes"):
        weights.digest_whole(path)
    with pytest.raises(IdentityUnknown, match=r"absent\.json"):
        weights.digest_whole(tmp_path / "absent.json")


@pytest.mark.parametrize("damage", ["no header", "cut", "offsets", "no json"])
def test_broken_file_has_no_identity(tmp_path: Path, damage: str) -> None:
    """What cannot be read is not identified, and says which file it is."""
    path = tmp_path / "model.safetensors"
    write_weights(path)
    data = path.read_bytes()
    path.write_bytes(
        {
            "no header": data[:4],
            "cut": data[:-1],
            "offsets": data.replace(b'"data_offsets": [0, 100000]', b'"data_offsets": [9, 1     ]'),
            "no json": data[:8] + b"[" + data[9:],
        }[damage]
    )
    with pytest.raises(IdentityUnknown, match=r"model\.safetensors"):
        digest_folder(tmp_path)


def test_folder_without_safetensors_has_no_identity(tmp_path: Path) -> None:
    """Other formats are not guessed at."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(IdentityUnknown, match="no safetensors"):
        digest_folder(tmp_path)


def test_hub_snapshot_is_its_commit() -> None:
    """Only a snapshot folder's name is a commit."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert snapshot_commit(Path("/c/models--o--m/snapshots") / commit) == commit
    assert snapshot_commit(Path("/c/models--o--m/blobs") / commit) is None
    assert snapshot_commit(Path("/c/models--o--m/snapshots/main")) is None
