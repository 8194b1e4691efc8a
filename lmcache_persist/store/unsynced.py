"""The note that commits may not have reached the disk, and which run of the kernel left it."""

from __future__ import annotations

import os
from pathlib import Path

from lmcache_persist.errors import StoreIOError
from lmcache_persist.store.data_file import FILE_MODE, sync_directory

UNSYNCED_NAME = "unsynced"
"""Present while commits may not have reached the disk; holds the kernel's boot id."""

_KERNEL_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def kernel_boot_id() -> str:
    """Which run of the kernel this is; page caches do not outlive one."""
    try:
        return _KERNEL_BOOT_ID.read_text().strip()
    except OSError as error:
        raise StoreIOError(f"{_KERNEL_BOOT_ID} cannot be read: {error.strerror}") from error


def mark_unsynced(directory: Path) -> None:
    """Note that commits from now on may be lost, and the file broken, by a power loss.

    Durable: the note, on return.
    """
    path = directory / UNSYNCED_NAME
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        try:
            os.fchmod(fd, FILE_MODE)
            os.write(fd, kernel_boot_id().encode())
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise StoreIOError(f"{path} cannot be written: {error.strerror}") from error
    sync_directory(directory)


def clear_unsynced(directory: Path) -> None:
    """Take the note back; everything is on the disk."""
    try:
        (directory / UNSYNCED_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise StoreIOError(f"{directory / UNSYNCED_NAME}: {error.strerror}") from error
    sync_directory(directory)


def lost_power_unsynced(directory: Path) -> bool:
    """Whether the kernel was started anew while commits may not have reached the disk."""
    try:
        noted = (directory / UNSYNCED_NAME).read_text().strip()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreIOError(f"{directory / UNSYNCED_NAME}: {error.strerror}") from error
    return noted != kernel_boot_id()
