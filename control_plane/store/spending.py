"""Queries on what replicas cost, on endpoints that were stopped for it, and on drift from providers' inventories."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import case, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import Endpoint, ReplicaState, Rung
from control_plane.metering.bill import Story, bill, rung_of
from control_plane.metering.prices import PriceBook
from control_plane.store.database import touch
from control_plane.store.endpoints import add_event, bump_routes, to_endpoint
from control_plane.store.models import DriftRow, EndpointRow, EventRow, GenerationRow, ReplicaRow, TenantRow
from control_plane.store.statements import insert_into

DRIFT_KEPT = 10_000
STORIES = 200
"""Replicas of which is read at once."""


async def stories(
    session: AsyncSession,
    since: float,
    until: float,
    *,
    endpoint_id: str | None = None,
    name: str | None = None,
    tenant_id: str | None = None,
    after: str = "",
) -> list[tuple[Endpoint, Story]]:
    """The lives of replicas in `[since, until)`, of deleted endpoints too: the first `STORIES` after id `after`."""
    query = (
        select(ReplicaRow, EndpointRow, GenerationRow.spec)
        .join(EndpointRow, EndpointRow.id == ReplicaRow.endpoint_id)
        .outerjoin(
            GenerationRow,
            (GenerationRow.endpoint_id == ReplicaRow.endpoint_id) & (GenerationRow.generation == ReplicaRow.generation),
        )
        .where(
            ReplicaRow.id > after,
            ReplicaRow.created_at < until,
            ReplicaRow.terminated_at.is_(None) | (ReplicaRow.terminated_at > since),
        )
    )
    for column, value in (
        (ReplicaRow.endpoint_id, endpoint_id), (EndpointRow.name, name), (EndpointRow.tenant_id, tenant_id)
    ):  # fmt: skip
        if value is not None:
            query = query.where(column == value)
    rows = (await session.execute(query.order_by(ReplicaRow.id).limit(STORIES))).all()
    steps: dict[str, list[tuple[float, Rung]]] = {row.id: [(row.created_at, Rung.HOT)] for row, _, _ in rows}
    events = await session.stream(
        select(EventRow.replica_id, EventRow.at, EventRow.state, EventRow.reason_code)
        .where(EventRow.replica_id.in_(steps), EventRow.kind == "replica", EventRow.at < until)
        .order_by(EventRow.id)
    )
    async for replica_id, at, state, code in events:
        rung = rung_of(state, code)
        if replica_id is not None and rung is not None and steps[replica_id][-1][1] is not rung:
            steps[replica_id].append((at, rung))
    found = []
    for row, owner, spec in rows:
        ran = spec or {"gpu": owner.gpu, "gpus": owner.gpus}
        found.append((to_endpoint(owner), Story(row.id, ran["gpu"], ran["gpus"], steps[row.id], row.terminated_at)))
    return found


async def spent(
    session: AsyncSession, endpoint: Endpoint, books: Sequence[PriceBook], since: float, until: float
) -> int:
    """What an endpoint's replicas cost in `[since, until)`, in billionths."""
    total, after = 0, ""
    while page := await stories(session, since, until, endpoint_id=endpoint.id, after=after):
        total += sum(line.amount_nano for line in bill((story for _, story in page), books, since, until))
        after = page[-1][1].replica_id
    return total


async def billed_endpoints(
    session: AsyncSession,
    since: float,
    until: float,
    *,
    name: str | None = None,
    tenant_id: str | None = None,
    after: tuple[str, str] = ("", ""),
    limit: int = 100,
) -> list[Endpoint]:
    """Endpoints that were there in `[since, until)`, by name and id, after a name and an id."""
    query = select(EndpointRow).where(
        EndpointRow.created_at < until,
        EndpointRow.deleted_at.is_(None) | (EndpointRow.deleted_at >= since),
        (EndpointRow.name > after[0]) | ((EndpointRow.name == after[0]) & (EndpointRow.id > after[1])),
    )
    for column, value in ((EndpointRow.name, name), (EndpointRow.tenant_id, tenant_id)):
        if value is not None:
            query = query.where(column == value)
    rows = await session.scalars(query.order_by(EndpointRow.name, EndpointRow.id).limit(limit))
    return [to_endpoint(row) for row in rows]


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
