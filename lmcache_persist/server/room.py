"""The room that a verb needs, said before it starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lmcache_persist.store import preallocation
from lmcache_persist.units import exact_size

Say = Callable[[str], None]
"""Told a line for the operator."""

MANIFEST_BYTES = 1 << 20
"""Room for changes of a manifest."""


def say_and_check_room(
    say: Say,
    folder: Path,
    needed: int,
    more: str = "",
    *,
    what: str = preallocation.STORE,
    way_out: str = preallocation.LESS_CAPACITY,
) -> None:
    """Say what is needed and what there is; refuse if that is too little.

    Args:
        say: told.
        folder: on the file system in question.
        needed: bytes of files.
        more: the end of the sentence.
        what: the room is for, as a refusal says.
        way_out: the hint of a refusal.

    Raises:
        DiskTooSmall: both numbers are named.
    """
    stats = os.statvfs(folder)
    available = stats.f_bavail * stats.f_frsize
    say(
        f"this needs {exact_size(needed)} more in {folder}, which has {exact_size(available)}"
        f" available{more}"
    )
    preallocation.check_room(folder, needed, what=what, way_out=way_out)


def say_and_check_manifest_room(say: Say, folder: Path) -> None:
    """As :func:`say_and_check_room`, for a verb that changes no more than the manifest.

    Raises:
        DiskTooSmall: both numbers are named.
    """
    say_and_check_room(say, folder, MANIFEST_BYTES, what="the manifest", way_out="free space")
