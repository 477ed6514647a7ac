"""rollouts and their history, rungs of warmth, what the autoscaler aims at and remembers

Only adds, with defaults that the database knows: processes of the version before go on beside it.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def _for_endpoints() -> list[sa.Column[Any]]:
    return [
        sa.Column("preset", sa.String(length=64), nullable=True),
        sa.Column("target", sa.Double(), nullable=False, server_default="16"),
        sa.Column("ttft_slo", sa.Double(), nullable=True),
        sa.Column("schedule", sa.JSON(), nullable=False, server_default="[]"),
        sa.Column("warmth_by_wait", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("canary", sa.Integer(), nullable=True),
        sa.Column("stable_generation", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("stable_runtime", sa.JSON(), nullable=True),
    ]


def _for_replicas() -> list[sa.Column[Any]]:
    return [
        sa.Column("rung", sa.String(length=64), nullable=False, server_default="hot"),
        sa.Column("woken_at", sa.Double(), nullable=True),
    ]


def upgrade() -> None:
    for column in _for_endpoints():
        op.add_column("endpoints", column)
    for column in _for_replicas():
        op.add_column("replicas", column)
    op.create_table(
        "generations",
        sa.Column("endpoint_id", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("changed", sa.JSON(), nullable=False),
        sa.Column("outcome", sa.String(length=64), nullable=False),
        sa.Column("reason_code", sa.String(length=64), nullable=True),
        sa.Column("reason", sa.String(length=2048), nullable=False),
        sa.Column("settled_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("endpoint_id", "generation", name=op.f("pk_generations")),
    )
    op.create_table(
        "wakes",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("endpoint_id", sa.String(length=64), nullable=False),
        sa.Column("replica_id", sa.String(length=64), nullable=False),
        sa.Column("rung", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=2048), nullable=False),
        sa.Column("region", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("total_ms", sa.Double(), nullable=False),
        sa.Column("phases", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_wakes")),
    )
    op.create_index("ix_wakes_endpoint_id_rung_at", "wakes", ["endpoint_id", "rung", "at"])
    op.create_table(
        "scaler_state",
        sa.Column("endpoint_id", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("state", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("endpoint_id", name=op.f("pk_scaler_state")),
    )


def downgrade() -> None:
    op.drop_table("scaler_state")
    op.drop_index("ix_wakes_endpoint_id_rung_at", table_name="wakes")
    op.drop_table("wakes")
    op.drop_table("generations")
    for column in _for_replicas():
        op.drop_column("replicas", column.name)
    for column in _for_endpoints():
        op.drop_column("endpoints", column.name)
