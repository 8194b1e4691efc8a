"""Who may read manifest and store besides the server's user.

Members of ``--group`` use the pool and may ask for a backup, so the files tell them nothing
that the server would not; with nobody there they may look for themselves.
"""

from __future__ import annotations

import os

from lmcache_persist.datadir import DataDir, Modes
from lmcache_persist.manifest.files import files_of
from lmcache_persist.store.data_file import DATA_NAME
from lmcache_persist.store.unsynced import UNSYNCED_NAME


def settle(paths: DataDir, modes: Modes) -> None:
    """Give what ``inspect`` and ``verify`` read its modes, the narrower ones too.

    Manifest and store are open: the -wal that a crash would leave is there, and gets its
    group now.

    Raises:
        DataDirUnusable: a file is somebody else's, or the group not one of ours.
    """
    files = (*files_of(paths.manifest), paths.store / DATA_NAME, paths.store / UNSYNCED_NAME)
    for path in files:
        if os.path.lexists(path):
            modes.apply(path, modes.file)
    modes.apply(paths.store, modes.directory)
