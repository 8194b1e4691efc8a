"""The crash log: how one server learns that the one before it died of a signal.

LMDB trusts its own tree pages and aborts, or faults, on broken ones. ``faulthandler``
writes such a death to ``crash.log``. A log that is not empty makes the next start walk the
store's pages before it maps them; the third such death in ten minutes condemns the store
even if its pages look well, so that there is never a crash loop.

A server that lives and finds its store's structure broken writes that into the log, too:
its successor then compares everything but the digests before it maps the store.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import time
from pathlib import Path
from typing import TextIO

from lmcache_persist.datadir import DataDir

WINDOW_S = 600.0
"""Seconds within which crashes add up."""
LIMIT = 3
"""Crashes within the window that condemn the store."""
_DAMAGED = "store damaged: "


def _older(paths: DataDir) -> list[Path]:
    return [paths.crash_log.with_suffix(f".{age}.log") for age in range(1, LIMIT)]


def logs(paths: DataDir) -> list[Path]:
    """All crash logs that there may be."""
    return [paths.crash_log, *_older(paths)]


def _died_at(path: Path) -> float | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime if found.st_size else None


def crashed_last_time(paths: DataDir) -> bool:
    """Whether the last server died of a signal that faulthandler saw."""
    return _died_at(paths.crash_log) is not None


def keeps_crashing(paths: DataDir) -> bool:
    """Whether there were :data:`LIMIT` such deaths within the window."""
    # Wall clock: the deaths of other processes have no common monotonic one.
    since = time.time() - WINDOW_S
    deaths = [_died_at(path) for path in logs(paths)]
    return sum(at is not None and at >= since for at in deaths) >= LIMIT


def found_damage(paths: DataDir) -> bool:
    """Whether the last server found the store's structure broken while it ran."""
    try:
        return _DAMAGED in paths.crash_log.read_text("utf-8", "replace")
    except FileNotFoundError:
        return False


def note_damage(file: TextIO, text: str) -> None:
    """Tell the next start that the store is to be compared with itself; once is enough.

    Args:
        file: from :func:`watch`.
        text: what was found.

    Threads: any.
    """
    if os.fstat(file.fileno()).st_size == 0:
        file.write(f"{_DAMAGED}{text}\n")
        file.flush()


def watch(paths: DataDir, *, anew: bool = False) -> TextIO:
    """Start this server's crash log; the last ones are kept under ``crash.N.log``.

    Args:
        paths: the data dir's.
        anew: forget the deaths so far: they were those of a store that is set aside.

    Returns:
        The open log, for :func:`unwatch`.
    """
    if crashed_last_time(paths):
        for newer, older in reversed(list(itertools.pairwise(logs(paths)))):
            if newer.exists():
                os.replace(newer, older)
    if anew:
        for path in _older(paths):
            path.unlink(missing_ok=True)
    file = open(paths.crash_log, "w", encoding="utf-8")  # noqa: SIM115 - lives with the server
    os.fchmod(file.fileno(), 0o600)
    faulthandler.enable(file=file, all_threads=True)
    return file


def unwatch(file: TextIO) -> None:
    """The inverse of :func:`watch`."""
    faulthandler.disable()
    file.close()
