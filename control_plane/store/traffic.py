"""Queries on what gateways report: themselves, demand, usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from decimal import Decimal
from typing import Any

from sqlalchemy import Insert, Select, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import Demand, UsageEvent
from control_plane.store.database import touch
from control_plane.store.models import Base, DemandRow, GatewayRow, UsageRow


async def beat(session: AsyncSession, gateway_id: str, region: str, url: str, started_at: float, now: float) -> None:
    """A gateway's sign of life."""
    values = {"region": region, "url": url, "started_at": started_at, "heartbeat_at": now}
    statement = _insert(session, GatewayRow).values(id=gateway_id, **values)
    await session.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))


async def gateway_urls(session: AsyncSession) -> dict[str, tuple[str, float]]:
    """By region: the URL of the gateway heard from last, and when that was."""
    rows = await session.scalars(select(GatewayRow).order_by(GatewayRow.heartbeat_at))
    return {row.region: (row.url, row.heartbeat_at) for row in rows}


async def report_demand(session: AsyncSession, gateway_id: str, reports: dict[str, Demand]) -> None:
    """Write one gateway's view, by endpoint id. `last_finished_at` never goes back."""
    for endpoint_id, demand in reports.items():
        statement = _insert(session, DemandRow).values(
            endpoint_id=endpoint_id,
            gateway_id=gateway_id,
            in_flight=demand.in_flight,
            held=demand.held,
            last_finished_at=demand.last_finished_at,
            reported_at=demand.reported_at,
        )
        new = statement.excluded
        later = func.greatest if session.get_bind().dialect.name == "postgresql" else func.max
        await session.execute(
            statement.on_conflict_do_update(
                index_elements=["endpoint_id", "gateway_id"],
                set_={
                    "in_flight": new.in_flight,
                    "held": new.held,
                    "last_finished_at": later(DemandRow.last_finished_at, new.last_finished_at),
                    "reported_at": new.reported_at,
                },
            )
        )
    touch(session, "demand")


async def demand_by_endpoint(session: AsyncSession) -> dict[str, list[Demand]]:
    result: dict[str, list[Demand]] = {}
    for row in await session.scalars(select(DemandRow)):
        result.setdefault(row.endpoint_id, []).append(
            Demand(row.gateway_id, row.in_flight, row.held, row.last_finished_at, row.reported_at)
        )
    return result


async def forget_old_gateways(session: AsyncSession, before: float) -> None:
    """Drop gateways not heard from since `before`, and their idle demand rows."""
    await session.execute(delete(GatewayRow).where(GatewayRow.heartbeat_at < before))
    await session.execute(delete(DemandRow).where(DemandRow.reported_at < before))


async def add_usage(session: AsyncSession, events: Sequence[UsageEvent]) -> None:
    """Write finished requests; one that is there already stays as it is."""
    if events:
        statement = _insert(session, UsageRow).on_conflict_do_nothing(index_elements=["request_id"])
        await session.execute(statement, [asdict(event) for event in events])


async def usage_summary(
    session: AsyncSession, *, since: float, until: float, tenant_id: str | None = None, endpoint: str | None = None
) -> list[dict[str, Any]]:
    """Requests and tokens by tenant, endpoint and region in `[since, until)`."""
    group = (UsageRow.tenant_id, UsageRow.endpoint_name, UsageRow.region)
    query: Select[Any] = select(
        *group,
        func.count().label("requests"),
        func.sum(UsageRow.prompt_tokens).label("prompt_tokens"),
        func.sum(UsageRow.completion_tokens).label("completion_tokens"),
        func.sum(UsageRow.cached_tokens).label("cached_tokens"),
        func.avg(UsageRow.duration_ms).label("mean_duration_ms"),
        func.avg(UsageRow.ttft_ms).label("mean_ttft_ms"),
    ).where(UsageRow.started_at >= since, UsageRow.started_at < until)
    if tenant_id:
        query = query.where(UsageRow.tenant_id == tenant_id)
    if endpoint:
        query = query.where(UsageRow.endpoint_name == endpoint)
    rows = await session.execute(query.group_by(*group).order_by(*group))
    return [{name: _number(value) for name, value in row._mapping.items()} for row in rows]


def _number(value: Any) -> Any:
    """PostgreSQL sums whole numbers to decimals."""
    if isinstance(value, Decimal):
        return int(value)
    return round(value, 1) if isinstance(value, float) else value


def _insert(session: AsyncSession, row: type[Base]) -> Any:
    """An INSERT of the dialect at hand: both have ON CONFLICT, each in a class of its own."""
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    statement: Insert = dialect.insert(row)
    return statement
