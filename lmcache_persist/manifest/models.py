"""The manifest's tables.

The newest schema only: what older ones looked like is in ``migrations/versions``, and
``alembic check`` holds both together. Nothing here is per object; objects are the
store's.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, MetaData, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

SCHEMA_VERSION = 1
"""The number of the newest revision in ``migrations/versions``."""

HEAD_REVISION = f"{SCHEMA_VERSION:04d}"

VERSION_TABLE = "alembic_version"
"""Where Alembic keeps the revision of a database."""


class Base(DeclarativeBase):
    """Base of all tables; every constraint has a name, so that a migration can reach it."""

    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
        }
    )


class BindingRecord(Base):
    """The binding; the check on ``id`` makes a second row impossible."""

    __tablename__ = "binding"
    __table_args__ = (
        CheckConstraint("id = 1", name="single_row"),
        CheckConstraint(
            "required_alignment > 0 AND chunk_size > 0 AND chunk_size % required_alignment = 0",
            name="aligned",
        ),
        CheckConstraint("mode IN ('auto', 'fixed')", name="mode"),
    )

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    chunk_size: Mapped[int]
    required_alignment: Mapped[int]
    base_chunk_size: Mapped[int]
    mode: Mapped[str] = mapped_column(String(16))
    hash_algorithm: Mapped[str] = mapped_column(String(64))
    hash_version: Mapped[int]
    boundary_id: Mapped[str] = mapped_column(String(64))
    binding_id: Mapped[str] = mapped_column(String(64))
    bound_at: Mapped[str] = mapped_column(String(40))
    winner: Mapped[str] = mapped_column(Text)
    backend: Mapped[str] = mapped_column(String(64))
    store_uuid: Mapped[str] = mapped_column(String(32))
    store_format_version: Mapped[int]


class ModelRecord(Base):
    """A model that was served: one row per fingerprint, kept for ``inspect``."""

    __tablename__ = "models"

    fingerprint: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    identity: Mapped[str] = mapped_column(Text)
    groups: Mapped[str] = mapped_column(Text)
    layouts: Mapped[str] = mapped_column(Text)
    required_alignment: Mapped[int]
    first_seen: Mapped[str] = mapped_column(String(40))
    last_seen: Mapped[str] = mapped_column(String(40))


class RejectionRecord(Base):
    """A refused bind or registration; equal ones share a row.

    ``serial`` grows with every occurrence, so that age does not hang on the wall clock.
    """

    __tablename__ = "rejections"
    __table_args__ = (UniqueConstraint("reason", "detail"),)

    serial: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    reason: Mapped[str] = mapped_column(String(64))
    detail: Mapped[str] = mapped_column(Text)
    at: Mapped[str] = mapped_column(String(40))
    count: Mapped[int]


class BootRecord(Base):
    """One start of a server; without an end it crashed or still runs."""

    __tablename__ = "boots"
    __table_args__ = (UniqueConstraint("boot_id"),)

    serial: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    boot_id: Mapped[str] = mapped_column(String(32))
    started_at: Mapped[str] = mapped_column(String(40))
    ended_at: Mapped[str | None] = mapped_column(String(40))
    clean: Mapped[bool | None]
    pid: Mapped[int]
    version: Mapped[str] = mapped_column(String(64))
    kernel_boot_id: Mapped[str] = mapped_column(String(64))
