"""first tables

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "admin_tokens",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.Column("role", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_admin_tokens")),
        sa.UniqueConstraint("hash", name=op.f("uq_admin_tokens_hash")),
    )
    op.create_table(
        "audit_records",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=64), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=255), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_records")),
    )
    op.create_table(
        "cold_starts",
        sa.Column("replica_id", sa.String(length=64), nullable=False),
        sa.Column("endpoint_id", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=2048), nullable=False),
        sa.Column("region", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("total_ms", sa.Double(), nullable=False),
        sa.Column("phases", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("replica_id", name=op.f("pk_cold_starts")),
    )
    with op.batch_alter_table("cold_starts", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_cold_starts_endpoint_id"), ["endpoint_id"], unique=False)

    op.create_table(
        "counters",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_counters")),
    )
    op.create_table(
        "endpoint_events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("endpoint_id", sa.String(length=64), nullable=False),
        sa.Column("endpoint_name", sa.String(length=64), nullable=False),
        sa.Column("replica_id", sa.String(length=64), nullable=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=64), nullable=False),
        sa.Column("reason_code", sa.String(length=64), nullable=True),
        sa.Column("message", sa.String(length=2048), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_endpoint_events")),
    )
    with op.batch_alter_table("endpoint_events", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_endpoint_events_endpoint_id"), ["endpoint_id"], unique=False)

    op.create_table(
        "gateways",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("region", sa.String(length=64), nullable=False),
        sa.Column("url", sa.String(length=255), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gateways")),
    )
    with op.batch_alter_table("gateways", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_gateways_region"), ["region"], unique=False)

    op.create_table(
        "idempotency_keys",
        sa.Column("actor", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("response", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("actor", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "usage_events",
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("endpoint_id", sa.String(length=64), nullable=False),
        sa.Column("endpoint_name", sa.String(length=64), nullable=False),
        sa.Column("replica_id", sa.String(length=64), nullable=True),
        sa.Column("region", sa.String(length=64), nullable=False),
        sa.Column("route", sa.String(length=64), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("duration_ms", sa.Double(), nullable=False),
        sa.Column("ttft_ms", sa.Double(), nullable=True),
        sa.Column("held_ms", sa.Double(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.String(length=64), nullable=False),
        sa.Column("streamed", sa.Boolean(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_usage_events")),
    )
    with op.batch_alter_table("usage_events", schema=None) as batch_op:
        batch_op.create_index("ix_usage_events_endpoint_id_started_at", ["endpoint_id", "started_at"], unique=False)

    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.Column("prefix", sa.String(length=64), nullable=False),
        sa.Column("concurrency", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("rotated_to", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
    )
    with op.batch_alter_table("api_keys", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_api_keys_tenant_id"), ["tenant_id"], unique=False)

    op.create_table(
        "endpoints",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("region", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=2048), nullable=False),
        sa.Column("gpu", sa.String(length=64), nullable=True),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("engine_args", sa.JSON(), nullable=False),
        sa.Column("min_replicas", sa.Integer(), nullable=False),
        sa.Column("max_replicas", sa.Integer(), nullable=False),
        sa.Column("idle_timeout", sa.Double(), nullable=False),
        sa.Column("max_wait", sa.Double(), nullable=False),
        sa.Column("warmth", sa.String(length=64), nullable=False),
        sa.Column("paused", sa.Boolean(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("runtime_generation", sa.Integer(), nullable=False),
        sa.Column("observed_generation", sa.Integer(), nullable=False),
        sa.Column("desired_replicas", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=64), nullable=False),
        sa.Column("reason_code", sa.String(length=64), nullable=True),
        sa.Column("reason", sa.String(length=2048), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("retry_at", sa.Double(), nullable=False),
        sa.Column("failed_generation", sa.Integer(), nullable=False),
        sa.Column("wake_at", sa.Double(), nullable=False),
        sa.Column("sleep_at", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("delete_requested_at", sa.Double(), nullable=True),
        sa.Column("deleted_at", sa.Double(), nullable=True),
        sa.Column("lock_token", sa.BigInteger(), nullable=False),
        sa.Column("lock_owner", sa.String(length=64), nullable=True),
        sa.Column("lock_expires_at", sa.Double(), nullable=False),
        sa.CheckConstraint(
            "min_replicas >= 0 AND max_replicas >= min_replicas AND max_replicas >= 1",
            name=op.f("ck_endpoints_replicas"),
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_endpoints_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_endpoints")),
    )
    with op.batch_alter_table("endpoints", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_endpoints_tenant_id"), ["tenant_id"], unique=False)
        batch_op.create_index(
            "uq_endpoints_live_name",
            ["name"],
            unique=True,
            sqlite_where=sa.text("deleted_at IS NULL"),
            postgresql_where=sa.text("deleted_at IS NULL"),
        )

    op.create_table(
        "demand",
        sa.Column("endpoint_id", sa.String(length=64), nullable=False),
        sa.Column("gateway_id", sa.String(length=64), nullable=False),
        sa.Column("in_flight", sa.Integer(), nullable=False),
        sa.Column("held", sa.Integer(), nullable=False),
        sa.Column("last_finished_at", sa.Double(), nullable=False),
        sa.Column("reported_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["endpoint_id"], ["endpoints.id"], name=op.f("fk_demand_endpoint_id")),
        sa.PrimaryKeyConstraint("endpoint_id", "gateway_id", name=op.f("pk_demand")),
    )
    op.create_table(
        "replicas",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("endpoint_id", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("region", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=64), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=True),
        sa.Column("port", sa.Integer(), nullable=True),
        sa.Column("reason_code", sa.String(length=64), nullable=True),
        sa.Column("reason", sa.String(length=2048), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ready_at", sa.Double(), nullable=True),
        sa.Column("unhealthy_at", sa.Double(), nullable=True),
        sa.Column("draining_at", sa.Double(), nullable=True),
        sa.Column("terminated_at", sa.Double(), nullable=True),
        sa.Column("startup_ms", sa.Double(), nullable=True),
        sa.Column("busy", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["endpoint_id"], ["endpoints.id"], name=op.f("fk_replicas_endpoint_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replicas")),
    )
    with op.batch_alter_table("replicas", schema=None) as batch_op:
        batch_op.create_index("ix_replicas_endpoint_id_state", ["endpoint_id", "state"], unique=False)

    op.execute("INSERT INTO counters (name, value) VALUES ('routes', 1)")


def downgrade() -> None:
    with op.batch_alter_table("replicas", schema=None) as batch_op:
        batch_op.drop_index("ix_replicas_endpoint_id_state")

    op.drop_table("replicas")
    op.drop_table("demand")
    with op.batch_alter_table("endpoints", schema=None) as batch_op:
        batch_op.drop_index(
            "uq_endpoints_live_name",
            sqlite_where=sa.text("deleted_at IS NULL"),
            postgresql_where=sa.text("deleted_at IS NULL"),
        )
        batch_op.drop_index(batch_op.f("ix_endpoints_tenant_id"))

    op.drop_table("endpoints")
    with op.batch_alter_table("api_keys", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_api_keys_tenant_id"))

    op.drop_table("api_keys")
    with op.batch_alter_table("usage_events", schema=None) as batch_op:
        batch_op.drop_index("ix_usage_events_endpoint_id_started_at")

    op.drop_table("usage_events")
    op.drop_table("tenants")
    op.drop_table("idempotency_keys")
    with op.batch_alter_table("gateways", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_gateways_region"))

    op.drop_table("gateways")
    with op.batch_alter_table("endpoint_events", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_endpoint_events_endpoint_id"))

    op.drop_table("endpoint_events")
    op.drop_table("counters")
    with op.batch_alter_table("cold_starts", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_cold_starts_endpoint_id"))

    op.drop_table("cold_starts")
    op.drop_table("audit_records")
    op.drop_table("admin_tokens")
