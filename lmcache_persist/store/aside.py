"""A damaged store that is kept beside the one in use, under its name and ``.damaged``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lmcache_persist.errors import StoreIOError
from lmcache_persist.store.data_file import DATA_NAME, sync_directory

DAMAGED_SUFFIX = ".damaged"


def aside_of(directory: Path) -> Path:
    """Where :func:`set_aside` keeps what was in ``directory``."""
    return directory.with_name(directory.name + DAMAGED_SUFFIX)


def has_set_aside(directory: Path) -> bool:
    """Whether a damaged store is kept beside ``directory``."""
    return aside_of(directory).exists()


def allocated_bytes(directory: Path) -> int:
    """What the disk has back once the data file in a store's folder is removed; 0 without one."""
    try:
        return (directory / DATA_NAME).stat().st_blocks * 512
    except OSError:
        return 0


def discard_set_aside(directory: Path) -> Path | None:
    """Remove what :func:`set_aside` kept beside ``directory``; None if there is nothing.

    Raises:
        StoreIOError: as said.
    """
    target = aside_of(directory)
    if not target.exists():
        return None
    try:
        shutil.rmtree(target)
    except OSError as error:
        raise StoreIOError(f"{target} cannot be removed: {error.strerror}") from error
    return target


def set_aside(directory: Path) -> Path:
    """Move a damaged store out of the way; the one set aside before it is deleted.

    Durable: the move, on return. Nobody may have the store open.

    Returns:
        Where it is now.

    Raises:
        StoreIOError: as said.
    """
    target = aside_of(directory)
    try:
        if target.exists():
            shutil.rmtree(target)
        os.rename(directory, target)
    except OSError as error:
        raise StoreIOError(f"{directory} cannot be set aside: {error.strerror}") from error
    sync_directory(directory.parent)
    return target
