"""A start on a data dir that no server had before: refused, it leaves nothing.

What a refusal must not touch is there before the start; what the start itself made until
then is taken back here, under the data dir's lock. A start that is killed in between
leaves an empty, unbound data dir, which the next one takes.
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
        new = not self.has_lock and not any(map(os.path.lexists, self._own()))
        try:
            yield
        except PersistError:
            if new and not self._served:
                self._undo()
            raise

    def _own(self) -> list[Path]:
        paths = self.paths
        names = [paths.crash_log, paths.ballast, paths.resetting, paths.store]
        return [*names, *files.files_of(paths.manifest)]

    def _undo(self) -> None:
        """Remove what is ours; what somebody else put beside it stays, and so its folder."""
        try:
            for path in self._own():
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            # Whoever waits for it looks whether the file is still the same.
            self.paths.lock.unlink(missing_ok=True)
            if self.mode is not None:
                os.chmod(self.paths.root, self.mode)
            for folder in self.missing:
                os.rmdir(folder)
        except OSError as error:
            log.debug("the refused start leaves something in %s: %s", self.paths.root, error)
