"""alerts, silences, jobs that one process does, and the history of endpoints

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_MEASURES = (
    "ttft_p50", "ttft_p95", "tpot", "tokens_per_s", "requests_per_s", "in_flight", "held", "kv_usage",
    "hit_ratio", "replicas", "cost",
)  # fmt: skip


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_jobs")),
    )
    op.create_table(
        "alerts",
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("alert", sa.String(length=64), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=64), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("summary", sa.String(length=2048), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("fired_at", sa.Double(), nullable=True),
        sa.Column("resolved_at", sa.Double(), nullable=True),
        sa.Column("told", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name=op.f("pk_alerts")),
    )
    op.create_table(
        "alert_silences",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("matchers", sa.JSON(), nullable=False),
        sa.Column("comment", sa.String(length=2048), nullable=False),
        sa.Column("created_by", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ends_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert_silences")),
    )
    op.create_table(
        "endpoint_history",
        sa.Column("endpoint_id", sa.String(length=64), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", sa.BigInteger(), autoincrement=False, nullable=False),
        *(sa.Column(name, sa.Double(), nullable=True) for name in _MEASURES),
        sa.PrimaryKeyConstraint("endpoint_id", "step", "at", name=op.f("pk_endpoint_history")),
    )
    op.create_index("ix_endpoint_history_step_at", "endpoint_history", ["step", "at"])


def downgrade() -> None:
    op.drop_index("ix_endpoint_history_step_at", table_name="endpoint_history")
    for table in ("endpoint_history", "alert_silences", "alerts", "jobs"):
        op.drop_table(table)
