"""audit records in a chain, retention per endpoint

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_RETENTION = str(90 * 86_400.0)


def upgrade() -> None:
    with op.batch_alter_table("audit_records") as batch:
        # Records from before the chain have no place in it.
        batch.add_column(sa.Column("seq", sa.BigInteger(), nullable=True))
        for name, length in (("previous", 64), ("hash", 64), ("signature", 128)):
            batch.add_column(sa.Column(name, sa.String(length=length), nullable=True))
        batch.create_unique_constraint(op.f("uq_audit_records_seq"), ["seq"])
    with op.batch_alter_table("endpoints") as batch:
        batch.add_column(sa.Column("retention", sa.Double(), nullable=False, server_default=_RETENTION))
    op.execute("INSERT INTO counters (name, value) VALUES ('audit', 0)")


def downgrade() -> None:
    op.execute("DELETE FROM counters WHERE name = 'audit'")
    with op.batch_alter_table("endpoints") as batch:
        batch.drop_column("retention")
    with op.batch_alter_table("audit_records") as batch:
        batch.drop_constraint(op.f("uq_audit_records_seq"), type_="unique")
        for name in ("seq", "previous", "hash", "signature"):
            batch.drop_column(name)
