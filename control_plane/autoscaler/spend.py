"""Stops endpoints that have cost as much as they may this month, and lets them go on when they may again."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import Endpoint
from control_plane.metering.bill import Bound, Spending, bounds, month_start
from control_plane.metering.prices import NANO
from control_plane.observe import metrics
from control_plane.observe.logs import event
from control_plane.store import prices, spending
from control_plane.store.database import Store


async def enforce_spend(store: Store, known: Sequence[Endpoint], now: float) -> None:
    """Look at every endpoint that has a bound, or whose tenant has. Raises StoreUnavailable."""
    async with store.read() as session:
        limits = await spending.tenant_limits(session)
        bound = [one for one in known if one.spend_limit is not None or one.tenant_id in limits or one.stopped]
        found = await _spendings(session, bound, list(limits), now) if bound or limits else []
    first = bounds(found, {tenant_id: round(limit * NANO) for tenant_id, limit in limits.items()})
    for one in known:
        nearest = first.get(one.id)
        metrics.spend_used.labels(one.region, one.name).set(nearest.share if nearest else 0.0)
        stops = nearest is not None and nearest.reached
        if stops is not one.stopped:
            await _write(store, one, nearest if stops else None, now)


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
    why = "may spend again"
    if reached is not None:
        why = f"stopped: the {reached.whose}'s spend limit is reached, {reached.spent_nano / NANO:.4f} this month"
    async with store.write() as session:
        await spending.set_stopped(session, one, reached is not None, why, now)
    event("endpoint.spend", endpoint=one.name, stopped=reached is not None)


def _nano(limit: float | None) -> int | None:
    return None if limit is None else round(limit * NANO)
