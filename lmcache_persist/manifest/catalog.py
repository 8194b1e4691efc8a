"""Models, rejections and boots: what ``inspect`` tells about the past.

Times are UTC, ISO 8601 with microseconds, and come from the caller.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from lmcache_persist.identity import canonical_json
from lmcache_persist.manifest.models import BootRecord, ModelRecord, RejectionRecord

MAX_REJECTIONS = 1000
"""Rows kept; beyond, those that were seen longest ago go."""

MAX_REJECTIONS_OF_A_REASON = 100
"""Likewise, of one reason: a flood of nonsense must not push out why an engine was refused."""

MAX_BOOTS = 1000
"""Rows kept; beyond, the oldest starts go. A crash loop must not fill the disk."""


MAX_IDLE_MODELS = 1000
"""Models kept that hold no objects and are not served; beyond, those seen longest ago go."""
MAX_IDLE_MODEL_BYTES = 64 << 20
"""Likewise, of what they say of themselves: a layout per rank may be large."""
MAX_DETAIL_CHARS = 1000
"""Kept of a refusal's text."""


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model that was served.

    Attributes:
        fingerprint: 64 hex digits.
        name: for people.
        identity: what the fingerprint was made of, with ``groups`` and ``layouts``.
        groups: the geometry as plain JSON, in order.
        layouts: one per rank, in rank order.
        required_alignment: tokens.
        first_seen: time of the first registration.
        last_seen: time of the last one.
    """

    fingerprint: str
    name: str
    identity: dict[str, Any]
    groups: list[dict[str, Any]]
    layouts: list[dict[str, Any]]
    required_alignment: int
    first_seen: str
    last_seen: str


@dataclass(frozen=True, slots=True)
class RejectionRow:
    """A refusal, how often it was given (``count``) and when last (``at``)."""

    at: str
    reason: str
    detail: str
    count: int


@dataclass(frozen=True, slots=True)
class BootRow:
    """One start of a server.

    Attributes:
        boot_id: 32 hex digits.
        started_at: time.
        pid: in the server's own PID namespace.
        version: of lmcache-persist.
        kernel_boot_id: the kernel's ``boot_id``: another one means a reboot in between.
        ended_at: time, None if it crashed or still runs.
        clean: whether it ended in good order, None as ``ended_at``.
    """

    boot_id: str
    started_at: str
    pid: int
    version: str
    kernel_boot_id: str
    ended_at: str | None = None
    clean: bool | None = None


def record_model(
    session: Session,
    *,
    fingerprint: str,
    name: str,
    identity: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    layouts: Sequence[Mapping[str, Any]],
    required_alignment: int,
    at: str,
) -> bool:
    """Insert a model, or say that it was seen again at ``at``; whether it is new."""
    row = session.get(ModelRecord, fingerprint)
    if row is not None:
        row.name = name
        row.last_seen = at
        return False
    session.add(
        ModelRecord(
            fingerprint=fingerprint,
            name=name,
            identity=canonical_json(identity),
            groups=canonical_json(groups),
            layouts=canonical_json(layouts),
            required_alignment=required_alignment,
            first_seen=at,
            last_seen=at,
        )
    )
    return True


def forget_idle_models(session: Session, used: Collection[str]) -> None:
    """Remove those models beyond the bounds that were seen longest ago.

    Args:
        session: writing.
        used: fingerprints of those that stay whatever their number: they have objects, or
            are served.
    """
    size = func.length(ModelRecord.identity) + func.length(ModelRecord.layouts)
    rows = session.execute(
        select(ModelRecord.fingerprint, size).order_by(
            ModelRecord.last_seen.desc(), ModelRecord.fingerprint
        )
    )
    kept, kept_bytes, surplus = 0, 0, []
    for fingerprint, nbytes in rows:
        if fingerprint in used:
            continue
        kept, kept_bytes = kept + 1, kept_bytes + nbytes
        if kept > MAX_IDLE_MODELS or kept_bytes > MAX_IDLE_MODEL_BYTES:
            surplus.append(fingerprint)
    for fingerprint in surplus:
        session.execute(delete(ModelRecord).where(ModelRecord.fingerprint == fingerprint))


def models(session: Session) -> list[ModelRow]:
    """All models, the first seen first."""
    rows = session.scalars(
        select(ModelRecord).order_by(ModelRecord.first_seen, ModelRecord.fingerprint)
    )
    return [
        ModelRow(
            fingerprint=row.fingerprint,
            name=row.name,
            identity=json.loads(row.identity),
            groups=json.loads(row.groups),
            layouts=json.loads(row.layouts),
            required_alignment=row.required_alignment,
            first_seen=row.first_seen,
            last_seen=row.last_seen,
        )
        for row in rows
    ]


def forget_models(session: Session, fingerprints: Sequence[str]) -> None:
    """Remove models; one that still runs is recorded again when it registers."""
    for fingerprint in fingerprints:
        session.execute(delete(ModelRecord).where(ModelRecord.fingerprint == fingerprint))


def record_rejection(session: Session, new: RejectionRow) -> None:
    """Count a refusal; equal ones (reason and detail, as far as it is kept) share a row."""
    detail = new.detail
    if len(detail) > MAX_DETAIL_CHARS:
        detail = f"{detail[: MAX_DETAIL_CHARS - 3]}..."
    newest = session.scalar(select(func.max(RejectionRecord.serial))) or 0
    of_reason = RejectionRecord.reason == new.reason
    row = session.scalars(
        select(RejectionRecord).where(of_reason, RejectionRecord.detail == detail)
    ).one_or_none()
    if row is not None:
        row.serial, row.at, row.count = newest + 1, new.at, row.count + new.count
        session.flush()
        return
    session.add(
        RejectionRecord(
            serial=newest + 1, reason=new.reason, detail=detail, at=new.at, count=new.count
        )
    )
    session.flush()
    kept = select(RejectionRecord.serial).order_by(RejectionRecord.serial.desc())
    kept_of_reason = kept.where(of_reason).limit(MAX_REJECTIONS_OF_A_REASON)
    session.execute(
        delete(RejectionRecord).where(of_reason, RejectionRecord.serial.not_in(kept_of_reason))
    )
    session.execute(
        delete(RejectionRecord).where(RejectionRecord.serial.not_in(kept.limit(MAX_REJECTIONS)))
    )


def rejections(session: Session) -> list[RejectionRow]:
    """All refusals, the latest last."""
    rows = session.scalars(select(RejectionRecord).order_by(RejectionRecord.serial))
    return [RejectionRow(row.at, row.reason, row.detail, row.count) for row in rows]


def start_boot(session: Session, boot: BootRow) -> None:
    """Record a start."""
    newest = session.scalar(select(func.max(BootRecord.serial))) or 0
    session.add(
        BootRecord(
            serial=newest + 1,
            boot_id=boot.boot_id,
            started_at=boot.started_at,
            ended_at=boot.ended_at,
            clean=boot.clean,
            pid=boot.pid,
            version=boot.version,
            kernel_boot_id=boot.kernel_boot_id,
        )
    )
    session.flush()
    session.execute(delete(BootRecord).where(BootRecord.serial <= newest + 1 - MAX_BOOTS))


def end_boot(session: Session, boot_id: str, *, at: str, clean: bool) -> None:
    """Record the end of a start.

    Raises:
        ValueError: no such start was recorded.
    """
    row = session.scalars(select(BootRecord).where(BootRecord.boot_id == boot_id)).one_or_none()
    if row is None:
        raise ValueError(f"boot {boot_id!r} was never started")
    row.ended_at, row.clean = at, clean


def boots(session: Session) -> list[BootRow]:
    """All starts, the latest last."""
    rows = session.scalars(select(BootRecord).order_by(BootRecord.serial))
    return [
        BootRow(
            boot_id=row.boot_id,
            started_at=row.started_at,
            pid=row.pid,
            version=row.version,
            kernel_boot_id=row.kernel_boot_id,
            ended_at=row.ended_at,
            clean=row.clean,
        )
        for row in rows
    ]
