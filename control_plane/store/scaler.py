"""Queries for the autoscaler: what it remembers, and what was measured of late."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import bindparam, delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.store.models import HistoryRow, ScalerRow, table_of
from control_plane.store.statements import insert_into

_HISTORY = table_of(HistoryRow)
_NEWEST = (
    select(_HISTORY.c.endpoint_id, func.max(_HISTORY.c.at).label("at"))
    .where(_HISTORY.c.step == bindparam("step"), _HISTORY.c.at >= bindparam("since"))
    .group_by(_HISTORY.c.endpoint_id)
    .subquery()
)
_MEASURED = (
    select(_HISTORY.c.endpoint_id, _HISTORY.c.ttft_p95, _HISTORY.c.kv_usage)
    .join(_NEWEST, (_HISTORY.c.endpoint_id == _NEWEST.c.endpoint_id) & (_HISTORY.c.at == _NEWEST.c.at))
    .where(_HISTORY.c.step == bindparam("step"))
)


async def memories(session: AsyncSession) -> dict[str, tuple[float, dict[str, Any]]]:
    """By endpoint: when its state was kept, and the state."""
    return {row.endpoint_id: (row.at, row.state) for row in await session.scalars(select(ScalerRow))}


async def keep_memories(session: AsyncSession, states: Mapping[str, Mapping[str, Any]], now: float) -> None:
    for endpoint_id, state in states.items():
        values = {"at": now, "state": dict(state)}
        statement = insert_into(session, ScalerRow).values(endpoint_id=endpoint_id, **values)
        await session.execute(statement.on_conflict_do_update(index_elements=["endpoint_id"], set_=values))


async def forget_memories(session: AsyncSession, but: Collection[str]) -> None:
    await session.execute(delete(ScalerRow).where(ScalerRow.endpoint_id.not_in(but)))


async def measured(session: AsyncSession, step: int, since: float) -> dict[str, tuple[float | None, float | None]]:
    """By endpoint: the newest p95 of times to the first token (seconds) and KV use that were kept since `since`."""
    rows = await session.execute(_MEASURED, {"step": step, "since": int(since)})
    return {endpoint_id: (ttft, used) for endpoint_id, ttft, used in rows}
