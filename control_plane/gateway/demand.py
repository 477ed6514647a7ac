"""What this gateway has open per endpoint, reported to the store so that endpoints wake and sleep by it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from control_plane.domain import Demand
from control_plane.errors import StoreUnavailable
from control_plane.gateway.exchange import Exchange
from control_plane.gateway.snapshot import Route, SnapshotKeeper
from control_plane.observe import metrics
from control_plane.observe.logs import event
from control_plane.store import traffic
from control_plane.store.database import Poke, Store

_GATHER_SECONDS = 0.02


@dataclass(slots=True)
class _Count:
    in_flight: int = 0
    held: int = 0
    wanted: bool = False
    """Somebody asked and didn't wait: worth a start all the same."""
    last_finished_at: float = 0.0
    reported: tuple[int, int, float] = (0, 0, 0.0)


class DemandTracker:
    """Counts, and reports each `interval` seconds; at once when a request has nowhere to go."""

    def __init__(
        self, store: Store, gateway_id: str, region: str, *, interval: float, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._gateway_id = gateway_id
        self._region = region
        self._interval = interval
        self._clock = clock
        self._counts: dict[str, _Count] = {}
        self._urgent = Poke()

    @contextmanager
    def in_flight(self, route: Route, exchange: Exchange) -> Iterator[None]:
        """One request, from its admission to the end of its reply, held or not.

        One that never went to a replica, because its client gave up, keeps none awake.
        """
        count = self._counts.setdefault(route.endpoint_id, _Count())
        gauge = metrics.running.labels(self._region, route.name)
        count.in_flight += 1
        gauge.inc()
        try:
            yield
        finally:
            count.in_flight -= 1
            gauge.dec()
            if exchange.dispatched:
                count.last_finished_at = self._clock()

    @contextmanager
    def held(self, route: Route) -> Iterator[None]:
        """The time during which a request waits for a replica."""
        count = self._counts.setdefault(route.endpoint_id, _Count())
        gauge = metrics.held.labels(self._region, route.name)
        count.held += 1
        count.in_flight -= 1
        gauge.inc()
        self._urgent.set()
        try:
            yield
        finally:
            count.held -= 1
            count.in_flight += 1
            gauge.dec()

    def held_count(self, endpoint_id: str) -> int:
        count = self._counts.get(endpoint_id)
        return count.held if count else 0

    def want(self, route: Route) -> None:
        """Raise demand for an endpoint without waiting for it."""
        self._counts.setdefault(route.endpoint_id, _Count()).wanted = True
        self._urgent.set()

    async def run(self, keeper: SnapshotKeeper) -> None:
        """Report until cancelled."""
        while True:
            await self._urgent.wait(self._interval)
            await asyncio.sleep(_GATHER_SECONDS)
            await self.report(keeper)

    async def report(self, keeper: SnapshotKeeper) -> None:
        now = self._clock()
        alive = {route.endpoint_id for route in keeper.current.routes.values()}
        for endpoint_id, count in list(self._counts.items()):
            if endpoint_id not in alive and not count.in_flight and not count.held:
                del self._counts[endpoint_id]
        due: dict[str, Demand] = {}
        for endpoint_id in self._counts.keys() & alive:
            count = self._counts[endpoint_id]
            held = count.held or int(count.wanted)
            state = (count.in_flight, held, count.last_finished_at)
            if count.in_flight or held or state != count.reported:
                due[endpoint_id] = Demand(self._gateway_id, *state, now)
        if not due:
            return
        try:
            async with self._store.write() as session:
                await traffic.report_demand(session, self._gateway_id, due)
        except StoreUnavailable as error:
            event("gateway.demand_not_reported", level=logging.WARNING, region=self._region, reason=error.message)
            return
        for endpoint_id, demand in due.items():
            count = self._counts[endpoint_id]
            if count.wanted and demand.held:
                count.wanted = False
                count.last_finished_at = max(count.last_finished_at, now)
            count.reported = (demand.in_flight, demand.held, demand.last_finished_at)
