"""Queries on what an endpoint left behind: its replicas, what was admitted by which key, what is kept. Page by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import Endpoint
from control_plane.errors import NotFound
from control_plane.store.endpoints import to_endpoint
from control_plane.store.models import (
    AuditRow,
    EndpointRow,
    EventRow,
    GenerationRow,
    ReplicaRow,
    UsageHourRow,
    UsageRow,
)

PAGE = 100


async def endpoint_named(session: AsyncSession, name: str) -> Endpoint:
    """The endpoint of that name, or the last that had it. Raises NotFound."""
    newest = func.coalesce(EndpointRow.deleted_at, 1e18).desc()
    row = await session.scalar(select(EndpointRow).where(EndpointRow.name == name).order_by(newest).limit(1))
    if row is None:
        raise NotFound(f"no endpoint was ever named {name!r}", param="name")
    return to_endpoint(row)


async def generations_of(session: AsyncSession, endpoint_id: str, after: int) -> Sequence[GenerationRow]:
    query = select(GenerationRow).where(GenerationRow.endpoint_id == endpoint_id, GenerationRow.generation > after)
    return (await session.scalars(query.order_by(GenerationRow.generation).limit(PAGE))).all()


async def replicas_of(session: AsyncSession, endpoint_id: str, after: tuple[float, str]) -> Sequence[ReplicaRow]:
    """Oldest first, after a time and an id."""
    place = tuple_(ReplicaRow.created_at, ReplicaRow.id)
    query = select(ReplicaRow).where(ReplicaRow.endpoint_id == endpoint_id, place > after)
    return (await session.scalars(query.order_by(ReplicaRow.created_at, ReplicaRow.id).limit(PAGE))).all()


async def traffic_of(session: AsyncSession, endpoint_id: str, after: tuple[str, str]) -> list[dict[str, Any]]:
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
        .where(own.endpoint_id == endpoint_id, tuple_(own.key_id, own.region) > after)
        .group_by(own.tenant_id, own.key_id, own.region)
        .order_by(own.key_id, own.region)
        .limit(PAGE)
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
        ("replicas", ReplicaRow, ReplicaRow.created_at),
        ("generations", GenerationRow, GenerationRow.at),
    ):
        query = select(func.count(), func.min(at)).select_from(model).where(model.endpoint_id == endpoint_id)
        count, oldest = (await session.execute(query)).one()
        found[name] = {"count": count, "oldest_at": oldest}
    return found


async def deletions_of(session: AsyncSession, endpoint_id: str, after: int) -> Sequence[EventRow]:
    """When retention deleted what."""
    query = select(EventRow).where(
        EventRow.endpoint_id == endpoint_id, EventRow.kind == "retention", EventRow.id > after
    )
    return (await session.scalars(query.order_by(EventRow.id).limit(PAGE))).all()


async def audit_of(session: AsyncSession, endpoint: Endpoint, after: int) -> Sequence[AuditRow]:
    """Who changed it, by the chain of audit records. Another may have its name before and after it."""
    query = select(AuditRow).where(
        AuditRow.target == endpoint.name,
        AuditRow.action.like("endpoint.%"),
        AuditRow.at >= endpoint.created_at,
        AuditRow.seq > after,
    )
    if endpoint.deleted_at is not None:
        query = query.where(AuditRow.at <= endpoint.deleted_at)
    return (await session.scalars(query.order_by(AuditRow.seq).limit(PAGE))).all()
