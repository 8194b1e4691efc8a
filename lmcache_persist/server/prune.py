"""``prune``: take chunks away that an operator names. Here on the files of a data dir.

On a live server :mod:`.live_prune` does the same, message by message.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcache_persist.datadir import DataDir, DataDirLock, ReaderLock
from lmcache_persist.errors import ConfigError
from lmcache_persist.identity import Fingerprint
from lmcache_persist.server import backup_file, crashes, recovery
from lmcache_persist.server.offline import refuse_if_resetting, used_data_dir
from lmcache_persist.server.recovery import Found, StoreState
from lmcache_persist.store.lmdb_disk import LmdbDisk
from lmcache_persist.store.offline import OfflineStore
from lmcache_persist.store.selection import Picked, Selection

_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


def fingerprints_of(
    models: Sequence[Mapping[str, Any]], name: str | None, fingerprint: str | None
) -> frozenset[Fingerprint] | None:
    """The fingerprints that a name and the beginning of a fingerprint mean; None for all.

    Args:
        models: as the document of ``inspect`` lists them.
        name: of a model; all of its fingerprints.
        fingerprint: so many hex digits that they mean one model; all 64 are taken as they
            are, for a model that the manifest has forgotten.

    Raises:
        ConfigError: nothing, or more than one fingerprint, is meant by it.
    """
    meant: set[str] | None = None
    if name is not None:
        meant = {str(row["fingerprint"]) for row in models if row["name"] == name}
        if not meant:
            raise _unknown_name(name, models)
    if fingerprint is not None:
        one = _fingerprint(fingerprint, models)
        if meant is not None and one not in meant:
            raise ConfigError(f"model {name!r} has no fingerprint {one[:12]}")
        meant = {one}
    return None if meant is None else frozenset(map(Fingerprint, meant))


def _unknown_name(name: str, models: Sequence[Mapping[str, Any]]) -> ConfigError:
    known = sorted({str(row["name"]) for row in models})
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f"the nearest is {near[0]!r}" if near else "no model was served from this data dir"
    return ConfigError(f"model {name!r} is unknown to this data dir", hint=hint)


def _fingerprint(text: str, models: Sequence[Mapping[str, Any]]) -> str:
    text = text.strip().lower()
    if _DIGEST.fullmatch(text):
        return text
    found = {str(row["fingerprint"]) for row in models if str(row["fingerprint"]).startswith(text)}
    if len(found) == 1 and text:
        return found.pop()
    what = "no model" if not found else f"{len(found)} models"
    raise ConfigError(
        f"fingerprint {text!r} is the beginning of {what}, expected of one",
        hint="inspect --models --json lists them in full",
    )


def preview(data_dir: Path, selection: Selection) -> Iterator[Picked]:
    """What :func:`prune` would remove, step by step. Changes nothing.

    Raises:
        DataDirLocked: a server holds the data dir: ask that one.
        PersistError: the data dir cannot be read.
    """
    paths = used_data_dir(data_dir)
    with ReaderLock.acquire(data_dir):
        found = _look(paths)
        if found.store is StoreState.ABSENT:
            return
        with OfflineStore.open(paths.store) as store:
            counted_bytes, cursor = 0, b""
            while True:
                picked = store.preview(selection, cursor, counted_bytes)
                counted_bytes += picked.bytes
                yield picked
                if picked.cursor is None:
                    return
                cursor = picked.cursor


def prune(
    data_dir: Path, selection: Selection, *, on_begin: Callable[[], None] = lambda: None
) -> Iterator[Picked]:
    """Remove chunks, step by step; each is durable when it is yielded.

    To be exhausted or closed; closed early, the store is whole and the rest is there.

    Args:
        data_dir: of a server that does not run.
        selection: what goes.
        on_begin: called once all checks have passed, before anything is changed.

    Threads: one, with no other in the process.

    Raises:
        ValueError: nothing limits the selection.
        DataDirLocked: a server holds the data dir: ask that one.
        StartupRefused, StoreDamaged: a start would not take the data dir as it is.
        PersistError: the disk failed.
    """
    if selection.is_everything:
        raise ValueError("a selection that means everything: that is what reset is for")
    paths = used_data_dir(data_dir)
    with DataDirLock.acquire(paths.root):
        backup_file.refuse_to_change(paths.root)
        found = _look(paths)
        if found.store is StoreState.ABSENT:
            return
        on_begin()
        with contextlib.closing(LmdbDisk.open(paths.store, found.capacity_bytes)) as disk:
            cursor = b""
            while True:
                picked = disk.prune(selection, cursor)
                yield picked
                if picked.cursor is None:
                    return
                cursor = picked.cursor


def _look(paths: DataDir) -> Found:
    refuse_if_resetting(paths)
    found = recovery.look(paths, deep=crashes.crashed_last_time(paths))
    recovery.check_together(found, paths.root)
    recovery.refuse_if_damaged(found, paths)
    return found
