"""Queries on replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import Address, Endpoint, Replica, ReplicaState, Rung, Weights
from control_plane.store.models import ReplicaRow, table_of

_REPLICAS = table_of(ReplicaRow)
_LIVE = (
    select(_REPLICAS)
    .where(_REPLICAS.c.state != ReplicaState.TERMINATED)
    .order_by(_REPLICAS.c.created_at, _REPLICAS.c.id)
)


def to_replica(row: Row[Any]) -> Replica:
    return Replica(
        id=row.id,
        endpoint_id=row.endpoint_id,
        generation=row.generation,
        region=row.region,
        state=ReplicaState(row.state),
        address=Address(row.host, row.port) if row.host is not None and row.port is not None else None,
        reason_code=row.reason_code,
        reason=row.reason,
        created_at=row.created_at,
        ready_at=row.ready_at,
        unhealthy_at=row.unhealthy_at,
        draining_at=row.draining_at,
        terminated_at=row.terminated_at,
        startup_ms=row.startup_ms,
        busy=row.busy,
        rung=Rung(row.rung),
        woken_at=row.woken_at,
        weights=None if row.weights_from is None else Weights(row.weights_from, row.weights_region),
    )


async def add_intent(
    session: AsyncSession, replica_id: str, endpoint: Endpoint, generation: int, rung: Rung, now: float
) -> None:
    """The row that stands before anything that can cost money is started."""
    session.add(
        ReplicaRow(
            id=replica_id,
            endpoint_id=endpoint.id,
            generation=generation,
            region=endpoint.region,
            state=ReplicaState.INTENDED,
            reason="",
            created_at=now,
            busy=0,
            rung=rung,
        )
    )
    await session.flush()


async def live_replicas(session: AsyncSession, endpoint_ids: Sequence[str] | None = None) -> list[Replica]:
    """Every replica that isn't terminated, oldest first; of the given endpoints only, if any are given."""
    query = _LIVE if endpoint_ids is None else _LIVE.where(_REPLICAS.c.endpoint_id.in_(endpoint_ids))
    return [to_replica(row) for row in await session.execute(query)]


async def by_id(session: AsyncSession, ids: Sequence[str]) -> list[Replica]:
    return [to_replica(row) for row in await session.execute(select(_REPLICAS).where(_REPLICAS.c.id.in_(ids)))]


async def recent_replicas(session: AsyncSession, endpoint_id: str, limit: int = 20) -> list[Replica]:
    """An endpoint's newest replicas, terminated ones too, newest first."""
    rows = await session.execute(
        select(_REPLICAS)
        .where(_REPLICAS.c.endpoint_id == endpoint_id)
        .order_by(_REPLICAS.c.created_at.desc(), _REPLICAS.c.id)
        .limit(limit)
    )
    return [to_replica(row) for row in rows]


async def replica_states(session: AsyncSession, ids: Sequence[str]) -> dict[str, ReplicaState]:
    rows = await session.execute(select(_REPLICAS.c.id, _REPLICAS.c.state).where(_REPLICAS.c.id.in_(ids)))
    return {replica_id: ReplicaState(state) for replica_id, state in rows}


async def write_replica(session: AsyncSession, replica_id: str, changes: Mapping[str, Any]) -> None:
    """Write what the reconciler found. The caller holds the endpoint's lease and guards the transaction by it."""
    await session.execute(update(_REPLICAS).where(_REPLICAS.c.id == replica_id).values(**changes))
