"""an endpoint that was stopped for what it cost knows by whose limit, and how much that was

Only adds, and only what may be absent: processes of the version before go on beside it.

Revision ID: 0009
Revises: 0008
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("endpoints", sa.Column("stopped_by", sa.String(length=16), nullable=True))
    op.add_column("endpoints", sa.Column("stopped_limit_nano", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    for name in ("stopped_limit_nano", "stopped_by"):
        op.drop_column("endpoints", name)
