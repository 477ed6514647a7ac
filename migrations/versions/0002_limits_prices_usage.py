"""limits, key scopes, price books, usage by the hour

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_FIRST_PRICES = {
    "version": 1,
    "effective_at": 0.0,
    "currency": "USD",
    "models": {"*": {"prompt": 0.1, "cached": 0.025, "completion": 0.4}},
    "accelerators": {"cpu": 0.05, "*": 2.5},
}


def upgrade() -> None:
    for table in ("tenants", "endpoints", "api_keys"):
        with op.batch_alter_table(table) as batch:
            batch.add_column(sa.Column("requests_per_minute", sa.BigInteger(), nullable=True))
            batch.add_column(sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True))
            batch.add_column(sa.Column("monthly_budget", sa.Double(), nullable=True))
            if table != "api_keys":
                batch.add_column(sa.Column("concurrency", sa.Integer(), nullable=True))
                continue
            for name in ("endpoints", "routes", "networks"):
                batch.add_column(sa.Column(name, sa.JSON(), nullable=True))
            batch.add_column(sa.Column("last_used_at", sa.Double(), nullable=True))
    with op.batch_alter_table("usage_events") as batch:
        batch.add_column(sa.Column("wasted_tokens", sa.BigInteger(), nullable=False, server_default="0"))
        batch.add_column(sa.Column("estimated", sa.Boolean(), nullable=False, server_default=sa.false()))
        batch.add_column(sa.Column("cost_nano", sa.BigInteger(), nullable=False, server_default="0"))
        batch.add_column(sa.Column("price_version", sa.Integer(), nullable=False, server_default="0"))
    op.create_table(
        "usage_hours",
        sa.Column("hour", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("endpoint_id", sa.String(length=64), nullable=False),
        sa.Column("price_version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("endpoint_name", sa.String(length=64), nullable=False),
        sa.Column("region", sa.String(length=64), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("wasted_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_nano", sa.BigInteger(), nullable=False),
        sa.Column("duration_ms", sa.Double(), nullable=False),
        sa.Column("ttft_ms", sa.Double(), nullable=False),
        sa.Column("streams", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "hour", "tenant_id", "key_id", "endpoint_id", "price_version", name=op.f("pk_usage_hours")
        ),
    )
    # What was metered before there were hours.
    op.execute(
        "INSERT INTO usage_hours (hour, tenant_id, key_id, endpoint_id, price_version, endpoint_name, region, requests,"
        " prompt_tokens, completion_tokens, cached_tokens, wasted_tokens, cost_nano, duration_ms, ttft_ms, streams)"
        " SELECT CAST(started_at AS BIGINT) - CAST(started_at AS BIGINT) % 3600, tenant_id, key_id, endpoint_id, 0,"
        " MAX(endpoint_name), MAX(region), COUNT(*), SUM(prompt_tokens), SUM(completion_tokens), SUM(cached_tokens),"
        " 0, 0, SUM(duration_ms), COALESCE(SUM(ttft_ms), 0), COUNT(ttft_ms) FROM usage_events"
        " GROUP BY CAST(started_at AS BIGINT) - CAST(started_at AS BIGINT) % 3600, tenant_id, key_id, endpoint_id"
    )
    prices = op.create_table(
        "price_books",
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("effective_at", sa.Double(), nullable=False),
        sa.Column("currency", sa.String(length=64), nullable=False),
        sa.Column("models", sa.JSON(), nullable=False),
        sa.Column("accelerators", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("version", name=op.f("pk_price_books")),
    )
    op.bulk_insert(prices, [_FIRST_PRICES])
    op.create_table(
        "limit_windows",
        sa.Column("scope", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("used", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("scope", "kind", name=op.f("pk_limit_windows")),
    )
    op.create_table(
        "open_requests",
        sa.Column("scope", sa.String(length=64), nullable=False),
        sa.Column("gateway_id", sa.String(length=64), nullable=False),
        sa.Column("open", sa.Integer(), nullable=False),
        sa.Column("reported_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("scope", "gateway_id", name=op.f("pk_open_requests")),
    )


def downgrade() -> None:
    for table in ("open_requests", "limit_windows", "price_books", "usage_hours"):
        op.drop_table(table)
    with op.batch_alter_table("usage_events") as batch:
        for name in ("wasted_tokens", "estimated", "cost_nano", "price_version"):
            batch.drop_column(name)
    for table in ("tenants", "endpoints", "api_keys"):
        with op.batch_alter_table(table) as batch:
            for name in ("requests_per_minute", "tokens_per_minute", "monthly_budget"):
                batch.drop_column(name)
            for name in (
                ("endpoints", "routes", "networks", "last_used_at") if table == "api_keys" else ("concurrency",)
            ):
                batch.drop_column(name)
