"""a replica's row says when its provider refused it: nothing ran, and nothing is billed

Only adds, and only what may be absent: processes of the version before go on beside it.

Revision ID: 0011
Revises: 0010
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("replicas", sa.Column("refused_at", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("replicas", "refused_at")
