"""drift is in times and money too, and a stranger's is where its provider says

Only adds, and only what may be absent: processes of the version before go on beside it.

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("drift", sa.Column("they_say", sa.String(length=64), nullable=True))
    op.add_column("drift", sa.Column("amount_nano", sa.BigInteger(), nullable=True))
    op.add_column("drift", sa.Column("currency", sa.String(length=64), nullable=True))
    op.add_column("drift", sa.Column("seen_by", sa.String(length=2048), nullable=True))


def downgrade() -> None:
    for name in ("seen_by", "currency", "amount_nano", "they_say"):
        op.drop_column("drift", name)
