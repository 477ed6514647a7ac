"""Queries on what gateways report of themselves and of demand."""

from __future__ import annotations

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import Demand
from control_plane.store.database import touch
from control_plane.store.models import DemandRow, GatewayRow, table_of
from control_plane.store.statements import insert_into

_DEMAND = select(table_of(DemandRow))


async def beat(session: AsyncSession, gateway_id: str, region: str, url: str, started_at: float, now: float) -> None:
    """A gateway's sign of life."""
    values = {"region": region, "url": url, "started_at": started_at, "heartbeat_at": now}
    statement = insert_into(session, GatewayRow).values(id=gateway_id, **values)
    await session.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))


async def gateway_urls(session: AsyncSession) -> dict[str, tuple[str, float]]:
    """By region: the URL of the gateway heard from last, and when that was."""
    rows = await session.scalars(select(GatewayRow).order_by(GatewayRow.heartbeat_at))
    return {row.region: (row.url, row.heartbeat_at) for row in rows}


async def live_gateways(session: AsyncSession, since: float) -> list[str]:
    """URLs of all gateways heard from since `since`."""
    return list(await session.scalars(select(GatewayRow.url).where(GatewayRow.heartbeat_at >= since)))


async def report_demand(session: AsyncSession, gateway_id: str, reports: dict[str, Demand]) -> None:
    """Write one gateway's view, by endpoint id. `last_finished_at` never goes back."""
    for endpoint_id, demand in reports.items():
        statement = insert_into(session, DemandRow).values(
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
    for row in await session.execute(_DEMAND):
        result.setdefault(row.endpoint_id, []).append(
            Demand(row.gateway_id, row.in_flight, row.held, row.last_finished_at, row.reported_at)
        )
    return result


async def forget_old_gateways(session: AsyncSession, before: float) -> None:
    """Drop gateways not heard from since `before`, and their idle demand rows."""
    await session.execute(delete(GatewayRow).where(GatewayRow.heartbeat_at < before))
    await session.execute(delete(DemandRow).where(DemandRow.reported_at < before))
