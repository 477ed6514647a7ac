"""Queries on what an endpoint was asked to be, generation by generation, and on its wakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import Endpoint, Rung
from control_plane.errors import NotFound
from control_plane.store.models import GenerationRow, ReplicaRow, WakeRow, table_of

GENERATIONS_KEPT = 100
WAKES_KEPT = 200
PENDING, SERVING, SERVED, FAILED, SUPERSEDED = "pending", "serving", "served", "failed", "superseded"

_WAKES = table_of(WakeRow)
_RANK = (
    func.row_number()
    .over(partition_by=(_WAKES.c.endpoint_id, _WAKES.c.rung), order_by=_WAKES.c.id.desc())
    .label("rank")
)
_RECENT = select(_WAKES.c.endpoint_id, _WAKES.c.rung, _WAKES.c.total_ms, _RANK).subquery()
_MEANS = (
    select(_RECENT.c.endpoint_id, _RECENT.c.rung, func.avg(_RECENT.c.total_ms))
    .where(_RECENT.c.rank <= 5)
    .group_by(_RECENT.c.endpoint_id, _RECENT.c.rung)
)


async def record(
    session: AsyncSession, endpoint: Endpoint, spec: Mapping[str, Any], changed: Sequence[str], now: float
) -> None:
    """Write down a new generation; one that was still pending is superseded by it."""
    own = GenerationRow.endpoint_id == endpoint.id
    await session.execute(
        update(GenerationRow)
        .where(own, GenerationRow.outcome == PENDING)
        .values(outcome=SUPERSEDED, settled_at=now, reason=f"generation {endpoint.generation} was asked for instead")
    )
    session.add(
        GenerationRow(
            endpoint_id=endpoint.id,
            generation=endpoint.generation,
            at=now,
            spec=dict(spec),
            changed=sorted(changed),
            outcome=PENDING,
            reason="",
        )
    )
    await session.flush()
    # what a replica on record ran on says what it cost
    named = select(ReplicaRow.generation).where(ReplicaRow.endpoint_id == endpoint.id)
    old = GenerationRow.generation <= endpoint.generation - GENERATIONS_KEPT
    await session.execute(delete(GenerationRow).where(own, old, GenerationRow.generation.not_in(named)))


async def settle(
    session: AsyncSession,
    endpoint_id: str,
    generation: int,
    outcome: str,
    reason_code: str | None,
    reason: str,
    now: float,
) -> None:
    """Write what became of one. Where it serves, the one that did before it served."""
    own = GenerationRow.endpoint_id == endpoint_id
    if outcome == SERVING:
        await session.execute(
            update(GenerationRow)
            .where(own, GenerationRow.outcome == SERVING, GenerationRow.generation != generation)
            .values(outcome=SERVED)
        )
    await session.execute(
        update(GenerationRow)
        .where(own, GenerationRow.generation == generation)
        .values(outcome=outcome, settled_at=now, reason_code=reason_code, reason=reason[:2000])
    )


async def history(session: AsyncSession, endpoint_id: str, limit: int) -> list[GenerationRow]:
    """Newest first."""
    query = select(GenerationRow).where(GenerationRow.endpoint_id == endpoint_id)
    return list(await session.scalars(query.order_by(GenerationRow.generation.desc()).limit(limit)))


async def to_return_to(session: AsyncSession, endpoint: Endpoint, generation: int | None) -> GenerationRow:
    """The generation that is asked for, or the newest before this one that served. Raises NotFound."""
    query = select(GenerationRow).where(
        GenerationRow.endpoint_id == endpoint.id, GenerationRow.generation < endpoint.generation
    )
    if generation is None:
        query = query.where(GenerationRow.outcome.in_((SERVING, SERVED)))
    else:
        query = query.where(GenerationRow.generation == generation)
    row = await session.scalar(query.order_by(GenerationRow.generation.desc()).limit(1))
    if row is None:
        which = "that served before" if generation is None else f"{generation} before {endpoint.generation}"
        raise NotFound(f"{endpoint.name} has no generation {which}: `ingle endpoint history` shows them", param="to")
    return row


async def add_wake(
    session: AsyncSession,
    endpoint: Endpoint,
    replica_id: str,
    rung: Rung,
    total_ms: float,
    phases: Mapping[str, float],
    now: float,
) -> None:
    session.add(
        WakeRow(
            endpoint_id=endpoint.id,
            replica_id=replica_id,
            rung=rung,
            model=endpoint.model,
            region=endpoint.region,
            at=now,
            total_ms=total_ms,
            phases=dict(phases),
        )
    )
    await session.flush()
    own = (WakeRow.endpoint_id == endpoint.id) & (WakeRow.rung == rung)
    kept = select(WakeRow.id).where(own).order_by(WakeRow.id.desc()).limit(WAKES_KEPT)
    await session.execute(delete(WakeRow).where(own, WakeRow.id.not_in(kept)))


async def list_wakes(session: AsyncSession, endpoint_id: str, rung: Rung, limit: int) -> list[WakeRow]:
    """An endpoint's last wakes from a rung, newest first."""
    query = select(WakeRow).where(WakeRow.endpoint_id == endpoint_id, WakeRow.rung == rung)
    return list(await session.scalars(query.order_by(WakeRow.id.desc()).limit(limit)))


async def wake_estimates(session: AsyncSession) -> dict[tuple[str, str], float]:
    """Milliseconds from a rung to ready, by endpoint and rung: the mean of the last five."""
    return {(endpoint_id, rung): float(mean) for endpoint_id, rung, mean in await session.execute(_MEANS)}
