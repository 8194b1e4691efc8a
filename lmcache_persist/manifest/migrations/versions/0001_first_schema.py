"""First schema: binding, models, rejections, boots."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "binding",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("chunk_size", sa.Integer(), nullable=False),
        sa.Column("required_alignment", sa.Integer(), nullable=False),
        sa.Column("base_chunk_size", sa.Integer(), nullable=False),
        sa.Column("mode", sa.String(16), nullable=False),
        sa.Column("hash_algorithm", sa.String(64), nullable=False),
        sa.Column("hash_version", sa.Integer(), nullable=False),
        sa.Column("boundary_id", sa.String(64), nullable=False),
        sa.Column("binding_id", sa.String(64), nullable=False),
        sa.Column("bound_at", sa.String(40), nullable=False),
        sa.Column("winner", sa.Text(), nullable=False),
        sa.Column("backend", sa.String(64), nullable=False),
        sa.Column("store_uuid", sa.String(32), nullable=False),
        sa.Column("store_format_version", sa.Integer(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_binding_single_row")),
        sa.CheckConstraint(
            "required_alignment > 0 AND chunk_size > 0 AND chunk_size % required_alignment = 0",
            name=op.f("ck_binding_aligned"),
        ),
        sa.CheckConstraint("mode IN ('auto', 'fixed')", name=op.f("ck_binding_mode")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_binding")),
    )
    op.create_table(
        "models",
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("identity", sa.Text(), nullable=False),
        sa.Column("groups", sa.Text(), nullable=False),
        sa.Column("layouts", sa.Text(), nullable=False),
        sa.Column("required_alignment", sa.Integer(), nullable=False),
        sa.Column("first_seen", sa.String(40), nullable=False),
        sa.Column("last_seen", sa.String(40), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name=op.f("pk_models")),
    )
    op.create_table(
        "rejections",
        sa.Column("serial", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("reason", sa.String(64), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("at", sa.String(40), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("serial", name=op.f("pk_rejections")),
        sa.UniqueConstraint("reason", "detail", name=op.f("uq_rejections_reason_detail")),
    )
    op.create_table(
        "boots",
        sa.Column("serial", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("boot_id", sa.String(32), nullable=False),
        sa.Column("started_at", sa.String(40), nullable=False),
        sa.Column("ended_at", sa.String(40), nullable=True),
        sa.Column("clean", sa.Boolean(), nullable=True),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("kernel_boot_id", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("serial", name=op.f("pk_boots")),
        sa.UniqueConstraint("boot_id", name=op.f("uq_boots_boot_id")),
    )


def downgrade() -> None:
    for table in ("boots", "rejections", "models", "binding"):
        op.drop_table(table)
