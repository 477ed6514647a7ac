"""What only the database tells of the whole installation: keys that end, budgets, what replicas cost."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.metering.prices import NANO
from control_plane.store.models import ApiKeyRow, TenantRow, UsageHourRow

_MOST_TENANTS = 100


async def keys_expiring(session: AsyncSession, now: float, within: float) -> int:
    """Keys that were used in the last `within` seconds, end in the next ones and have no successor.

    One that was made for a shorter while than that, such as for a trial, surprises nobody by its end.
    """
    return (
        await session.scalar(
            select(func.count())
            .select_from(ApiKeyRow)
            .where(
                ApiKeyRow.revoked_at.is_(None),
                ApiKeyRow.rotated_to.is_(None),
                ApiKeyRow.expires_at > now,
                ApiKeyRow.expires_at < now + within,
                ApiKeyRow.expires_at - ApiKeyRow.created_at > within,
                ApiKeyRow.last_used_at > now - within,
            )
        )
        or 0
    )


async def budgets_used(session: AsyncSession, now: float) -> dict[str, float]:
    """By tenant with a budget: the share of it that this UTC month has used. The 100 that used most."""
    month = datetime.fromtimestamp(now, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
    spent = func.coalesce(func.sum(UsageHourRow.cost_nano), 0)
    rows = await session.execute(
        select(TenantRow.name, TenantRow.monthly_budget, spent)
        .outerjoin(UsageHourRow, (UsageHourRow.tenant_id == TenantRow.id) & (UsageHourRow.hour >= month))
        .where(TenantRow.monthly_budget > 0)
        .group_by(TenantRow.id, TenantRow.name, TenantRow.monthly_budget)
        .order_by((spent / TenantRow.monthly_budget).desc())
        .limit(_MOST_TENANTS)
    )
    return {name: float(cost) / NANO / budget for name, budget, cost in rows if budget}
