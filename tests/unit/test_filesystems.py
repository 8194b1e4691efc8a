"""Network file systems are refused unless a flag allows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_persist.errors import DataDirUnusable
from lmcache_persist.filesystems import (
    FileSystem,
    check_file_system,
    file_system_of,
    pool_warning,
)

REMOTE = ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "fuse", "fuseblk", "9p", "ceph", "virtiofs"]
LOCAL = ["ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs"]


@pytest.mark.parametrize("kind", REMOTE)
def test_a_network_file_system_is_refused_with_type_and_flag(kind: str) -> None:
    """The refusal names the type, the mount and the flag that goes ahead."""
    with pytest.raises(DataDirUnusable) as caught:
        check_file_system(
            Path("/mnt/x/kv"),
            allow_network_fs=False,
            probe=lambda _: FileSystem(kind, "/mnt/x", False),
        )
    assert kind in caught.value.message
    assert "/mnt/x" in caught.value.message
    assert "--allow-network-fs" in str(caught.value.hint)


@pytest.mark.parametrize("kind", REMOTE)
def test_an_allowed_network_file_system_warns(kind: str) -> None:
    """With the flag it goes ahead, and the operator reads what is not assured."""
    warning = check_file_system(
        Path("/kv"), allow_network_fs=True, probe=lambda _: FileSystem(kind, "/", False)
    )
    assert warning is not None
    assert kind in warning


@pytest.mark.parametrize("kind", LOCAL)
def test_a_local_file_system_is_fine(kind: str) -> None:
    """Nothing is said about a local file system."""
    probe = lambda _: FileSystem(kind, "/", False)  # noqa: E731
    assert check_file_system(Path("/kv"), allow_network_fs=False, probe=probe) is None


def test_an_unknown_file_system_warns() -> None:
    """Not to know is said, not taken for good."""
    assert check_file_system(Path("/kv"), allow_network_fs=False, probe=lambda _: None)


@pytest.mark.parametrize("kind", ["ext4", "overlay", "nfs4"])
def test_a_pool_that_is_not_in_memory_warns(kind: str) -> None:
    """A forgotten mount is said: everything else works on a disk, too."""
    warning = pool_warning(Path("/run/kv"), probe=lambda _: FileSystem(kind, "/", False))
    assert warning is not None
    assert kind in warning and "/run/kv" in warning


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "hugetlbfs"])
def test_a_pool_in_memory_is_fine(kind: str) -> None:
    """Nothing is said about a file system in memory, nor about one that cannot be told."""
    assert pool_warning(Path("/p"), probe=lambda _: FileSystem(kind, "/p", False)) is None
    assert pool_warning(Path("/p"), probe=lambda _: None) is None


def test_the_longest_mount_point_decides_and_the_last_of_equals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nested and stacked mounts are told apart, also with a space in the name."""
    table = tmp_path / "mountinfo"
    folder = tmp_path / "a b" / "kv"
    folder.mkdir(parents=True)
    escaped = str(tmp_path / "a b").replace(" ", "\\040")
    table.write_text(
        "1 1 8:1 / / rw - ext4 /dev/a rw\n"
        f"2 1 8:2 / {escaped} rw - nfs4 host:/x rw\n"
        f"3 1 8:3 / {escaped} ro shared:1 - fuse.sshfs host rw\n"
        "broken line\n"
        f"4 1 8:4 / {escaped}c rw - tmpfs none rw\n"
    )
    original = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda self, *args: original(table if str(self) == "/proc/self/mountinfo" else self, *args),
    )
    found = file_system_of(folder / "not" / "there")
    assert found == FileSystem("fuse.sshfs", str(tmp_path / "a b"), True)
    assert file_system_of(tmp_path) == FileSystem("ext4", "/", False)


def test_the_real_table_can_be_read(tmp_path: Path) -> None:
    """On this machine the file system of a folder is told."""
    found = file_system_of(tmp_path)
    assert found is not None
    assert found.type
