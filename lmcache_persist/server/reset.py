"""``reset``: throw away manifest and store of a data dir. Offline.

Order of writes: pool of a dead server -> the mark that decides, made durable -> manifest
-> store -> the mark is removed. With the mark there, all that lies beside it counts as
removed: the next start, or reset, goes on with it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from lmcache_persist import failpoints
from lmcache_persist.datadir import DataDir, DataDirLock
from lmcache_persist.errors import DataDirUnusable, PersistError
from lmcache_persist.manifest import files, read_snapshot
from lmcache_persist.posix import sync_folder
from lmcache_persist.server import crashes
from lmcache_persist.server.losses import amount_of, losses_of, objects_amount, per_model
from lmcache_persist.server.offline import Confirm, existing_data_dir
from lmcache_persist.shm import PoolPaths
from lmcache_persist.store import data_file
from lmcache_persist.store.aside import aside_of, remove_folder
from lmcache_persist.store.offline import OfflineStore, looks_damaged, verify_pages
from lmcache_persist.store.pool import remove_dead_pool
from lmcache_persist.units import counted, moment


def reset(
    data_dir: Path,
    confirm: Confirm,
    *,
    pool_dir: Path,
) -> list[str]:
    """Throw away everything that a data dir holds, readable or not. Repeatable.

    The lock file stays: whoever opened it before and locks it after would hold a file that
    nobody else can see, beside a server that made a new one.

    Args:
        data_dir: of a server that does not run.
        confirm: called with what will be gone, before anything is changed; not if there is
            nothing.
        pool_dir: where a killed server may have left its pool.

    Returns:
        What was thrown away, in words; empty if there was nothing.

    Durable: on return. Threads: one.

    Raises:
        DataDirLocked: a server holds the data dir.
        DataDirUnusable: it is no data dir, or cannot be changed.
    """
    paths = existing_data_dir(data_dir)
    if not _is_data_dir(paths):
        raise DataDirUnusable(
            f"data dir {data_dir} has neither manifest nor store, expected a server's data dir",
            hint="nothing was removed",
        )
    with DataDirLock.acquire(paths.root):
        contents, details, uuids = _contents(paths)
        if not contents and not is_pending(paths):
            return []
        lines = zip(contents, details, strict=True)
        if contents:
            confirm([line for what, more in lines for line in (f"this throws away {what}", *more)])
        else:
            contents.append("the mark of a reset or restore that was interrupted")
        for uuid in sorted(uuids):
            pool = PoolPaths.of(pool_dir, uuid)
            if remove_dead_pool(pool):
                contents.append(f"the pool {pool.pool} that a killed server left")
        failpoints.hit("reset.before_mark")
        mark(paths)
        finish(paths)
    return contents


def is_pending(paths: DataDir) -> bool:
    """Whether a reset was decided and is not finished."""
    return os.path.lexists(paths.resetting)


def finish(paths: DataDir) -> None:
    """Remove what a marked data dir holds, then the mark. Repeatable.

    Durable: on return. The caller holds the data dir's lock.

    Raises:
        DataDirUnusable: something cannot be removed; the mark stays.
        PersistError: as it says; likewise.
    """
    failpoints.hit("reset.after_mark")
    files.remove(paths.manifest)
    failpoints.hit("reset.after_manifest")
    try:
        for folder in _store_folders(paths):
            remove_folder(folder)
        for file in _leftovers(paths):
            file.unlink(missing_ok=True)
        sync_folder(paths.root)
    except OSError as error:
        raise _cannot(paths, error) from error
    failpoints.hit("reset.after_store")
    unmark(paths)


def unmark(paths: DataDir) -> None:
    """What lies in the data dir counts from now on.

    Durable: on return.

    Raises:
        DataDirUnusable: as said.
    """
    try:
        paths.resetting.unlink(missing_ok=True)
        sync_folder(paths.root)
    except OSError as error:
        raise _cannot(paths, error) from error


def mark(paths: DataDir) -> None:
    """From now on all that lies in the data dir counts as removed.

    Durable: on return. The caller holds the data dir's lock.

    Raises:
        DataDirUnusable: as said.
    """
    try:
        os.close(os.open(paths.resetting, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        sync_folder(paths.root)
    except OSError as error:
        raise _cannot(paths, error) from error


def _cannot(paths: DataDir, error: OSError) -> DataDirUnusable:
    return DataDirUnusable(
        f"data dir {paths.root} cannot be reset: {error.strerror or error}",
        hint="mend that, then reset it again",
    )


def _store_folders(paths: DataDir) -> list[Path]:
    aside = aside_of(paths.store)
    return [folder for folder in (paths.store, aside) if folder.is_dir()]


def _leftovers(paths: DataDir) -> list[Path]:
    """Files of servers beside manifest and store, but for the lock."""
    ours = (*crashes.logs(paths), paths.ballast, paths.socket)
    return [path for path in ours if os.path.lexists(path)]


def _named(path: Path, paths: DataDir) -> str:
    """A file for people: a crash log that is empty tells of no crash."""
    empty = path in crashes.logs(paths) and not os.lstat(path).st_size
    return f"{path.name} (empty)" if empty else path.name


def _is_data_dir(paths: DataDir) -> bool:
    return (
        is_pending(paths)
        or bool(files.files_of(paths.manifest))
        or data_file.exists(paths.store)
        or paths.lock.exists()
    )


def _contents(paths: DataDir) -> tuple[list[str], list[list[str]], set[str]]:
    """What is there, for people, more of each, and the uuids of stores that are spoken of."""
    lines: list[str] = []
    details: list[list[str]] = []
    uuids = set[str]()
    names: dict[str, str] = {}
    if files.files_of(paths.manifest):
        text, uuid, names = _manifest(paths)
        lines.append(text)
        details.append([])
        uuids.add(uuid)
    for folder in _store_folders(paths):
        text, more, uuid = _store(folder, names)
        lines.append(text)
        details.append(more)
        uuids.add(uuid)
    left = (*files.set_aside_files(paths.manifest), *_leftovers(paths))
    leftovers = [_named(path, paths) for path in left]
    if leftovers:
        lines.append(f"what was left beside them: {', '.join(leftovers)}")
        details.append([])
    return lines, details, uuids - {""}


def _manifest(paths: DataDir) -> tuple[str, str, dict[str, str]]:
    try:
        found = read_snapshot(paths.manifest)
    except FileNotFoundError:
        return "side files of a manifest that is absent", "", {}
    except PersistError as error:
        return f"the manifest, which is not readable: {error.message}", "", {}
    if found.binding is None:
        return "the manifest, which is unbound", "", {}
    text = (
        f"the manifest: bound to chunk size {found.binding.chunk_size} since"
        f" {moment(found.binding.bound_at)}, {counted(len(found.models), 'model')}"
    )
    return text, found.binding.store_uuid, {row.fingerprint: row.name for row in found.models}


def _store(folder: Path, names: dict[str, str]) -> tuple[str, list[str], str]:
    with contextlib.suppress(PersistError, FileNotFoundError):
        if not (looks_damaged(folder) or verify_pages(folder)):
            with OfflineStore.open(folder) as store:
                usage = store.usage()
                losses = losses_of(usage)
                text = f"{folder}: {amount_of(losses)}"
                if usage.stale_objects:
                    text += f", and {objects_amount(usage.stale_objects, usage.stale_bytes)} stale"
                return text, per_model(losses, names), store.meta.uuid
    return f"{folder}, which is not readable", [], ""
