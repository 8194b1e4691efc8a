"""Which file system a path lies on."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_persist.store import filesystem

MOUNTS = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /tank rw - zfs tank rw
31 30 0:27 / /tank/with\040space rw - tmpfs tmpfs rw
32 22 0:28 / /over rw - btrfs /dev/b rw
33 32 0:29 / /over rw - xfs /dev/x rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/somewhere/else", "ext4"),
        ("/tank/store", "zfs"),
        ("/tankard", "ext4"),
        ("/tank/with space/store", "tmpfs"),
        ("/over/store", "xfs"),
    ],
)
def test_innermost_mount_counts(path: str, kind: str) -> None:
    """The longest mount point above a path decides, the last of equal ones."""
    assert filesystem.filesystem_type(Path(path), MOUNTS) == kind


def test_own_file_system_has_a_type(tmp_path: Path) -> None:
    """The real table is understood."""
    assert filesystem.filesystem_type(tmp_path) is not None


@pytest.mark.parametrize(
    ("kind", "keeps"),
    [("ext4", True), ("xfs", True), ("btrfs", False), ("nfs4", False), ("fuse.sshfs", False)],
)
def test_copy_on_write_promises_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, keeps: bool
) -> None:
    """Where overwriting needs new blocks, preallocation is no promise."""
    monkeypatch.setattr(filesystem, "filesystem_type", lambda _: kind)
    assert filesystem.keeps_preallocated_space(tmp_path) is keeps
