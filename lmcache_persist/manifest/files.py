"""The manifest as files: moved aside, or removed, while nobody has it open."""

from __future__ import annotations

import glob
import itertools
import os
from pathlib import Path

from lmcache_persist.manifest.session import FILE_MODE, JOURNAL_SUFFIX, WAL_SUFFIX, mapped
from lmcache_persist.posix import sync_folder

UNREADABLE_SUFFIX = ".unreadable"
_SUFFIXES = ("", WAL_SUFFIX, "-shm", JOURNAL_SUFFIX)


def files_of(path: Path) -> list[Path]:
    """The files that the manifest at ``path`` consists of, as far as they are there."""
    candidates = [path.with_name(path.name + suffix) for suffix in _SUFFIXES]
    return [candidate for candidate in candidates if os.path.lexists(candidate)]


def set_aside_files(path: Path) -> list[Path]:
    """What :func:`set_aside` moved away, each time."""
    return sorted(path.parent.glob(f"{glob.escape(path.name)}{UNREADABLE_SUFFIX}*"))


def set_aside(path: Path) -> Path:
    """Move a manifest that cannot be read out of the way, with its side files.

    Nothing is overwritten: a second one gets a number. The database goes first, so that
    what a crash in between leaves is unreadable still.

    Durable: on return.

    Returns:
        Where the database, or what there is of it, is now.

    Raises:
        DataDirUnusable, ManifestError: as they say.
    """
    names = (f".{number}" if number > 1 else "" for number in itertools.count(1))
    targets = (path.with_name(path.name + UNREADABLE_SUFFIX + name) for name in names)
    target = next(target for target in targets if not files_of(target))
    with mapped(path):
        for file in files_of(path):
            os.rename(file, file.with_name(target.name + file.name.removeprefix(path.name)))
        sync_folder(path.parent)
    return target


def write_new(path: Path, data: bytes) -> None:
    """A manifest from what :func:`~.snapshot.serialized` gave, where there is none.

    Durable: on return.

    Raises:
        DataDirUnusable, ManifestError: as they say.
    """
    with mapped(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            os.fchmod(fd, FILE_MODE)
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_folder(path.parent)


def remove(path: Path) -> list[Path]:
    """Remove the manifest at ``path`` with its side files, and all that was set aside.

    Durable: on return.

    Returns:
        What was removed.

    Raises:
        DataDirUnusable, ManifestError: as they say.
    """
    found = [*files_of(path), *set_aside_files(path)]
    with mapped(path):
        for file in found:
            file.unlink(missing_ok=True)
        sync_folder(path.parent)
    return found
