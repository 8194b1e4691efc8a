"""Whether the files that a server has open are still those of its data dir.

A file that is removed, moved away or replaced under a living server takes what is written
to it along, and no write fails of it. So the paths are compared with the open files before
and after each group commit, and once a second. While they differ nothing counts as durable.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from lmcache_persist.datadir import DataDir
from lmcache_persist.errors import DataDirUnusable, StoreGone
from lmcache_persist.printable import plain
from lmcache_persist.store.data_file import DATA_NAME

log = logging.getLogger(__name__)


class OwnFiles:
    """The files of a data dir that must stay where they are.

    A descriptor of each is kept, by which nothing can be read: while it is open, no other
    file gets the same number, and closing it drops none of SQLite's locks.

    Args:
        root: the data dir.
        paths: of the files, all present.

    Attributes:
        gone: what is missing, for people; empty while all is in its place. Threads: any.
        removed: whether that was its last name, so that it cannot be moved back.
        on_change: called with ``gone`` each time that it becomes empty or ceases to be.

    Threads: ``look`` and ``require`` any; ``close`` one, when nobody looks any more.

    Raises:
        DataDirUnusable: one of them is not there.
    """

    def __init__(self, root: Path, paths: Sequence[Path]) -> None:
        self._root = root
        self._fds: dict[Path, int] = {}
        self._lock = threading.Lock()
        self.gone, self.removed = "", False
        self.on_change: Callable[[str], None] = lambda gone: None
        try:
            for path in paths:
                self._fds[path] = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            self.close()
            raise DataDirUnusable(
                f"{error.filename} cannot be looked at: {error.strerror}, expected this server's",
                hint="nobody else may change a data dir that a server starts on",
            ) from error

    @classmethod
    def of(cls, paths: DataDir) -> OwnFiles:
        """Those that a start needs to find again what is stored; all are open."""
        return cls(paths.root, (paths.store / DATA_NAME, paths.manifest, paths.lock))

    def look(self) -> bool:
        """Compare once; whether all is in its place. Logs when that changes.

        What cannot be looked at counts as present: that is no proof that it is gone.
        """
        with self._lock:
            for path, fd in self._fds.items():
                found = self._missing(path, fd)
                if found:
                    self.removed = os.fstat(fd).st_nlink == 0
                    break
            else:
                found = ""
            changed, self.gone = bool(found) != bool(self.gone), found
            if changed:
                self._say(found)
                self.on_change(found)
            return not found

    def require(self) -> None:
        """Look.

        Raises:
            StoreGone: something is not in its place.
        """
        if not self.look():
            raise self.error()

    def error(self) -> StoreGone:
        """The refusal while something is not in its place."""
        return StoreGone(
            f"{self.gone}: nothing that is stored is durable, expected the file that this server"
            " has open",
            hint=self._hint(),
        )

    def _missing(self, path: Path, fd: int) -> str:
        try:
            if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd)):
                return ""
        except (FileNotFoundError, NotADirectoryError):
            # The outermost one that is not there says most.
            folders = [folder for folder in path.parents if folder.is_relative_to(self._root)]
            first = next((one for one in reversed(folders) if not os.path.lexists(one)), path)
            return f"{plain(first)} is not there any more"
        except OSError:
            return ""
        return f"{plain(path)} is another file now"

    def _hint(self) -> str:
        if self.removed:
            return (
                "it was removed and cannot come back; to save what is stored, before the server"
                f" ends: lmcache-persist backup {plain(self._root)} DEST"
            )
        back = "move it back, a copy will not do, and the server goes on"
        lock = DataDir(self._root).lock
        if lock in self._fds and not self._missing(lock, self._fds[lock]):
            # By its lock file a verb finds the server.
            root = plain(self._root)
            back += f"; or save what is stored: lmcache-persist backup {root} DEST"
        return f"{back}; or restart it, empty"

    def _say(self, found: str) -> None:
        if found:
            log.error(
                "%s; from now on nothing is durable and stores are dropped, what is in the server"
                " is still served (%s)",
                found,
                self._hint(),
            )
        else:
            log.warning("all files of %s are back in their place; stores go on", self._root)

    def close(self) -> None:
        """Let go of the files; repeatable."""
        for fd in self._fds.values():
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds = {}
