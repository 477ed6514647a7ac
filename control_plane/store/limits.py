"""Queries on limits that gateways share: parts of a window given out, and requests open under a bound."""

from __future__ import annotations

import calendar
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.store.models import LimitWindowRow, OpenRequestsRow
from control_plane.store.statements import insert_into

MINUTE = 60.0


class Kind(StrEnum):
    """What is counted. A budget's window is a UTC month, the others' a minute from its first use."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True)
class Ask:
    """What a gateway wants of one window: `want`, or nothing where fewer than `least` are left.

    `owed` was used beyond what was given, or (negative) was given and isn't needed.
    """

    scope: str
    kind: Kind
    limit: int
    least: int
    want: int
    owed: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """`used` is what all gateways were given in the window, this grant included."""

    granted: int
    used: int
    started_at: float


def window_start(kind: Kind, started_at: float, now: float) -> float:
    """When the window that holds `now` began, after one that began at `started_at`."""
    if kind is Kind.BUDGET:
        today = time.gmtime(now)
        return float(calendar.timegm((today.tm_year, today.tm_mon, 1, 0, 0, 0)))
    # Gateways' clocks differ: one that is behind is in the window that another has begun.
    return started_at if abs(now - started_at) < MINUTE else now


def window_end(kind: Kind, started_at: float) -> float:
    if kind is Kind.BUDGET:
        first = time.gmtime(started_at)
        year, month = (first.tm_year + 1, 1) if first.tm_mon == 12 else (first.tm_year, first.tm_mon + 1)
        return float(calendar.timegm((year, month, 1, 0, 0, 0)))
    return started_at + MINUTE


async def give_out(session: AsyncSession, asks: Sequence[Ask], now: float) -> dict[tuple[str, Kind], Grant]:
    """Give each ask its part of what its window has left."""
    grants = {}
    for ask in sorted(asks, key=lambda one: (one.scope, one.kind)):  # one order, so that gateways can't deadlock
        key = {"scope": ask.scope, "kind": ask.kind}
        await session.execute(
            insert_into(session, LimitWindowRow).values(**key, started_at=0.0, used=0).on_conflict_do_nothing()
        )
        row = (await session.scalars(select(LimitWindowRow).filter_by(**key).with_for_update())).one()
        start = window_start(ask.kind, row.started_at, now)
        used = (row.used if start == row.started_at else 0) + ask.owed
        room = ask.limit - used
        granted = min(ask.want, room) if room >= ask.least else 0
        row.started_at, row.used = start, max(0, used + granted)
        grants[ask.scope, ask.kind] = Grant(granted, row.used, start)
    await session.flush()
    return grants


async def forget_windows(session: AsyncSession, now: float) -> None:
    """Drop windows that are over, and reports of gateways long gone."""
    over = (LimitWindowRow.kind != Kind.BUDGET) & (LimitWindowRow.started_at < now - 2 * MINUTE)
    last_month = LimitWindowRow.started_at < window_start(Kind.BUDGET, 0.0, now)
    await session.execute(delete(LimitWindowRow).where(over | ((LimitWindowRow.kind == Kind.BUDGET) & last_month)))
    await session.execute(delete(OpenRequestsRow).where(OpenRequestsRow.reported_at < now - 10 * MINUTE))


async def report_open(session: AsyncSession, gateway_id: str, counts: Mapping[str, int], now: float) -> None:
    """Write how many requests this gateway has open, by scope."""
    for scope, count in sorted(counts.items()):
        values = {"open": count, "reported_at": now}
        statement = insert_into(session, OpenRequestsRow).values(scope=scope, gateway_id=gateway_id, **values)
        await session.execute(statement.on_conflict_do_update(index_elements=["scope", "gateway_id"], set_=values))


async def open_elsewhere(session: AsyncSession, gateway_id: str, since: float) -> dict[str, int]:
    """Requests open on other gateways that were heard from after `since`, by scope."""
    rows = await session.execute(
        select(OpenRequestsRow.scope, func.sum(OpenRequestsRow.open))
        .where(OpenRequestsRow.gateway_id != gateway_id, OpenRequestsRow.reported_at >= since)
        .group_by(OpenRequestsRow.scope)
    )
    return {scope: int(count) for scope, count in rows}
