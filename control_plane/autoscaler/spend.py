"""Stops endpoints that have cost as much as they may this month, and lets them go on when they may again."""

from __future__ import annotations

from collections.abc import Sequence, Set

from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import Endpoint, SpendStop
from control_plane.metering.bill import Bound, Spending, bounds, month_start, stopping
from control_plane.metering.prices import NANO, PriceBook, in_force
from control_plane.observe import metrics
from control_plane.observe.logs import event
from control_plane.store import prices, spending
from control_plane.store.database import Store

_SETTLED_SECONDS = 3600.0
"""What ended so long ago costs no more, by any controller's clock."""


class Spent:
    """What endpoints' replicas have cost. What has ended is added up once an hour, not at every look."""

    def __init__(self) -> None:
        self._settled: dict[str, tuple[tuple[float, float, int], int]] = {}

    async def of(
        self, session: AsyncSession, one: Endpoint, books: Sequence[PriceBook], since: float, now: float
    ) -> int:
        """In billionths, in `[since, now)`."""
        by = (now // _SETTLED_SECONDS - 1) * _SETTLED_SECONDS
        key = (since, by, in_force(books, now).version)
        known = self._settled.get(one.id)
        if known is None or known[0] != key:
            known = (key, await spending.spent(session, one, books, since, now, ended_by=by))
            self._settled[one.id] = known
        return known[1] + await spending.spent(session, one, books, since, now, not_ended_by=by)

    def keep(self, endpoint_ids: Set[str]) -> None:
        """Forget all others."""
        self._settled = {key: value for key, value in self._settled.items() if key in endpoint_ids}


async def enforce_spend(store: Store, spent: Spent, known: Sequence[Endpoint], now: float) -> None:
    """Look at every endpoint that has a bound, or whose tenant has. Raises StoreUnavailable."""
    async with store.read() as session:
        limits = await spending.tenant_limits(session)
        limited = [one for one in known if one.spend_limit is not None or one.tenant_id in limits or one.stopped]
        found = await _spendings(session, spent, limited, list(limits), now) if limited or limits else []
    bounds_of = bounds(found, {tenant_id: round(limit * NANO) for tenant_id, limit in limits.items()})
    for one in known:
        own = bounds_of.get(one.id, [])
        metrics.spend_used.labels(one.region, one.name).set(own[0].share if own else 0.0)
        reached = stopping(own, one.stop, now)
        if (reached is not None) is not one.stopped:
            await _write(store, one, reached, now)


async def _spendings(
    session: AsyncSession, spent: Spent, bound: Sequence[Endpoint], tenant_ids: Sequence[str], now: float
) -> list[Spending]:
    books = await prices.list_books(session)
    since = month_start(now)
    counted = [*bound, *await spending.ended_endpoints(session, tenant_ids, since)]
    spent.keep({one.id for one in counted})
    return [
        Spending(
            one.id,
            one.tenant_id,
            _nano(one.spend_limit),
            await spent.of(session, one, books, since, now),
        )
        for one in counted
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
