"""Queries on usage: single events, their sums by UTC hour, and what replicas did meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from decimal import Decimal
from operator import attrgetter
from typing import Any

from sqlalchemy import Select, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import UsageEvent
from control_plane.metering.cost import Life
from control_plane.store.models import ApiKeyRow, ReplicaRow, UsageHourRow, UsageRow
from control_plane.store.statements import insert_into

HOUR = 3600
_GROUP = ("hour", "tenant_id", "key_id", "endpoint_id", "price_version")
_SUMS = (
    "requests", "prompt_tokens", "completion_tokens", "cached_tokens", "wasted_tokens", "cost_nano", "duration_ms",
    "ttft_ms", "streams",
)  # fmt: skip
_EVENT = tuple(field.name for field in fields(UsageEvent))
_values_of = attrgetter(*_EVENT)


async def add_usage(session: AsyncSession, events: Sequence[UsageEvent]) -> None:
    """Write finished requests and add them to their hours; one that is there already counts once."""
    if not events:
        return
    statement = insert_into(session, UsageRow).on_conflict_do_nothing(index_elements=["request_id"])
    by_id = {event.request_id: event for event in events}
    rows = [dict(zip(_EVENT, _values_of(event), strict=True)) for event in by_id.values()]
    new = await session.scalars(statement.returning(UsageRow.request_id), rows)
    hours: dict[tuple[Any, ...], dict[str, Any]] = {}
    for request_id in new:
        _add(hours, by_id[request_id])
    for _, values in sorted(hours.items()):
        insert = insert_into(session, UsageHourRow).values(**values)
        sums = {name: getattr(UsageHourRow, name) + getattr(insert.excluded, name) for name in _SUMS}
        await session.execute(insert.on_conflict_do_update(index_elements=list(_GROUP), set_=sums))


def _add(hours: dict[tuple[Any, ...], dict[str, Any]], event: UsageEvent) -> None:
    hour = int(event.started_at // HOUR) * HOUR
    key = (hour, event.tenant_id, event.key_id, event.endpoint_id, event.price_version)
    sums = hours.setdefault(
        key,
        dict(zip(_GROUP, key, strict=True))
        | {"endpoint_name": event.endpoint_name, "region": event.region}
        | dict.fromkeys(_SUMS, 0),
    )
    sums["requests"] += 1
    sums["streams"] += event.ttft_ms is not None
    sums["ttft_ms"] += event.ttft_ms or 0.0
    for name in _SUMS[1:-2]:
        sums[name] += getattr(event, name)


async def note_key_use(session: AsyncSession, used: dict[str, float]) -> None:
    """Remember when keys were used last; never goes back."""
    for key_id, at in sorted(used.items()):
        await session.execute(
            update(ApiKeyRow)
            .where(ApiKeyRow.id == key_id, func.coalesce(ApiKeyRow.last_used_at, 0.0) < at)
            .values(last_used_at=at)
        )


async def usage_summary(
    session: AsyncSession,
    *,
    since: float,
    until: float,
    tenant_id: str | None = None,
    endpoint: str | None = None,
    by_hour: bool = False,
) -> list[dict[str, Any]]:
    """Requests and tokens by tenant, endpoint and region (and hour) of the UTC hours that touch `[since, until)`."""
    group: list[Any] = [UsageHourRow.tenant_id, UsageHourRow.endpoint_name, UsageHourRow.region]
    if by_hour:
        group.insert(0, UsageHourRow.hour)
    streams = func.nullif(func.sum(UsageHourRow.streams), 0)
    query: Select[Any] = select(
        *group,
        *(func.sum(getattr(UsageHourRow, name)).label(name) for name in _SUMS[:6]),
        (func.sum(UsageHourRow.duration_ms) / func.sum(UsageHourRow.requests)).label("mean_duration_ms"),
        (func.sum(UsageHourRow.ttft_ms) / streams).label("mean_ttft_ms"),
    ).where(UsageHourRow.hour > since - HOUR, UsageHourRow.hour < until)
    if tenant_id:
        query = query.where(UsageHourRow.tenant_id == tenant_id)
    if endpoint:
        query = query.where(UsageHourRow.endpoint_name == endpoint)
    rows = await session.execute(query.group_by(*group).order_by(*group))
    return [{name: _number(value) for name, value in row._mapping.items()} for row in rows]


async def tokens_cost(session: AsyncSession, endpoint_id: str, since: float, until: float) -> tuple[int, int, int]:
    """Requests, tokens and their price in billionths, of the UTC hours that touch `[since, until)`."""
    tokens = UsageHourRow.prompt_tokens + UsageHourRow.completion_tokens
    row = (
        await session.execute(
            select(func.sum(UsageHourRow.requests), func.sum(tokens), func.sum(UsageHourRow.cost_nano)).where(
                UsageHourRow.endpoint_id == endpoint_id, UsageHourRow.hour > since - HOUR, UsageHourRow.hour < until
            )
        )
    ).one()
    return int(row[0] or 0), int(row[1] or 0), int(row[2] or 0)


async def lives(session: AsyncSession, endpoint_id: str, since: float, until: float) -> list[Life]:
    """The replicas that an endpoint had in `[since, until)`."""
    rows = await session.scalars(
        select(ReplicaRow).where(
            ReplicaRow.endpoint_id == endpoint_id,
            ReplicaRow.created_at < until,
            (ReplicaRow.terminated_at.is_(None)) | (ReplicaRow.terminated_at > since),
        )
    )
    return [Life(row.id, row.created_at, row.terminated_at) for row in rows]


async def work(
    session: AsyncSession, endpoint_id: str, since: float, until: float, limit: int
) -> list[tuple[str, float, float]]:
    """Replica, start and end of the first `limit` requests that an endpoint served in `[since, until)`, by start."""
    start = UsageRow.started_at + UsageRow.held_ms / 1000
    end = UsageRow.started_at + UsageRow.duration_ms / 1000
    rows = await session.execute(
        select(UsageRow.replica_id, start, end)
        .where(UsageRow.endpoint_id == endpoint_id, UsageRow.started_at < until, end > since)
        .order_by(start)
        .limit(limit)
    )
    return [(replica_id or "", float(begin), float(finish)) for replica_id, begin, finish in rows]


async def delete_events(session: AsyncSession, endpoint_id: str | None, before: float, limit: int) -> int:
    """Delete at most `limit` single events that began before `before`; their hours stay. Returns how many."""
    doomed = select(UsageRow.request_id).where(UsageRow.started_at < before)
    if endpoint_id is not None:
        doomed = doomed.where(UsageRow.endpoint_id == endpoint_id)
    gone = await session.execute(delete(UsageRow).where(UsageRow.request_id.in_(doomed.limit(limit))))
    return int(getattr(gone, "rowcount", 0))


def _number(value: Any) -> Any:
    """PostgreSQL sums whole numbers to decimals."""
    if isinstance(value, Decimal):
        return int(value)
    return round(value, 1) if isinstance(value, float) else value
