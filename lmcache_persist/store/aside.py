"""A damaged store that is kept beside the one in use, under its name and ``.damaged``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lmcache_persist.errors import StoreIOError
from lmcache_persist.store.data_file import DATA_NAME, LOCK_NAME, sync_directory
from lmcache_persist.store.lmdb_open import NEW_NAME
from lmcache_persist.store.unsynced import UNSYNCED_NAME

DAMAGED_SUFFIX = ".damaged"
_OURS = (DATA_NAME, LOCK_NAME, UNSYNCED_NAME)
"""Files of a store; what else is in a folder that an operator linked is not ours to remove."""


def aside_of(directory: Path) -> Path:
    """Where :func:`set_aside` keeps what was in ``directory``."""
    return directory.with_name(directory.name + DAMAGED_SUFFIX)


def has_set_aside(directory: Path) -> bool:
    """Whether a damaged store is kept beside ``directory``."""
    return os.path.lexists(aside_of(directory))


def allocated_bytes(directory: Path) -> int:
    """What the data dir's disk has back once a store's data file is removed; 0 without one."""
    try:
        found, here = (directory / DATA_NAME).stat(), directory.parent.stat()
    except OSError:
        return 0
    return found.st_blocks * 512 if found.st_dev == here.st_dev else 0


def discard_set_aside(directory: Path) -> Path | None:
    """Remove what :func:`set_aside` kept beside ``directory``; None if there is nothing.

    Raises:
        StoreIOError: as said.
    """
    target = aside_of(directory)
    if not os.path.lexists(target):
        return None
    try:
        remove_folder(target)
    except OSError as error:
        raise StoreIOError(f"{target} cannot be removed: {error.strerror}") from error
    return target


def remove_folder(folder: Path) -> None:
    """Remove a store's folder; of a link to one the store in there, nothing else, and the link.

    Raises:
        OSError: as said.
    """
    if not folder.is_symlink():
        shutil.rmtree(folder)
        return
    if folder.exists():
        for name in _OURS:
            (folder / name).unlink(missing_ok=True)
        if (folder / NEW_NAME).is_dir():
            shutil.rmtree(folder / NEW_NAME)
    folder.unlink()


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
        if os.path.lexists(target):
            remove_folder(target)
        os.rename(directory, target)
    except OSError as error:
        raise StoreIOError(
            f"{directory} cannot be set aside as {target}: {error.strerror}",
            hint=f"move both out of the way, or remove what is in {directory} by hand",
        ) from error
    sync_directory(directory.parent)
    return target
