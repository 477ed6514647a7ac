"""The autoscaler: reads demand, decides, writes how many replicas each endpoint should have."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from control_plane.autoscaler.decide import AIM, Aim, Decision, Signals, decide
from control_plane.autoscaler.demand import LocalTimes, Memory, combine
from control_plane.autoscaler.retention import enforce_retention
from control_plane.autoscaler.spend import Spent, enforce_spend
from control_plane.config import Timing
from control_plane.domain import Demand, Endpoint, Replica
from control_plane.errors import StoreUnavailable
from control_plane.metering.prices import in_force
from control_plane.observe.logs import event
from control_plane.steady import Steady
from control_plane.store import endpoints, limits, prices, replicas, scaler, traffic, warmth
from control_plane.store.database import Store
from control_plane.warmth import choose, figures

_TIDY_SECONDS = 3600.0
_GATEWAY_MEMORY = 7 * 86_400.0
_KEEP_SECONDS = 5.0
"""How often what it remembers is written down."""
_MEASURE_SECONDS = 5.0
_SPEND_SECONDS = 5.0
_POINT = 60
"""Seconds that a measured point tells of."""
_POINT_AGE = 150.0


class Autoscaler:
    """Decides for every endpoint each tick, and at once when demand is reported in this process."""

    def __init__(
        self,
        store: Store,
        timing: Timing,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        aim: Aim = AIM,
    ) -> None:
        self._store = store
        self._timing = timing
        self._clock = clock
        self._monotonic = monotonic
        self._aim = aim
        self._times = LocalTimes(Steady(monotonic))
        self._memories: dict[str, Memory] | None = None
        self._kept_at = self._measured_at = float("-inf")
        self._spend_at = float("-inf")
        self._spent = Spent()
        self._newest_way: tuple[float, int] | None = None
        self._signals: dict[str, Signals] = {}
        self._poke = store.subscribe("demand", "endpoints")

    async def run(self) -> None:
        """Until cancelled."""
        tidied_at = float("-inf")
        while True:
            try:
                await self.tick()
                if self._monotonic() - tidied_at > _TIDY_SECONDS:
                    tidied_at = self._monotonic()
                    await self._tidy(self._clock())
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
            if self._memories is None:
                kept = await scaler.memories(session)
                self._memories = {
                    endpoint_id: Memory.load(state, max(0.0, now - at), now)
                    for endpoint_id, (at, state) in kept.items()
                }
            if self._monotonic() - self._measured_at > _MEASURE_SECONDS:
                self._measured_at = self._monotonic()
                measured = await scaler.measured(session, _POINT, now - _POINT_AGE)
                self._signals = {endpoint_id: Signals(*values) for endpoint_id, values in measured.items()}
        for endpoint in known:
            if not endpoint.deleting:
                memory = self._memories.setdefault(endpoint.id, Memory())
                decision = self._decide(
                    endpoint, reports.get(endpoint.id, []), running.get(endpoint.id, []), memory, now
                )
                if decision.replicas != endpoint.desired_replicas:
                    await self._write(endpoint, decision, now)
        names = {endpoint.id for endpoint in known}
        self._memories = {key: memory for key, memory in self._memories.items() if key in names}
        self._times.keep(known, [replica for own in running.values() for replica in own], reports)
        if self._monotonic() - self._spend_at > _SPEND_SECONDS:
            self._spend_at = self._monotonic()
            await enforce_spend(self._store, self._spent, known, now)
        if any(endpoint.warmth_by_wait for endpoint in known):
            await self._choose_rungs(known, now)
        await self._keep(now)

    def _decide(
        self, endpoint: Endpoint, reports: Sequence[Demand], running: Sequence[Replica], memory: Memory, now: float
    ) -> Decision:
        own = [self._times.replica(replica, now) for replica in running]
        told = [self._times.report(endpoint.id, report, now) for report in reports]
        load = combine(told, own, now, self._timing.demand_stale)
        signals = self._signals.get(endpoint.id, Signals())
        return decide(self._times.endpoint(endpoint, now), load, memory, signals, own, now, self._aim)

    async def _write(self, endpoint: Endpoint, decision: Decision, now: float) -> None:
        why = f"{decision.term}: {decision.why}"
        async with self._store.write() as session:
            written = await endpoints.set_desired(session, endpoint, decision.replicas, why, now)
        if written:
            event(
                "endpoint.scaled",
                endpoint=endpoint.name,
                before=endpoint.desired_replicas,
                after=decision.replicas,
                term=decision.term,
                why=decision.why,
            )

    async def _choose_rungs(self, known: Sequence[Endpoint], now: float) -> None:
        """For endpoints that are as warm as their wait asks for: what was measured since may tell another rung."""
        async with self._store.read() as session:
            newest = await warmth.newest_way(session)
        if newest == self._newest_way:
            return
        self._newest_way = newest
        for endpoint in known:
            if not endpoint.warmth_by_wait or endpoint.deleting:
                continue
            async with self._store.read() as session:
                book = in_force(await prices.list_books(session), now)
                ways = await warmth.ways_of(session, endpoint)
                tokens = await warmth.first_tokens(session, endpoint.id)
            rung, why = choose(figures(ways, tokens, book, endpoint.gpu, endpoint.gpus), endpoint.max_wait)
            if rung != endpoint.warmth and ways:
                async with self._store.write() as session:
                    await warmth.set_warmth(session, endpoint, rung, why, now)

    async def _keep(self, now: float) -> None:
        """Write down what a restart would lose."""
        if self._memories is None or self._monotonic() - self._kept_at < _KEEP_SECONDS:
            return
        states = {key: memory.dump(now) for key, memory in self._memories.items() if not memory.idle}
        if states:
            async with self._store.write() as session:
                await scaler.keep_memories(session, states, now)
        self._kept_at = self._monotonic()

    async def _tidy(self, now: float) -> None:
        async with self._store.write() as session:
            await traffic.forget_old_gateways(session, now - _GATEWAY_MEMORY)
            await limits.forget_windows(session, now)
            await endpoints.tidy(session, now)
            await scaler.forget_memories(session, list(self._memories or ()))
        async with self._store.read() as session:
            kept_for = [*await endpoints.list_endpoints(session), *await endpoints.list_deleted(session, now)]
        await enforce_retention(self._store, kept_for, now)
