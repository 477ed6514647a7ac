"""bounds on what replicas may cost, and where a provider's inventory and our records disagreed

Only adds, with defaults that the database knows: processes of the version before go on beside it.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("endpoints", sa.Column("spend_limit", sa.Double(), nullable=True))
    op.add_column("endpoints", sa.Column("stopped_at", sa.Double(), nullable=True))
    op.add_column("tenants", sa.Column("spend_limit", sa.Double(), nullable=True))
    op.create_table(
        "drift",
        sa.Column("replica_id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("region", sa.String(length=64), nullable=False),
        sa.Column("endpoint_id", sa.String(length=64), nullable=True),
        sa.Column("we_say", sa.String(length=64), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("settled_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("replica_id", "kind", name=op.f("pk_drift")),
    )


def downgrade() -> None:
    op.drop_table("drift")
    op.drop_column("tenants", "spend_limit")
    op.drop_column("endpoints", "stopped_at")
    op.drop_column("endpoints", "spend_limit")
