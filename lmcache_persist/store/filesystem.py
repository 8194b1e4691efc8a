"""Which file systems keep the promise that preallocated blocks are there when written."""

from __future__ import annotations

import re
from pathlib import Path

COPY_ON_WRITE = frozenset({"btrfs", "zfs", "bcachefs", "nilfs2", "f2fs"})
"""Overwriting takes new blocks, so a full disk shows as a SIGBUS in spite of preallocation."""

_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")


def filesystem_type(path: Path, mounts: str | None = None) -> str | None:
    """The type of the file system that ``path`` lies on, such as ``ext4``; None if unknown.

    Args:
        path: may be absent; then its nearest parent counts.
        mounts: text in the form of ``/proc/self/mountinfo``, or None for that file's.
    """
    if mounts is None:
        try:
            mounts = _MOUNTS.read_text()
        except OSError:
            return None
    target = path.resolve()
    best, found = -1, None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        mount = Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        # A later mount over the same point hides the earlier one.
        if target.is_relative_to(mount) and len(mount.parts) >= best:
            best, found = len(mount.parts), after.split()[0]
    return found


def keeps_preallocated_space(path: Path) -> bool:
    """Whether writing to preallocated blocks cannot run out of space."""
    kind = filesystem_type(path)
    return kind is not None and kind not in COPY_ON_WRITE and not kind.startswith(("nfs", "fuse"))
