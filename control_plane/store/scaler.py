"""Queries for the autoscaler: what it remembers, and what was measured of late."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.store.models import HistoryRow, ScalerRow
from control_plane.store.statements import insert_into


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
    newest = (
        select(HistoryRow.endpoint_id, func.max(HistoryRow.at).label("at"))
        .where(HistoryRow.step == step, HistoryRow.at >= int(since))
        .group_by(HistoryRow.endpoint_id)
        .subquery()
    )
    rows = await session.execute(
        select(HistoryRow.endpoint_id, HistoryRow.ttft_p95, HistoryRow.kv_usage)
        .join(newest, (HistoryRow.endpoint_id == newest.c.endpoint_id) & (HistoryRow.at == newest.c.at))
        .where(HistoryRow.step == step)
    )
    return {endpoint_id: (ttft, used) for endpoint_id, ttft, used in rows}
