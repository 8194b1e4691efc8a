"""The data file's names and rights in a store's folder."""

from __future__ import annotations

from pathlib import Path

from lmcache_persist.errors import StoreIOError
from lmcache_persist.posix import sync_folder

DATA_NAME = "data.mdb"
LOCK_NAME = "lock.mdb"

DIR_MODE = 0o700
FILE_MODE = 0o600


def sync_directory(directory: Path) -> None:
    """Make names in a folder durable.

    Raises:
        StoreIOError: as said.
    """
    try:
        sync_folder(directory)
    except OSError as error:
        raise StoreIOError(f"folder {directory} cannot be synced: {error.strerror}") from error


def exists(directory: Path) -> bool:
    """Whether a store's folder holds a data file.

    Raises:
        StoreIOError: it cannot be told.
    """
    try:
        (directory / DATA_NAME).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StoreIOError(f"{directory / DATA_NAME}: {error.strerror}") from error
    return True
