"""``inspect`` on the files of a data dir that no server holds.

Nothing is created or changed, and the data dir's lock is held, shared, all the while. The
store is looked at by a process of its own: LMDB may end the one that reads broken pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lmcache_persist.datadir import DataDir, ReaderLock, read_holder
from lmcache_persist.errors import PersistError, StoreDamaged, StoreIOError
from lmcache_persist.manifest.snapshot import ManifestSnapshot
from lmcache_persist.server import recovery
from lmcache_persist.server.listing import objects_page
from lmcache_persist.server.offline import (
    after_rebind,
    existing_data_dir,
    has_data_file,
    read_manifest,
    refuse_if_resetting,
)
from lmcache_persist.server.report import Seen, inspect_document, matching
from lmcache_persist.store import offline as store_files
from lmcache_persist.store.base import FingerprintUsage, Usage
from lmcache_persist.store.lmdb_open import StoreMeta
from lmcache_persist.store.peek_child import in_child
from lmcache_persist.store.survey import Survey, survey, survey_from_json
from lmcache_persist.store.unsynced import kernel_boot_id

MAX_WALKED_CHUNKS = 50_000
"""A store with more is not walked page by page before it is shown: that is what verify does."""

NO_STORE = Usage(
    chunks=0,
    objects=0,
    bytes=0,
    capacity_bytes=0,
    used_bytes=0,
    stale_objects=0,
    stale_bytes=0,
    by_fingerprint={},
)


@dataclass(frozen=True, slots=True)
class Wish:
    """What ``inspect`` is asked for.

    Attributes:
        model: name or fingerprint, empty for all.
        details: also what each fingerprint was made of.
        objects: a page of so many objects, None for none.
        after: where the page begins.
    """

    model: str = ""
    details: bool = False
    objects: int | None = None
    after: bytes = b""


class Look(NamedTuple):
    """What was seen: the document of ``inspect``, and why a part of it is unavailable."""

    document: dict[str, Any]
    problem: PersistError | None


def inspect_offline(data_dir: Path) -> dict[str, Any]:
    """The document of ``inspect`` from files; its store is "unavailable" if unreadable.

    Raises:
        DataDirLocked: a server holds the data dir: ask that one.
        DataDirUnusable: it is no data dir, or cannot be read.
        StoreMismatch, ManifestUnreadable, SchemaTooNew, ManifestBusy: as they say.
    """
    return look(data_dir).document


def look(data_dir: Path, wish: Wish | None = None) -> Look:
    """As :func:`inspect_offline`, with the reason for an unavailable store.

    Raises:
        ConfigError: there is no such model.
    """
    wish = wish or Wish()
    paths = existing_data_dir(data_dir)
    with ReaderLock.acquire(data_dir):
        refuse_if_resetting(paths)
        snapshot = read_manifest(paths)
        try:
            store = _look_at_store(paths, snapshot, wish)
        except PersistError as error:
            seen = Seen(snapshot, kernel_boot_id=_kernel_boot_id())
            document = inspect_document(seen, model=wish.model, details=wish.details)
            return Look(_with_page(document, wish, None), error)
    if store is None:
        seen = Seen(snapshot, NO_STORE, kernel_boot_id=_kernel_boot_id())
        document = inspect_document(seen, model=wish.model, details=wish.details)
        return Look(_with_page(document, wish, {"objects": [], "next": None}), None)
    seen = Seen(
        after_rebind(snapshot, store.meta),
        store.usage,
        store.survey,
        clean_shutdown=store.meta.clean_shutdown,
        kernel_boot_id=_kernel_boot_id(),
    )
    document = inspect_document(seen, model=wish.model, details=wish.details)
    return Look(_with_page(document, wish, store.page), None)


def look_at_manifest(data_dir: Path, wish: Wish | None = None) -> dict[str, Any]:
    """The document of ``inspect`` with the store unavailable, beside a server that is hung.

    Raises:
        ConfigError: there is no such model.
        DataDirUnusable, StoreMismatch, ManifestUnreadable, SchemaTooNew, ManifestBusy: as they say.
    """
    wish = wish or Wish()
    holder = read_holder(data_dir)
    seen = Seen(
        read_manifest(existing_data_dir(data_dir)),
        running=holder.boot_id if holder else "",
        kernel_boot_id=_kernel_boot_id(),
    )
    document = inspect_document(seen, model=wish.model, details=wish.details)
    return _with_page(document, wish, None)


def _with_page(document: dict[str, Any], wish: Wish, page: dict[str, Any] | None) -> dict[str, Any]:
    """The document with the objects that were asked for; null if they cannot be had."""
    if wish.objects is None:
        return document
    return {**document, **(page or {"objects": None, "next": None})}


def _kernel_boot_id() -> str:
    try:
        return kernel_boot_id()
    except StoreIOError:
        return ""


@dataclass(frozen=True, slots=True)
class _StoreLook:
    meta: StoreMeta
    usage: Usage
    survey: Survey
    page: dict[str, Any] | None


def _look_at_store(paths: DataDir, snapshot: ManifestSnapshot, wish: Wish) -> _StoreLook | None:
    if not has_data_file(paths.store):
        return None
    problem = store_files.looks_damaged(paths.store)
    if problem is None and in_child(_counting(paths.store))["chunks"] <= MAX_WALKED_CHUNKS:
        problem = store_files.verify_pages(paths.store)
    if problem:
        raise recovery.damaged(paths, problem)
    try:
        found = in_child(_reading(paths.store, snapshot, wish))
    except StoreDamaged as error:
        raise recovery.damaged(paths, error.message) from error
    used = {name: FingerprintUsage(**one) for name, one in found["usage"]["by_fingerprint"].items()}
    return _StoreLook(
        StoreMeta.from_json(found["meta"]),
        Usage(**{**found["usage"], "by_fingerprint": used}),
        survey_from_json(found["survey"]),
        found["page"],
    )


def _counting(directory: Path) -> Callable[[], dict[str, Any]]:
    def count() -> dict[str, Any]:
        with store_files.OfflineStore.open(directory) as store:
            return {"chunks": store.num_chunks()}

    return count


def _reading(
    directory: Path, snapshot: ManifestSnapshot, wish: Wish
) -> Callable[[], dict[str, Any]]:
    def read() -> dict[str, Any]:
        with store_files.OfflineStore.open(directory) as store:
            usage = store.usage()
            page = None
            if wish.objects is not None:
                only = matching(snapshot.models, usage, wish.model) if wish.model else None
                page = objects_page(
                    store,
                    store.binding_id,
                    {row.fingerprint: row.name for row in snapshot.models},
                    after=wish.after,
                    limit=wish.objects,
                    fingerprints=only,
                )
            return {
                "meta": store.meta.to_json(),
                "usage": asdict(usage),
                "survey": asdict(survey(store, store.binding_id)),
                "page": page,
            }

    return read
