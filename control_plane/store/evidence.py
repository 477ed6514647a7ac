"""Queries on what an endpoint left behind: its replicas, what was admitted by which key, what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.store.models import AuditRow, EventRow, ReplicaRow, UsageHourRow, UsageRow

MOST_REPLICAS = 10_000


async def replicas_of(session: AsyncSession, endpoint_id: str) -> Sequence[ReplicaRow]:
    """All that are on record, oldest first."""
    query = select(ReplicaRow).where(ReplicaRow.endpoint_id == endpoint_id).order_by(ReplicaRow.created_at)
    return (await session.scalars(query.limit(MOST_REPLICAS))).all()


async def traffic_of(session: AsyncSession, endpoint_id: str) -> list[dict[str, Any]]:
    """By key and region: requests and tokens, and the UTC hours of the first and the last."""
    own = UsageHourRow
    rows = await session.execute(
        select(
            own.tenant_id,
            own.key_id,
            own.region,
            func.sum(own.requests).label("requests"),
            func.sum(own.prompt_tokens + own.completion_tokens).label("tokens"),
            func.min(own.hour).label("first_hour"),
            func.max(own.hour).label("last_hour"),
        )
        .where(own.endpoint_id == endpoint_id)
        .group_by(own.tenant_id, own.key_id, own.region)
        .order_by(own.key_id, own.region)
    )
    return [
        {name: int(value) if name not in ("tenant_id", "key_id", "region") else value for name, value in row.items()}
        for row in (found._mapping for found in rows)
    ]


async def kept_of(session: AsyncSession, endpoint_id: str) -> dict[str, dict[str, float | int | None]]:
    """By kind of record: how many there are, and when the oldest was."""
    found: dict[str, dict[str, float | int | None]] = {}
    for name, model, at in (
        ("usage_events", UsageRow, UsageRow.started_at),
        ("endpoint_events", EventRow, EventRow.at),
    ):
        query = select(func.count(), func.min(at)).select_from(model).where(model.endpoint_id == endpoint_id)
        count, oldest = (await session.execute(query)).one()
        found[name] = {"count": count, "oldest_at": oldest}
    return found


async def deletions_of(session: AsyncSession, endpoint_id: str) -> Sequence[EventRow]:
    """When retention deleted what."""
    query = select(EventRow).where(EventRow.endpoint_id == endpoint_id, EventRow.kind == "retention")
    return (await session.scalars(query.order_by(EventRow.id))).all()


async def audit_of(session: AsyncSession, name: str, since: float) -> Sequence[AuditRow]:
    """Who changed it, by the chain of audit records. Names are free again once an endpoint is gone: hence `since`."""
    query = select(AuditRow).where(
        AuditRow.target == name, AuditRow.action.like("endpoint.%"), AuditRow.at >= since, AuditRow.seq.is_not(None)
    )
    return (await session.scalars(query.order_by(AuditRow.seq))).all()
