"""The binding in the manifest: one row, written once, by compare-and-set; or by a rebind.

Order of writes, here once: manifest row (this module), stamp in the store, first use. A
crash in between leaves a binding without a stamp, which the next start stamps.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from lmcache_persist import failpoints, hashing
from lmcache_persist.binding import Binding
from lmcache_persist.errors import ManifestError
from lmcache_persist.manifest.models import BindingRecord
from lmcache_persist.manifest.session import Database, mapped, unreadable

_ONLY_ROW = 1


def read_binding(session: Session, path: Path) -> Binding | None:
    """The binding that holds, None if unbound.

    Raises:
        ManifestUnreadable: the row contradicts its own digests.
    """
    row = session.scalars(select(BindingRecord)).one_or_none()
    if row is None:
        return None
    binding = Binding.from_json({field.name: getattr(row, field.name) for field in fields(Binding)})
    _check_digests(binding, path)
    return binding


def _check_digests(binding: Binding, path: Path) -> None:
    known = (hashing.HASH_ALGORITHM, hashing.HASH_VERSION)
    if (binding.hash_algorithm, binding.hash_version) != known:
        return  # another version's binding: what that means is for start-up to say
    expected = Binding.make(
        chunk_size=binding.chunk_size,
        required_alignment=binding.required_alignment,
        base_chunk_size=binding.base_chunk_size,
        mode=binding.mode,
        bound_at=binding.bound_at,
        winner=binding.winner,
        backend=binding.backend,
        store_uuid=binding.store_uuid,
        store_format_version=binding.store_format_version,
    )
    if binding != expected:
        raise unreadable(
            path,
            f"its binding has id {binding.binding_id}, expected {expected.binding_id}"
            " from its own fields",
        )


def bind(database: Database, candidate: Binding) -> tuple[Binding, bool]:
    """Make ``candidate`` the binding if there is none: one transaction.

    Returns:
        The binding that holds now, and whether this call wrote it.

    Durable: on return, whoever won.
    Threads: any, any number of processes at once.

    Raises:
        ManifestBusy: nothing was changed.
        ManifestError: nothing was changed, or, if the failure came after the commit,
            the candidate is bound; :func:`read_binding` says which.
    """
    with database.write() as session:
        holding = read_binding(session, database.path)
        if holding is not None:
            return holding, False
        session.add(BindingRecord(id=_ONLY_ROW, **candidate.to_json()))
        session.flush()
        failpoints.hit("bind.before_commit")
    with mapped(database.path):
        failpoints.hit("bind.after_commit")
    database.checkpoint()
    return candidate, True


def rebind(database: Database, replaces: str, binding: Binding) -> None:
    """Put ``binding`` in the place of the one with id ``replaces``: one transaction.

    Durable: on return.

    Raises:
        ManifestBusy: nothing was changed.
        ManifestError: another binding holds, and nothing was changed; or the disk failed,
            and the old or the new one holds.
    """
    with database.write() as session:
        holding = read_binding(session, database.path)
        if holding is None or holding.binding_id != replaces:
            raise ManifestError(
                f"manifest {database.path} has binding"
                f" {holding.binding_id[:12] if holding else 'none'}, expected {replaces[:12]}"
            )
        row = session.get_one(BindingRecord, _ONLY_ROW)
        for name, value in binding.to_json().items():
            setattr(row, name, value)
        session.flush()
        failpoints.hit("rebind.before_commit")
    with mapped(database.path):
        failpoints.hit("rebind.after_commit")
    database.checkpoint()
