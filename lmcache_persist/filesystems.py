"""Which file system a path lies on, and whether a data dir may."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmcache_persist.errors import DataDirUnusable

NETWORK_FILE_SYSTEMS = frozenset(
    {
        "9p",
        "acfs",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "fuse",
        "fuseblk",
        "gfs2",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "pvfs2",
        "smb2",
        "smb3",
        "smbfs",
        "virtiofs",
    }
)
"""Types on which mmap, flock or fsync do not give what LMDB and SQLite need; also ``fuse.*``."""

_IN_MEMORY = frozenset({"hugetlbfs", "ramfs", "tmpfs"})


@dataclass(frozen=True, slots=True)
class FileSystem:
    """The mounted file system under a path.

    Attributes:
        type: the kernel's name, e.g. ``ext4`` or ``fuse.sshfs``.
        mount_point: where it is mounted.
        read_only: whether by mount option.
    """

    type: str
    mount_point: str
    read_only: bool

    @property
    def is_network(self) -> bool:
        """Whether it is a network or user-space file system."""
        return self.type in NETWORK_FILE_SYSTEMS or self.type.startswith("fuse.")


def file_system_of(path: Path) -> FileSystem | None:
    """The file system of a path, or of its nearest ancestor that exists; None if unknown.

    Source: proc(5), ``/proc/self/mountinfo``.
    """
    real = path.resolve()
    # os.path: what may not be looked at is not there, and its parent tells.
    while not os.path.exists(real) and real != real.parent:
        real = real.parent
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    best: FileSystem | None = None
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, types = left.split(), right.split()
        if len(fields) < 6 or not types:
            continue
        mount_point = _unescape(fields[4])
        options = {*fields[5].split(","), *(types[2].split(",") if len(types) > 2 else ())}
        inside = real.is_relative_to(mount_point)
        # Of equally long mount points the last one listed lies on top.
        if inside and (best is None or len(mount_point) >= len(best.mount_point)):
            best = FileSystem(types[0], mount_point, "ro" in options)
    return best


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def check_file_system(
    path: Path,
    *,
    allow_network_fs: bool,
    probe: Callable[[Path], FileSystem | None] | None = None,
) -> str | None:
    """Refuse a data dir on a network file system unless that is allowed.

    Args:
        path: the data dir; it need not exist.
        allow_network_fs: warn instead.
        probe: what tells the file system, :func:`file_system_of` by default.

    Returns:
        A warning for the operator, or None.

    Raises:
        DataDirUnusable: names the type and the flag.
    """
    found = (probe or file_system_of)(path)
    if found is None:
        return f"the file system of {path} cannot be told; a network file system is not safe"
    if not found.is_network:
        return None
    fact = f"data dir {path} lies on {found.mount_point}, a file system of type {found.type}"
    if allow_network_fs:
        return f"{fact}: locks and durability are not assured there"
    raise DataDirUnusable(
        f"{fact}, expected a local one: LMDB and SQLite lose data on it",
        hint="choose a local --data-dir; --allow-network-fs goes ahead at your own risk",
        file_system=found.type,
    )


def pool_warning(
    folder: Path, *, probe: Callable[[Path], FileSystem | None] | None = None
) -> str | None:
    """A warning for the operator if the pool's folder is not in memory, or None.

    It works on a disk, so nothing else would say that a mount was forgotten.

    Args:
        folder: that of ``--pool-dir``.
        probe: what tells the file system, :func:`file_system_of` by default.
    """
    found = (probe or file_system_of)(folder)
    if found is None or found.type in _IN_MEMORY:
        return None
    return (
        f"pool dir {folder} lies on {found.mount_point}, a file system of type {found.type} and"
        " not in memory: the kernel writes the pool out to it, which slows stores and loads down"
    )
