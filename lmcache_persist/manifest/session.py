"""Engine, transactions and errors of the manifest: everything SQLite wants to be told.

Durable: a transaction that returned is on disk (WAL with ``synchronous=FULL``).

The driver never begins a transaction by itself (``isolation_level=None``); the ``begin``
event does, with ``BEGIN IMMEDIATE`` for writers. Otherwise a compare-and-set would read
before it holds the lock, and a failed migration would leave its tables behind.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from lmcache_persist.errors import (
    DataDirUnusable,
    ManifestBusy,
    ManifestError,
    ManifestUnreadable,
    PersistError,
)
from lmcache_persist.posix import lock_holders
from lmcache_persist.printable import command

FILE_MODE = 0o600
WAL_SUFFIX = "-wal"
JOURNAL_SUFFIX = "-journal"

_RETRY_S = 0.01
_BEGIN = "manifest_begin"
_POOL_SIZE = 4


def map_sqlite_error(error: sqlite3.Error, path: Path) -> PersistError:
    """The error of ours for one of SQLite's, by its result code and never by its text."""
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        side = [path, path.with_name(path.name + "-shm"), path.with_name(path.name + WAL_SUFFIX)]
        who = " and ".join(lock_holders(side)[:3]) or "another process"
        return ManifestBusy(
            f"manifest {path} is locked by {who}",
            hint="wait for that process to finish, or end it, and try again",
        )
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return unreadable(path, str(error))
    if primary in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY):
        return DataDirUnusable(
            f"manifest {path} cannot be opened for writing: {error}",
            hint="the file and its folder must be writable for this user",
        )
    if primary == sqlite3.SQLITE_FULL:
        return ManifestError(
            f"manifest {path} cannot grow: {error}", hint="make room on its file system"
        )
    return ManifestError(f"manifest {path} failed: {error}")


def unreadable(path: Path, found: str) -> ManifestUnreadable:
    """The refusal for a manifest that is there and makes no sense."""
    return ManifestUnreadable(
        f"manifest {path} cannot be read: {found}",
        hint="restore the file from a copy, or rebuild it from the stamp that the store keeps"
        f" with: {command('recover', path.parent)}",
        path=str(path),
    )


@contextmanager
def mapped(path: Path) -> Iterator[None]:
    """Everything foreign that the body raises, as an error of ours.

    Raises:
        ManifestBusy: another process held the lock for longer than the time-out.
        ManifestUnreadable: the file is damaged or no database.
        DataDirUnusable: the file cannot be opened for writing.
        ManifestError: anything else of SQLite, SQLAlchemy or the operating system.
    """
    try:
        yield
    except DBAPIError as error:
        if isinstance(error.orig, sqlite3.Error):
            raise map_sqlite_error(error.orig, path) from error
        raise ManifestError(f"manifest {path} failed: {error}") from error
    except sqlite3.Error as error:
        raise map_sqlite_error(error, path) from error
    except SQLAlchemyError as error:
        raise ManifestError(f"manifest {path} failed: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS):
            raise DataDirUnusable(
                f"manifest {path} cannot be made or opened: {error.strerror}",
                hint="its folder must exist and be writable for this user",
            ) from error
        raise ManifestError(f"manifest {path} failed: {error}") from error


def make_engine(path: Path, busy_timeout_s: float) -> Engine:
    """An engine for the database at ``path``; opens nothing yet.

    Threads: any; each transaction takes a connection of its own.
    """
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        connect_args={"timeout": busy_timeout_s, "check_same_thread": False},
        pool_size=_POOL_SIZE,
        max_overflow=-1,
    )
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", _on_begin)
    return engine


def _on_connect(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA synchronous = FULL").close()


def _on_begin(connection: Connection) -> None:
    verb = connection.get_execution_options().get(_BEGIN, "BEGIN IMMEDIATE")
    connection.exec_driver_sql(verb)


class Database:
    """One SQLite file with transactions whose errors are ours.

    Args:
        path: the file.
        busy_timeout_s: seconds to wait for another process's lock.
        subject: the file that errors speak of, if ``path`` is a copy of it.

    Threads: any.
    """

    def __init__(self, path: Path, busy_timeout_s: float, *, subject: Path | None = None) -> None:
        self.path = path
        self.subject = subject or path
        self._closed = False
        self.busy_timeout_s = busy_timeout_s
        self._writer = make_engine(path, busy_timeout_s)
        self._reader = self._writer.execution_options(**{_BEGIN: "BEGIN"})

    @contextmanager
    def _usable(self) -> Iterator[None]:
        if self._closed:
            # The pool would open the file anew, without a word.
            raise RuntimeError(f"manifest {self.subject} is closed")
        with mapped(self.subject):
            yield

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that holds the write lock from its start; commits at the end.

        Durable: on return.

        Raises:
            ManifestError: and what :func:`mapped` lists; nothing was changed then.
        """
        with self._usable(), Session(self._writer) as session, session.begin():
            session.connection()
            yield session

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A transaction that sees one state of the database and blocks nobody."""
        with self._usable(), Session(self._reader) as session, session.begin():
            yield session

    def use_wal(self) -> None:
        """Put the file into WAL mode, for good; waits for others who do the same.

        SQLite does not call its busy handler for this change, so the wait is ours.

        Raises:
            ManifestBusy: somebody was in the way until the time-out.
        """
        deadline = time.monotonic() + self.busy_timeout_s
        while True:
            try:
                with self._usable():
                    found = self._pragma("journal_mode = WAL")
            except ManifestBusy:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_RETRY_S)
                continue
            if found != "wal":
                raise DataDirUnusable(
                    f"manifest {self.subject} has journal mode {found}, expected wal",
                    hint="its file system has to support shared memory maps",
                )
            return

    def checkpoint(self) -> None:
        """Bring the -wal into the file and empty it, as far as others let us.

        What was committed is durable before and after.
        """
        with self._usable():
            self._pragma("wal_checkpoint(TRUNCATE)")

    def serialize(self) -> bytes:
        """The whole database, as of one moment, in the form of its file without a -wal."""
        with self._usable():
            connection = self._writer.raw_connection()
            try:
                source = connection.driver_connection
                if not isinstance(source, sqlite3.Connection):
                    raise TypeError(f"driver connection is a {type(source).__name__}")
                with closing(sqlite3.connect(":memory:")) as memory:
                    source.backup(memory)
                    return memory.serialize()
            finally:
                connection.close()

    def _pragma(self, text: str) -> object:
        # Outside of any transaction, which neither of these pragmas may be in.
        connection = self._writer.raw_connection()
        try:
            with closing(connection.cursor()) as cursor:
                cursor.execute(f"PRAGMA {text}")
                row = cursor.fetchone()
        finally:
            connection.close()
        return None if row is None else row[0]

    def close(self) -> None:
        """Close all connections; the last one brings the -wal into the file."""
        self._closed = True
        self._writer.dispose()


def create_file(path: Path) -> bool:
    """Make an empty file of mode 0600, whatever the umask; False if there is one.

    SQLite gives its side files the mode of the file itself. The file is made without
    opening it: closing a descriptor of it would drop the locks that SQLite holds on it
    elsewhere in this process.
    """
    try:
        os.mknod(path, stat.S_IFREG | FILE_MODE)
    except FileExistsError:
        return False
    os.chmod(path, FILE_MODE)
    return True
