"""Stops endpoints that have cost as much as they may this month, and lets them go on when they may again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from control_plane.domain import Endpoint
from control_plane.metering.bill import Spending, bill, month_start, stopped
from control_plane.metering.prices import NANO
from control_plane.observe import metrics
from control_plane.observe.logs import event
from control_plane.store import prices, spending
from control_plane.store.database import Store


async def enforce_spend(store: Store, known: Sequence[Endpoint], now: float) -> None:
    """Look at every endpoint that has a bound, or whose tenant has. Raises StoreUnavailable."""
    for one in known:
        if one.spend_limit is None:
            metrics.spend_used.labels(one.region, one.name).set(0.0)
    async with store.read() as session:
        limits = await spending.tenant_limits(session)
        bound = [one for one in known if one.spend_limit is not None or one.tenant_id in limits or one.stopped]
        if not bound:
            return
        books = await prices.list_books(session)
        since = month_start(now)
        found = [
            Spending(
                one.id,
                one.tenant_id,
                _nano(one.spend_limit),
                sum(
                    line.amount_nano
                    for line in bill(await spending.stories_of(session, one, since, now), books, since, now)
                ),
            )
            for one in (*bound, *await spending.ended_endpoints(session, list(limits), since))
        ]
    whose = stopped(found, {tenant_id: _nano(limit) for tenant_id, limit in limits.items()})
    spent = {item.endpoint_id: item.spent_nano / NANO for item in found}
    for one in bound:
        share = spent[one.id] / one.spend_limit if one.spend_limit else 0.0
        metrics.spend_used.labels(one.region, one.name).set(share)
        if (one.id in whose) is not one.stopped:
            await _write(store, one, whose, spent[one.id], now)


async def _write(store: Store, one: Endpoint, whose: Mapping[str, str], spent: float, now: float) -> None:
    stops = one.id in whose
    why = (
        f"stopped: the {whose[one.id]}'s spend limit is reached, {spent:.4f} this month" if stops else "may spend again"
    )
    async with store.write() as session:
        await spending.set_stopped(session, one, stops, why, now)
    event("endpoint.spend", endpoint=one.name, stopped=stops, spent=round(spent, 6))


def _nano(limit: float | None) -> int | None:
    return None if limit is None else round(limit * NANO)
