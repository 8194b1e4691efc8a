"""The n-th I/O call fails: of the operating system, of LMDB, of SQLite.

A :class:`Faults` counts the calls that concern one folder and makes one of them fail. A
scenario is run with n = 1, 2, 3, ... until a run meets no fault any more.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

BY_PATH = ("open", "mkdir", "mknod", "rename", "replace", "unlink", "rmdir", "chmod", "statvfs")
BY_FD = (
    "fsync",
    "posix_fallocate",
    "preadv",
    "pread",
    "write",
    "pwrite",
    "ftruncate",
    "fchmod",
    "fstatvfs",
)


class Faults:
    """Counts calls and makes the n-th fail, once.

    Args:
        folder: only calls on files below it count.
        nth: from 1; 0 for none.
        code: the errno.
        after: let the call happen, then report it as failed.
    """

    def __init__(
        self, folder: Path, nth: int, code: int = errno.EIO, *, after: bool = False
    ) -> None:
        self.folder = str(folder)
        self.nth = nth
        self.code = code
        self.after = after
        self.calls: list[str] = []
        self.active = True

    @property
    def fired(self) -> str:
        """The call that failed; empty if none did."""
        return self.calls[self.nth - 1] if 0 < self.nth <= len(self.calls) else ""

    def call(self, name: str, action: Callable[[], Any], make: Callable[[], Exception]) -> Any:
        """Do ``action``, unless it is its turn to fail."""
        if not self.active:
            return action()
        self.calls.append(name)
        if len(self.calls) != self.nth:
            return action()
        if self.after:
            done = action()
            if name == "os.open":
                os.close(done)
            elif name == "open":
                done.close()
        raise make()

    def os_error(self) -> OSError:
        """What the operating system would raise."""
        return OSError(self.code, os.strerror(self.code))

    def concerns(self, target: object) -> bool:
        """Whether a path or descriptor is below the folder."""
        try:
            path = (
                os.readlink(f"/proc/self/fd/{target}")
                if isinstance(target, int)
                else os.path.abspath(os.fspath(target))  # type: ignore[call-overload]
            )
        except (OSError, TypeError):
            return False
        return str(path).startswith(self.folder)


def break_os(monkeypatch: pytest.MonkeyPatch, faults: Faults) -> None:
    """Let ``faults`` see the system calls that Python code makes."""
    for name in (*BY_PATH, *BY_FD):
        real = getattr(os, name)

        def wrapped(*args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> Any:
            if not args or not faults.concerns(args[0]):
                return _real(*args, **kwargs)
            return faults.call(f"os.{_name}", lambda: _real(*args, **kwargs), faults.os_error)

        monkeypatch.setattr(os, name, wrapped)
    real_open = io.open

    def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int) or not faults.concerns(file):
            return real_open(file, *args, **kwargs)
        return faults.call("open", lambda: real_open(file, *args, **kwargs), faults.os_error)

    monkeypatch.setattr(io, "open", opened)
    monkeypatch.setattr(builtins, "open", opened)


class _Txn:
    """An LMDB transaction whose writes and commit may fail."""

    def __init__(self, txn: Any, faults: Faults, *, write: bool) -> None:
        self._txn = txn
        self._faults = faults
        self._write = write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)

    def put(self, *args: Any, **kwargs: Any) -> Any:
        return self._faults.call("mdb_put", lambda: self._txn.put(*args, **kwargs), _lmdb_error)

    def delete(self, *args: Any, **kwargs: Any) -> Any:
        return self._faults.call("mdb_del", lambda: self._txn.delete(*args, **kwargs), _lmdb_error)

    def __enter__(self) -> _Txn:
        self._txn.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        if kind is not None or not self._write:
            return self._txn.__exit__(kind, error, trace)
        try:
            return self._faults.call(
                "mdb_txn_commit", lambda: self._txn.__exit__(None, None, None), _lmdb_error
            )
        except lmdb.DiskError:
            if not self._faults.after:
                self._txn.abort()
            raise


def _lmdb_error() -> lmdb.Error:
    return lmdb.DiskError("mdb_something: Input/output error")


class _Env:
    """An LMDB environment whose transactions may fail."""

    def __init__(self, env: Any, faults: Faults) -> None:
        self._env = env
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def begin(self, *args: Any, **kwargs: Any) -> _Txn:
        real = self._faults.call(
            "mdb_txn_begin", lambda: self._env.begin(*args, **kwargs), _lmdb_error
        )
        return _Txn(real, self._faults, write=bool(kwargs.get("write")))

    def sync(self, *args: Any) -> Any:
        return self._faults.call("mdb_env_sync", lambda: self._env.sync(*args), _lmdb_error)


def break_lmdb(monkeypatch: pytest.MonkeyPatch, faults: Faults) -> list[Any]:
    """Let ``faults`` see LMDB's calls; returns the environments that were opened."""
    opened: list[Any] = []
    real = lmdb.open

    def open_(*args: Any, **kwargs: Any) -> Any:
        made: list[Any] = []
        try:
            faults.call("mdb_env_open", lambda: made.append(real(*args, **kwargs)), _lmdb_error)
        except lmdb.Error:
            # An open that failed leaves nothing open; waiting for the collector would.
            for env in made:
                env.close()
            raise
        opened.extend(made)
        return _Env(made[0], faults)

    monkeypatch.setattr(lmdb, "open", open_)
    return opened


def break_sqlite(monkeypatch: pytest.MonkeyPatch, faults: Faults, code: int) -> None:
    """Let ``faults`` see SQLite's statements and commits; ``code`` is SQLite's result code."""

    def error() -> sqlite3.Error:
        made = sqlite3.OperationalError("disk I/O error")
        made.sqlite_errorcode = code
        return made

    class Cursor(sqlite3.Cursor):
        def execute(self, sql: str, *args: Any) -> Any:
            def action() -> Any:
                done = super(Cursor, self).execute(sql, *args)
                if faults.active and faults.after and faults.nth == len(faults.calls):
                    self.fetchall()  # SQLite leaves no statement open that it reports as failed
                return done

            return faults.call(f"execute {sql.strip()[:30]}", action, error)

    class Connection(sqlite3.Connection):
        def cursor(self, factory: Any = Cursor) -> Any:
            return super().cursor(factory)

        def execute(self, sql: str, *args: Any) -> Any:
            return self.cursor().execute(sql, *args)

        def commit(self) -> None:
            faults.call("commit", super().commit, error)

    real = sqlite3.dbapi2.connect

    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        if faults.concerns(database):
            kwargs["factory"] = Connection
        return real(database, *args, **kwargs)

    monkeypatch.setattr(sqlite3.dbapi2, "connect", connect)
    monkeypatch.setattr(sqlite3, "connect", connect)
