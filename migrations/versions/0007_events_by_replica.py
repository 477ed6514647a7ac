"""what became of a replica is looked up by it, for its bill

Only adds: processes of the version before go on beside it.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_endpoint_events_replica_id", "endpoint_events", ["replica_id"])


def downgrade() -> None:
    op.drop_index("ix_endpoint_events_replica_id", "endpoint_events")
