"""Reading a manifest without touching it.

SQLite's own ``mode=ro`` creates side files and fails on a read-only mount, and
``immutable=1`` misses what is only in the -wal. So the files are copied to a private
folder and the copy is opened, recovered, checked and read.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sqlalchemy import text

from lmcache_persist.binding import Binding
from lmcache_persist.errors import (
    DataDirUnusable,
    ManifestBusy,
    ManifestError,
    ManifestUnreadable,
)
from lmcache_persist.manifest import catalog, registry
from lmcache_persist.manifest.binding import read_binding
from lmcache_persist.manifest.catalog import BootRow, ModelRow, RejectionRow
from lmcache_persist.manifest.models import SCHEMA_VERSION
from lmcache_persist.manifest.schema import schema_version, upgrade
from lmcache_persist.manifest.session import (
    JOURNAL_SUFFIX,
    WAL_SUFFIX,
    Database,
    unreadable,
)

SETTLE_TIMEOUT_S = 5.0
"""How long to try for a copy that nobody changed meanwhile."""

_HEADER = b"SQLite format 3\0"
_RETRY_S = 0.005
_COPY_BUSY_TIMEOUT_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ManifestSnapshot:
    """A manifest at one moment.

    Attributes:
        schema_version: of the files, before any migration; 0 for an empty database.
        binding: None if unbound.
        models: the first seen first.
        rejections: the latest last.
        boots: the latest last.
    """

    schema_version: int
    binding: Binding | None
    models: list[ModelRow]
    rejections: list[RejectionRow]
    boots: list[BootRow]


def read_snapshot(path: Path) -> ManifestSnapshot:
    """Read the manifest at ``path`` from a private copy.

    Nothing beside ``path`` is created or changed, no lock is taken, and a writer neither
    waits nor notices. Needs some room in the folder for temporary files.

    Threads: any; never while this process itself has the manifest open.

    Raises:
        FileNotFoundError: there is no manifest.
        DataDirUnusable: we have no right to read it.
        ManifestUnreadable: there is one, and it cannot be read or makes no sense.
        SchemaTooNew: a newer version wrote it.
        ManifestBusy: it was written to without a pause.
        RuntimeError: this process has it open.
    """
    return _with_copy(path, _read_database)


def serialized(path: Path) -> bytes:
    """The manifest at ``path`` as a file without side files holds it; else as read_snapshot."""

    def read(database: Database, path: Path) -> bytes:
        _read_database(database, path)  # a copy of what cannot be read is no use
        return database.serialize()

    return _with_copy(path, read)


def _with_copy(path: Path, read: Callable[[Database, Path], T]) -> T:
    path = Path(path)
    with registry.not_open(path):
        files = _settled(path)
    try:
        with tempfile.TemporaryDirectory(prefix="lmcache-persist-") as folder:
            copy = Path(folder) / "manifest"
            for suffix, data in files.items():
                copy.with_name(copy.name + suffix).write_bytes(data)
            return _read_copy(copy, path, read)
    except OSError as error:
        raise ManifestUnreadable(
            f"manifest {path} cannot be copied for reading: {error}",
            hint="set TMPDIR to a writable folder with some room",
        ) from error


def peek(path: Path) -> ManifestSnapshot | None:
    """As :func:`read_snapshot`, and None if there is no manifest: for checks before a start."""
    try:
        return read_snapshot(path)
    except FileNotFoundError:
        return None


def _settled(path: Path) -> dict[str, bytes]:
    """The bytes of the database and its side files, by suffix, all of one moment.

    Two equal readings in a row are one moment: a page that a checkpoint has not brought
    into the file yet is still in the -wal, which is read after the file, and a -wal is
    started anew only when all of it is in the file, which the second reading would show.
    """
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    before = _read_files(path)
    while True:
        after = _read_files(path)
        if after == before:
            break
        if time.monotonic() >= deadline:
            raise ManifestBusy(f"manifest {path} changed all through {SETTLE_TIMEOUT_S} s")
        before = after
        time.sleep(_RETRY_S)
    if not after.get("") and after.get(WAL_SUFFIX):
        # SQLite would throw the -wal away, and with it perhaps the only copy of a binding.
        raise unreadable(
            path, f"{path.name}{WAL_SUFFIX} has content and {path.name} is empty or not there"
        )
    if "" not in after:
        raise FileNotFoundError(f"there is no manifest {path}")
    _check_shape(after, path)
    return after


def _check_shape(files: dict[str, bytes], path: Path) -> None:
    """Refuse what SQLite would pass over: a file cut inside its header or inside a page.

    It takes the one for an empty database and reads zeros for the rest of the other.
    """
    data = files[""]
    if not data or files.get(JOURNAL_SUFFIX):
        return  # a first page that was being made; SQLite takes it back by the journal
    if not data.startswith(_HEADER):
        raise unreadable(path, "it does not begin as an SQLite database does")
    page_bytes = int.from_bytes(data[16:18], "big")
    page_bytes = 65536 if page_bytes == 1 else page_bytes  # the format's way to say so
    if not files.get(WAL_SUFFIX) and (not page_bytes or len(data) % page_bytes):
        raise unreadable(path, f"it has {len(data)} bytes, no multiple of its page size")


def _read_files(path: Path) -> dict[str, bytes]:
    found = {}
    for suffix in ("", WAL_SUFFIX, JOURNAL_SUFFIX):
        try:
            found[suffix] = path.with_name(path.name + suffix).read_bytes()
        except FileNotFoundError:
            continue
        except PermissionError as error:
            raise DataDirUnusable(
                f"manifest {path}{suffix} cannot be read: {error.strerror}",
                hint="look as the user that runs the server",
            ) from error
        except OSError as error:
            raise unreadable(path, f"{path.name}{suffix}: {error.strerror}") from error
    return found


def _read_copy(copy: Path, path: Path, read: Callable[[Database, Path], T]) -> T:
    database = Database(copy, _COPY_BUSY_TIMEOUT_S, subject=path)
    try:
        return read(database, path)
    except (ManifestError, DataDirUnusable, ValueError) as error:
        # The copy is ours alone: what fails on it is what it holds.
        raise unreadable(path, str(error)) from error
    finally:
        database.close()


def _read_database(database: Database, path: Path) -> ManifestSnapshot:
    with database.read() as session:
        connection = session.connection()
        found = connection.execute(text("PRAGMA integrity_check(1)")).scalar_one()
        if found != "ok":
            raise unreadable(path, str(found))
        version = schema_version(connection, path)
    if version == 0:
        return ManifestSnapshot(0, None, [], [], [])
    if version < SCHEMA_VERSION:
        upgrade(database)
    with database.read() as session:
        return ManifestSnapshot(
            schema_version=version,
            binding=read_binding(session, path),
            models=catalog.models(session),
            rejections=catalog.rejections(session),
            boots=catalog.boots(session),
        )
