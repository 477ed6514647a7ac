"""Queries on how long endpoints took to their first tokens, from each rung of warmth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import Endpoint, Rung
from control_plane.store.endpoints import add_event, write_unless_changed
from control_plane.store.models import ColdStartRow, EndpointRow, UsageRow, WakeRow
from control_plane.warmth import FirstTokens, Way

Ways: TypeAlias = dict[Rung, list[Way]]
_COLD_STARTS = 20
_WAKES = 200
_REQUESTS = 100


async def ways_of(session: AsyncSession, endpoint: Endpoint) -> Ways:
    """An endpoint's last ways up, by rung; of those that it never went, others' with its model in its region."""
    own = await _ways(session, ColdStartRow.endpoint_id == endpoint.id, WakeRow.endpoint_id == endpoint.id)
    like_cold = (ColdStartRow.model == endpoint.model) & (ColdStartRow.region == endpoint.region)
    like_wake = (WakeRow.model == endpoint.model) & (WakeRow.region == endpoint.region)
    return (await _ways(session, like_cold, like_wake)) | own


async def ways_like(session: AsyncSession, model: str, region: str) -> Ways:
    """For an endpoint that isn't there yet."""
    return await _ways(
        session,
        (ColdStartRow.model == model) & (ColdStartRow.region == region),
        (WakeRow.model == model) & (WakeRow.region == region),
    )


async def newest_way(session: AsyncSession) -> tuple[float, int]:
    """Changes whenever a way up was measured, of any endpoint."""
    started = await session.scalar(select(func.max(ColdStartRow.at)))
    woken = await session.scalar(select(func.max(WakeRow.id)))
    return started or 0.0, woken or 0


async def first_tokens(session: AsyncSession, endpoint_id: str) -> FirstTokens:
    """Of an endpoint's last requests, those that found a replica ready and those that were held for one."""
    rest = UsageRow.ttft_ms - UsageRow.held_ms
    query = (
        select(rest)
        .where(UsageRow.endpoint_id == endpoint_id, UsageRow.ttft_ms.is_not(None))
        .order_by(UsageRow.started_at.desc())
        .limit(_REQUESTS)
    )
    found = [
        [value for value in await session.scalars(query.where(which)) if value is not None]
        for which in (UsageRow.held_ms < 1, UsageRow.held_ms >= 1)
    ]
    return FirstTokens(*found)


async def set_warmth(session: AsyncSession, endpoint: Endpoint, rung: Rung, why: str, now: float) -> bool:
    """Write a choice by what was measured, unless the endpoint changed since it was read."""
    as_read = (EndpointRow.warmth == endpoint.warmth, EndpointRow.warmth_by_wait.is_(True))
    if not await write_unless_changed(session, endpoint, as_read, warmth=rung):
        return False
    add_event(session, endpoint, now, "warmth", None, f"{endpoint.warmth} → {rung}: {why}")
    return True


async def _ways(session: AsyncSession, cold: ColumnElement[bool], wakes: ColumnElement[bool]) -> Ways:
    starts: Sequence[ColdStartRow] = (
        await session.scalars(select(ColdStartRow).where(cold).order_by(ColdStartRow.at.desc()).limit(_COLD_STARTS))
    ).all()
    woken: Sequence[WakeRow] = (
        await session.scalars(select(WakeRow).where(wakes).order_by(WakeRow.id.desc()).limit(_WAKES))
    ).all()
    found: Ways = {}
    for start in starts:
        found.setdefault(Rung.COLD, []).append(Way(start.total_ms, start.phases))
    for wake in woken:
        found.setdefault(Rung(wake.rung), []).append(Way(wake.total_ms, wake.phases))
    return found
