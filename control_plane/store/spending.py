"""Queries on what replicas cost, and on endpoints that were stopped for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import Endpoint, Rung, SpendStop
from control_plane.metering.bill import Story, bill, rung_of
from control_plane.metering.prices import PriceBook
from control_plane.store.database import touch
from control_plane.store.endpoints import add_event, bump_routes, to_endpoint
from control_plane.store.models import EndpointRow, EventRow, GenerationRow, ReplicaRow, TenantRow

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
    replica_ids: Collection[str] | None = None,
    ended_by: float | None = None,
    not_ended_by: float | None = None,
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
    if replica_ids is not None:
        query = query.where(ReplicaRow.id.in_(replica_ids))
    if ended_by is not None:
        query = query.where(ReplicaRow.terminated_at <= ended_by)
    if not_ended_by is not None:
        query = query.where(ReplicaRow.terminated_at.is_(None) | (ReplicaRow.terminated_at > not_ended_by))
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
        end = row.terminated_at if row.refused_at is None else row.created_at
        found.append((to_endpoint(owner), Story(row.id, ran["gpu"], ran["gpus"], steps[row.id], end)))
    return found


async def spent(
    session: AsyncSession,
    endpoint: Endpoint,
    books: Sequence[PriceBook],
    since: float,
    until: float,
    *,
    ended_by: float | None = None,
    not_ended_by: float | None = None,
) -> int:
    """What an endpoint's replicas cost in `[since, until)`, in billionths."""
    total, after = 0, ""
    while page := await stories(
        session, since, until, endpoint_id=endpoint.id, ended_by=ended_by, not_ended_by=not_ended_by, after=after
    ):
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


async def set_stop(session: AsyncSession, endpoint: Endpoint, stop: SpendStop | None, why: str, now: float) -> bool:
    """Stop an endpoint for what it cost, or let it go on; what was given up on before is then tried again.

    False where another did so first.
    """
    if stop is not None:
        changes = {"stopped_at": stop.at, "stopped_by": stop.whose, "stopped_limit_nano": stop.limit_nano}
        as_before = EndpointRow.stopped_at.is_(None)
    else:
        nothing = dict.fromkeys(("stopped_at", "stopped_by", "stopped_limit_nano"))
        changes = {**nothing, "failed_generation": 0, "failures": 0, "retry_at": 0.0}
        as_before = EndpointRow.stopped_at.is_not(None)
    statement = update(EndpointRow).where(EndpointRow.id == endpoint.id, as_before).values(**changes)
    if await session.scalar(statement.returning(EndpointRow.id)) is None:
        return False
    add_event(session, endpoint, now, "spend", "spend_limit_reached" if stop is not None else None, why)
    await bump_routes(session)
    touch(session, "endpoints")
    return True
