"""a replica's row says where its weights were read from

Only adds, and only what may be absent: processes of the version before go on beside it.

Revision ID: 0010
Revises: 0009
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("replicas", sa.Column("weights_from", sa.String(length=2048), nullable=True))
    op.add_column("replicas", sa.Column("weights_region", sa.String(length=64), nullable=True))


def downgrade() -> None:
    for name in ("weights_region", "weights_from"):
        op.drop_column("replicas", name)
