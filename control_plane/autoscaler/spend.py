"""Stops endpoints that have cost as much as they may this month, and lets them go on when they may again."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import Endpoint, SpendStop
from control_plane.metering.bill import Bound, Spending, bounds, month_start, stopping
from control_plane.metering.prices import NANO
from control_plane.observe import metrics
from control_plane.observe.logs import event
from control_plane.store import prices, spending
from control_plane.store.database import Store


async def enforce_spend(store: Store, known: Sequence[Endpoint], now: float) -> None:
    """Look at every endpoint that has a bound, or whose tenant has. Raises StoreUnavailable."""
    async with store.read() as session:
        limits = await spending.tenant_limits(session)
        limited = [one for one in known if one.spend_limit is not None or one.tenant_id in limits or one.stopped]
        found = await _spendings(session, limited, list(limits), now) if limited or limits else []
    bounds_of = bounds(found, {tenant_id: round(limit * NANO) for tenant_id, limit in limits.items()})
    for one in known:
        own = bounds_of.get(one.id, [])
        metrics.spend_used.labels(one.region, one.name).set(own[0].share if own else 0.0)
        reached = stopping(own, one.stop, now)
        if (reached is not None) is not one.stopped:
            await _write(store, one, reached, now)


async def _spendings(
    session: AsyncSession, bound: Sequence[Endpoint], tenant_ids: Sequence[str], now: float
) -> list[Spending]:
    books = await prices.list_books(session)
    since = month_start(now)
    return [
        Spending(
            one.id,
            one.tenant_id,
            _nano(one.spend_limit),
            await spending.spent(session, one, books, since, now),
        )
        for one in (*bound, *await spending.ended_endpoints(session, tenant_ids, since))
    ]


async def _write(store: Store, one: Endpoint, reached: Bound | None, now: float) -> None:
    why, stop = "may spend again", None
    if reached is not None:
        stop = SpendStop(now, reached.whose, reached.limit_nano)
        why = f"stopped: the {reached.whose}'s spend limit is reached, {reached.spent_nano / NANO:.4f} this month"
    async with store.write() as session:
        written = await spending.set_stop(session, one, stop, why, now)
    if written:
        event("endpoint.spend", endpoint=one.name, stopped=reached is not None)


def _nano(limit: float | None) -> int | None:
    return None if limit is None else round(limit * NANO)
