"""The manifest of one data dir, open for reading and writing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcache_persist.binding import Binding
from lmcache_persist.manifest import binding as binding_table
from lmcache_persist.manifest import catalog, registry
from lmcache_persist.manifest.catalog import BootRow, ModelRow, RejectionRow
from lmcache_persist.manifest.schema import upgrade
from lmcache_persist.manifest.session import Database, create_file, mapped
from lmcache_persist.manifest.snapshot import peek
from lmcache_persist.posix import sync_folder

DEFAULT_BUSY_TIMEOUT_S = 10.0


class Manifest:
    """The facts about a data dir: its binding, and what happened to it.

    Holds nothing per object. Made by :meth:`open`.

    Durable: every method that writes, on return.
    Threads: any; also several processes at once, though a server lets nobody in.

    Every method raises :class:`~lmcache_persist.errors.ManifestBusy` after waiting
    ``busy_timeout_s`` for another process, and
    :class:`~lmcache_persist.errors.ManifestError` when SQLite or the disk fails; nothing
    was changed then.
    """

    def __init__(self, database: Database, key: registry.FileKey) -> None:
        self.path = database.path
        self._database = database
        self._key: registry.FileKey | None = key

    @classmethod
    def open(cls, path: Path, *, busy_timeout_s: float = DEFAULT_BUSY_TIMEOUT_S) -> Manifest:
        """Open the manifest at ``path``, making or migrating it if need be.

        A manifest that is there is first read from a private copy, so that a refusal
        leaves every byte as it was. A new one gets mode 0600 whatever the umask.

        Args:
            path: the file; its folder exists.
            busy_timeout_s: seconds to wait for another process's lock, here and later.

        Durable: on return, the file, its schema and its name.

        Raises:
            ManifestUnreadable: there is a manifest and it cannot be read.
            SchemaTooNew: a newer version wrote it.
            DataDirUnusable: it cannot be made or opened for writing.
            ManifestBusy: another process held its lock until the time-out.
        """
        path = Path(path)
        with registry.guard():
            if not registry.is_open(path):
                peek(path)
            with mapped(path):
                create_file(path)
                key = registry.add(path)
        database = Database(path, busy_timeout_s)
        try:
            database.use_wal()
            if upgrade(database):
                database.checkpoint()
                with mapped(path):
                    sync_folder(path.parent)
        except BaseException:
            database.close()
            registry.remove(key)
            raise
        return cls(database, key)

    def binding(self) -> Binding | None:
        """The binding that holds, None if unbound."""
        with self._database.read() as session:
            return binding_table.read_binding(session, self.path)

    def bind(self, candidate: Binding) -> tuple[Binding, bool]:
        """Bind to ``candidate`` unless bound: the binding that holds now, and who wrote it.

        One compare-and-set in one transaction: of any number of racers in any number of
        threads and processes exactly one gets True, and all get the same binding.

        Raises:
            ManifestError: nothing was changed, unless the failure came after the commit;
                :meth:`binding` says which.
        """
        return binding_table.bind(self._database, candidate)

    def rebind(self, replaces: str, binding: Binding) -> None:
        """Replace the binding with id ``replaces`` by another one.

        Raises:
            ManifestError: another binding holds, and nothing was changed.
        """
        binding_table.rebind(self._database, replaces, binding)

    def record_model(
        self,
        *,
        fingerprint: str,
        name: str,
        identity: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        layouts: Sequence[Mapping[str, Any]],
        required_alignment: int,
        at: str,
        used: Collection[str] | None = None,
    ) -> None:
        """Record a served model: new, or seen again at ``at``.

        Args:
            fingerprint: its.
            name: for people.
            identity: what the fingerprint was made of, with groups and layouts.
            groups: the geometry.
            layouts: one per rank.
            required_alignment: tokens.
            at: time.
            used: fingerprints that have objects or are served. For a new model others go
                beyond :data:`~.catalog.MAX_IDLE_MODELS`; with None, none does.

        Raises:
            IdentityUnknown: a value has no JSON form.
        """
        with self._database.write() as session:
            new = catalog.record_model(
                session,
                fingerprint=fingerprint,
                name=name,
                identity=identity,
                groups=groups,
                layouts=layouts,
                required_alignment=required_alignment,
                at=at,
            )
            if new and used is not None:
                session.flush()
                catalog.forget_idle_models(session, {fingerprint, *used})

    def models(self) -> list[ModelRow]:
        """All models, the first seen first."""
        with self._database.read() as session:
            return catalog.models(session)

    def forget_models(self, fingerprints: Sequence[str]) -> None:
        """Remove models; absent ones are passed over."""
        with self._database.write() as session:
            catalog.forget_models(session, fingerprints)

    def record_rejections(self, rows: Sequence[RejectionRow]) -> None:
        """Record refusals in one transaction; equal ones are counted, not repeated."""
        with self._database.write() as session:
            for row in rows:
                catalog.record_rejection(session, row)

    def rejections(self) -> list[RejectionRow]:
        """The refusals, at most :data:`~.catalog.MAX_REJECTIONS`, the latest last."""
        with self._database.read() as session:
            return catalog.rejections(session)

    def start_boot(self, boot: BootRow) -> None:
        """Record a start of the server."""
        with self._database.write() as session:
            catalog.start_boot(session, boot)

    def end_boot(self, boot_id: str, *, at: str, clean: bool) -> None:
        """Record the end of a start.

        Raises:
            ValueError: no such start was recorded.
        """
        with self._database.write() as session:
            catalog.end_boot(session, boot_id, at=at, clean=clean)

    def boots(self) -> list[BootRow]:
        """The starts, at most :data:`~.catalog.MAX_BOOTS`, the latest last."""
        with self._database.read() as session:
            return catalog.boots(session)

    def serialize(self) -> bytes:
        """The manifest of one moment, as a file of its own holds it; blocks no writer."""
        return self._database.serialize()

    def close(self) -> None:
        """Close the file; safe to call again. Any other method raises from now on."""
        if self._key is None:
            return
        self._database.close()
        registry.remove(self._key)
        self._key = None
