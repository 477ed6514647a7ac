"""The autoscaler: reads demand, decides, writes how many replicas each endpoint should have."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from control_plane.autoscaler.decide import decide
from control_plane.autoscaler.demand import PeakWindow, combine
from control_plane.autoscaler.retention import enforce_retention
from control_plane.config import Timing
from control_plane.domain import Replica
from control_plane.errors import StoreUnavailable
from control_plane.observe.logs import event
from control_plane.store import endpoints, limits, replicas, traffic
from control_plane.store.database import Store

PEAK_SECONDS = 60.0
_TIDY_SECONDS = 3600.0
_GATEWAY_MEMORY = 7 * 86_400.0
_HISTORY = 90 * 86_400.0


class Autoscaler:
    """Decides for every endpoint each tick, and at once when demand is reported in this process."""

    def __init__(self, store: Store, timing: Timing, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._timing = timing
        self._clock = clock
        self._peaks: dict[str, PeakWindow] = {}
        self._poke = store.subscribe("demand", "endpoints")

    async def run(self) -> None:
        """Until cancelled."""
        tidied_at = 0.0
        while True:
            try:
                await self.tick()
                if self._clock() - tidied_at > _TIDY_SECONDS:
                    tidied_at = self._clock()
                    async with self._store.write() as session:
                        await traffic.forget_old_gateways(session, tidied_at - _GATEWAY_MEMORY)
                        await limits.forget_windows(session, tidied_at)
                        await endpoints.tidy(session, tidied_at - _HISTORY)
                    async with self._store.read() as session:
                        known = await endpoints.list_endpoints(session)
                    await enforce_retention(self._store, known, tidied_at)
            except StoreUnavailable as error:
                event("autoscaler.store_unavailable", level=logging.WARNING, reason=error.message)
            except Exception as error:  # a fault of one tick must not end the loop
                event("autoscaler.fault", level=logging.ERROR, error=error)
            await self._poke.wait(self._timing.tick)

    async def tick(self) -> None:
        now = self._clock()
        async with self._store.read() as session:
            known = await endpoints.list_endpoints(session)
            reports = await traffic.demand_by_endpoint(session)
            running: dict[str, list[Replica]] = {}
            for replica in await replicas.live_replicas(session):
                running.setdefault(replica.endpoint_id, []).append(replica)
        for endpoint in known:
            own = running.get(endpoint.id, [])
            load = combine(reports.get(endpoint.id, []), own, now, self._timing.demand_stale)
            peak = self._peaks.setdefault(endpoint.id, PeakWindow(PEAK_SECONDS)).add(load.total, now)
            decision = decide(endpoint, load, peak, own, now)
            if decision.replicas == endpoint.desired_replicas or endpoint.deleting:
                continue
            async with self._store.write() as session:
                if await endpoints.set_desired(session, endpoint, decision.replicas, decision.why, now):
                    event(
                        "endpoint.scaled",
                        endpoint=endpoint.name,
                        before=endpoint.desired_replicas,
                        after=decision.replicas,
                        why=decision.why,
                    )
        for gone in self._peaks.keys() - {endpoint.id for endpoint in known}:
            del self._peaks[gone]
