"""``backup.json``: what makes a folder a backup. Written last, so that half a one has none."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from lmcache_persist.datadir import DataDir
from lmcache_persist.errors import DataDirUnusable, FormatTooNew
from lmcache_persist.identity import canonical_json
from lmcache_persist.posix import sync_folder
from lmcache_persist.printable import command
from lmcache_persist.store.data_file import DATA_NAME

NAME = "backup.json"
A_BACKUP = "give a folder that lmcache-persist backup made"
"""A hint."""
FORMAT = 1
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a backup says of itself.

    Attributes:
        made_at: UTC, ISO 8601.
        version: of lmcache-persist that made it.
        binding_id: of the data dir that it is of.
        chunk_size: tokens.
        store_uuid: of its store.
        capacity_bytes: of the store that it is of; the backup's own is as small as can be.
        chunks: in the backup.
        objects: likewise.
        bytes: of all objects.
        left_out_chunks: of the store, that are bad, or were evicted before their turn.
        manifest_digest: BLAKE3 of ``manifest.sqlite``.
        data_file_bytes: length of the store's data file.
    """

    made_at: str
    version: str
    binding_id: str
    chunk_size: int
    store_uuid: str
    capacity_bytes: int
    chunks: int
    objects: int
    bytes: int
    left_out_chunks: int
    manifest_digest: str
    data_file_bytes: int


def _digest(document: dict[str, Any]) -> str:
    return blake3(canonical_json(document).encode()).hexdigest()


def is_backup(folder: Path) -> bool:
    """Whether a folder says that it is one, whole or not."""
    return os.path.lexists(folder / NAME)


def refuse_to_change(folder: Path) -> None:
    """For whoever changes a data dir: a backup stays as it was made.

    Raises:
        DataDirUnusable: the folder is a backup.
    """
    if is_backup(folder):
        raise DataDirUnusable(
            f"{folder} is a backup, expected a server's data dir",
            hint=f"make a data dir of it with: {command('restore', folder, 'DIR')}",
        )


def rebuild_hint(folder: Path) -> str:
    """The way out where a backup's manifest is lost and its store is not."""
    again = command("restore", folder, "DIR")
    return f"a restore rebuilds the manifest from the store's stamp: {again}"


def expect_backup(folder: Path) -> None:
    """Refuse what is no backup, before its lock is asked for: it may be a server's data dir.

    Raises:
        DataDirUnusable: it is none.
    """
    _read(folder)


def write(folder: Path, descriptor: Descriptor) -> None:
    """Make the folder a backup.

    Durable: on return.

    Raises:
        OSError: as the system says.
    """
    document = {"format": FORMAT, **asdict(descriptor)}
    text = json.dumps({**document, "digest": _digest(document)}, indent=2) + "\n"
    fd = os.open(folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def read(folder: Path) -> Descriptor:
    """What a backup says of itself, after a look at its store's file.

    Raises:
        DataDirUnusable: it is no backup, not a whole one, or not as it was made.
        FormatTooNew: a newer version made it.
    """
    document = _read(folder)
    if document.get("format", 0) > FORMAT:
        raise FormatTooNew(
            f"backup {folder} has format {document['format']}, expected at most {FORMAT}",
            hint="restore it with the version of lmcache-persist that made it",
        )
    digest = document.pop("digest", None)
    if digest != _digest(document):
        raise unusable(folder, f"{NAME} was altered")
    document.pop("format")
    descriptor = Descriptor(**document)
    _check_files(folder, descriptor)
    return descriptor


def _read(folder: Path) -> dict[str, Any]:
    try:
        with (folder / NAME).open("rb") as file:
            document = json.loads(file.read(_MOST_BYTES))
    except FileNotFoundError:
        raise unusable(
            folder, f"it has no {NAME}, so it is none, or was interrupted while it was made"
        ) from None
    except OSError as error:
        raise unusable(folder, f"{NAME} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("format"), int):
        raise unusable(folder, f"{NAME} was altered")
    return document


def manifest_problem(folder: Path, descriptor: Descriptor) -> str:
    """Why the manifest of a backup is not the one that it was made with; empty if it is."""
    path = DataDir(folder).manifest
    try:
        found = blake3(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"its manifest cannot be read: {error.strerror}"
    if found == descriptor.manifest_digest and not path.with_name(f"{path.name}-wal").exists():
        return ""
    return "its manifest is not the one that it was made with"


def _check_files(folder: Path, descriptor: Descriptor) -> None:
    path = DataDir(folder).store / DATA_NAME
    try:
        length = path.stat().st_size
    except OSError as error:
        raise unusable(folder, f"{path} cannot be read: {error.strerror}") from error
    if length != descriptor.data_file_bytes:
        raise unusable(
            folder,
            f"its data file has {length} bytes, expected {descriptor.data_file_bytes}",
        )


def unusable(folder: Path, why: str) -> DataDirUnusable:
    """The refusal of what a restore cannot take."""
    return DataDirUnusable(
        f"{folder} is no backup that can be restored: {why}",
        hint=f"{A_BACKUP}, as it made it",
    )
