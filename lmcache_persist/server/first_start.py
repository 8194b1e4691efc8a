"""What a start made that is refused in the end: taken back, under the data dir's lock.

What was there before stays, whatever it is. A data dir that no server had before is left
as it was, or not there; in an old one that lacks a store, none is left. A first start that
is killed in between leaves an empty, unbound data dir, which the next one takes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lmcache_persist.datadir import DataDir
from lmcache_persist.errors import PersistError
from lmcache_persist.manifest import files

log = logging.getLogger(__name__)


@dataclass(slots=True)
class FirstStart:
    """What a start finds before it makes anything.

    Attributes:
        paths: the data dir's.
        missing: folders that are not there, the outermost last.
        mode: the data dir's, None if it is not there.
        has_lock: whether it had a server before, or a start that was refused its lock.
    """

    paths: DataDir
    missing: tuple[Path, ...]
    mode: int | None
    has_lock: bool
    _served: bool = field(default=False, init=False)

    @classmethod
    def of(cls, root: Path) -> FirstStart:
        """Look at a data dir that may not exist. Changes nothing, never fails."""
        missing = []
        for folder in (root, *root.parents):
            if os.path.lexists(folder):
                break
            missing.append(folder)
        try:
            mode = stat.S_IMODE(os.stat(root).st_mode)
        except OSError:
            mode = None
        paths = DataDir(root)
        return cls(paths, tuple(missing), mode, os.path.lexists(paths.lock))

    def served(self) -> None:
        """From here on what is there stays: clients may know of it."""
        self._served = True

    @contextlib.contextmanager
    def undone_if_refused(self) -> Iterator[None]:
        """Around a start that holds the data dir's lock."""
        before = self._own()
        try:
            yield
        except PersistError:
            if not self._served:
                self._undo(before)
            raise

    def _own(self) -> list[Path]:
        """What a start makes, as far as it is there."""
        paths = self.paths
        names = [paths.crash_log, paths.ballast, paths.resetting, paths.store]
        return [*filter(os.path.lexists, names), *files.files_of(paths.manifest)]

    def _undo(self, before: list[Path]) -> None:
        """Remove what is ours; what somebody else put beside it stays, and so its folder."""
        if any(path in before for path in files.files_of(self.paths.manifest)):
            # What SQLite puts beside a manifest is part of it.
            before = [*before, *files.files_of(self.paths.manifest)]
        try:
            for path in self._own():
                if path in before:
                    continue
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            if not self.has_lock:
                # Whoever waits for it looks whether the file is still the same.
                self.paths.lock.unlink(missing_ok=True)
            if self.mode is not None:
                os.chmod(self.paths.root, self.mode)
            for folder in self.missing:
                os.rmdir(folder)
        except OSError as error:
            log.debug("the refused start leaves something in %s: %s", self.paths.root, error)
