"""Queries on what replicas cost, on endpoints that were stopped for it, and on drift from providers' inventories."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import case, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import Endpoint, ReplicaState, Rung
from control_plane.metering.bill import Story, rung_of
from control_plane.store.database import touch
from control_plane.store.endpoints import add_event, bump_routes, to_endpoint
from control_plane.store.models import DriftRow, EndpointRow, EventRow, GenerationRow, ReplicaRow, TenantRow
from control_plane.store.statements import insert_into

DRIFT_KEPT = 10_000
_MOST_EVENTS = 100_000


async def stories_of(session: AsyncSession, endpoint: Endpoint, since: float, until: float) -> list[Story]:
    """The lives of the replicas that an endpoint had in `[since, until)`, from their rows and events."""
    rows = (
        await session.scalars(
            select(ReplicaRow)
            .where(
                ReplicaRow.endpoint_id == endpoint.id,
                ReplicaRow.created_at < until,
                ReplicaRow.terminated_at.is_(None) | (ReplicaRow.terminated_at > since),
            )
            .order_by(ReplicaRow.created_at, ReplicaRow.id)
        )
    ).all()
    query = select(GenerationRow.generation, GenerationRow.spec).where(GenerationRow.endpoint_id == endpoint.id)
    specs: dict[int, dict[str, Any]] = {row.generation: row.spec for row in await session.execute(query)}
    changes: dict[str, list[tuple[float, Rung]]] = {row.id: [(row.created_at, Rung.HOT)] for row in rows}
    events = await session.execute(
        select(EventRow.replica_id, EventRow.at, EventRow.state, EventRow.reason_code)
        .where(EventRow.endpoint_id == endpoint.id, EventRow.kind == "replica", EventRow.replica_id.in_(changes))
        .order_by(EventRow.id)
        .limit(_MOST_EVENTS)
    )
    for replica_id, at, state, code in events:
        rung = rung_of(state, code)
        if rung is not None and replica_id is not None and changes[replica_id][-1][1] is not rung:
            changes[replica_id].append((at, rung))
    found = []
    for row in rows:
        spec = specs.get(row.generation, {"gpu": endpoint.gpu, "gpus": endpoint.gpus})
        found.append(Story(row.id, spec["gpu"], spec["gpus"], changes[row.id], row.terminated_at))
    return found


async def tenant_limits(session: AsyncSession) -> dict[str, float]:
    """By tenant id, where there is one."""
    rows = await session.execute(select(TenantRow.id, TenantRow.spend_limit).where(TenantRow.spend_limit.is_not(None)))
    return {tenant_id: float(limit) for tenant_id, limit in rows if limit is not None}


async def ended_endpoints(session: AsyncSession, tenant_ids: Collection[str], since: float) -> list[Endpoint]:
    """Endpoints of those tenants that were deleted since: what they cost was spent all the same."""
    query = select(EndpointRow).where(EndpointRow.tenant_id.in_(tenant_ids), EndpointRow.deleted_at >= since)
    return [to_endpoint(row) for row in await session.scalars(query)]


async def set_stopped(session: AsyncSession, endpoint: Endpoint, stopped: bool, why: str, now: float) -> None:
    """Stop an endpoint for what it cost, or let it go on."""
    await session.execute(
        update(EndpointRow).where(EndpointRow.id == endpoint.id).values(stopped_at=now if stopped else None)
    )
    add_event(session, endpoint, now, "spend", "spend_limit_reached" if stopped else None, why)
    await bump_routes(session)
    touch(session, "endpoints")


async def note_drift(session: AsyncSession, regions: Collection[str], owned: Collection[str], now: float) -> list[str]:
    """Hold a provider's inventory against our rows: what only one side has is drift, until both agree again.

    Returns the ids of replicas that are new among it. Replicas that are on their way into or out of being are no drift.
    """
    sure = (ReplicaState.READY, ReplicaState.RESTING, ReplicaState.UNHEALTHY)
    rows = (
        await session.execute(
            select(ReplicaRow.id, ReplicaRow.region, ReplicaRow.endpoint_id, ReplicaRow.state).where(
                ReplicaRow.region.in_(regions), (ReplicaRow.state != ReplicaState.TERMINATED) | ReplicaRow.id.in_(owned)
            )
        )
    ).all()
    known = {row.id: row for row in rows}
    found: dict[tuple[str, str], tuple[str, str | None, str]] = {}
    for row in rows:
        if row.state in sure and row.id not in owned:
            found[row.id, "theirs_missing"] = (row.region, row.endpoint_id, row.state)
    for replica_id in owned:
        ours = known.get(replica_id)
        if ours is None:
            found[replica_id, "ours_missing"] = (next(iter(regions)), None, "nothing")
        elif ours.state == ReplicaState.TERMINATED:
            found[replica_id, "ours_missing"] = (ours.region, ours.endpoint_id, ours.state)
    open_rows = {
        (row.replica_id, row.kind)
        for row in await session.scalars(
            select(DriftRow).where(DriftRow.settled_at.is_(None), DriftRow.region.in_(regions))
        )
    }
    for replica_id, kind in open_rows - found.keys():
        own = (DriftRow.replica_id == replica_id) & (DriftRow.kind == kind)
        await session.execute(update(DriftRow).where(own).values(settled_at=now))
    for (replica_id, kind), (region, endpoint_id, state) in found.items():
        values = {"region": region, "endpoint_id": endpoint_id, "we_say": state, "seen_at": now, "settled_at": None}
        statement = insert_into(session, DriftRow).values(replica_id=replica_id, kind=kind, since=now, **values)
        began = case((DriftRow.settled_at.is_not(None), now), else_=DriftRow.since)  # one that comes back is another
        changes = {**values, "since": began}
        await session.execute(statement.on_conflict_do_update(index_elements=["replica_id", "kind"], set_=changes))
    if found or open_rows:
        kept = select(DriftRow.since).order_by(DriftRow.since.desc()).offset(DRIFT_KEPT).limit(1)
        oldest = await session.scalar(kept)
        if oldest is not None:
            await session.execute(delete(DriftRow).where(DriftRow.since <= oldest))
    return [replica_id for replica_id, kind in found.keys() - open_rows]


async def standing_drift(session: AsyncSession, regions: Collection[str]) -> dict[str, int]:
    """By region, how much isn't settled."""
    query = select(DriftRow.region, func.count().label("many")).where(
        DriftRow.settled_at.is_(None), DriftRow.region.in_(regions)
    )
    return {row.region: row.many for row in await session.execute(query.group_by(DriftRow.region))}


async def list_drift(session: AsyncSession, limit: int) -> Sequence[DriftRow]:
    """Newest first; what isn't settled before all else."""
    order = (func.coalesce(DriftRow.settled_at, 1e18).desc(), DriftRow.since.desc())
    return (await session.scalars(select(DriftRow).order_by(*order).limit(limit))).all()
