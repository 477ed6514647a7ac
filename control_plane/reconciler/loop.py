"""The reconciler: leases an endpoint, looks, plans, writes, acts. Level-triggered: every tick looks at all of it.

Provider calls happen outside transactions and after the write that announces them; writes are guarded by the lease.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.config import Timing
from control_plane.domain import Endpoint, EndpointState, Phase, Replica, ReplicaSpec, ReplicaState, Rung
from control_plane.errors import LeaseLost, ProviderError, ProviderRefused, StoreUnavailable
from control_plane.observe import metrics
from control_plane.observe.logs import event
from control_plane.observe.tracing import Tracing
from control_plane.providers.base import Provider
from control_plane.reconciler.actions import (
    Action,
    Call,
    ChangeEndpoint,
    ChangeReplica,
    Drain,
    Ensure,
    Launch,
    Policy,
    RecordColdStart,
    RecordWake,
    Rest,
    Seen,
    SettleGeneration,
    Terminate,
    Wake,
)
from control_plane.reconciler.holding import Holding
from control_plane.reconciler.plan import after_failure, plan
from control_plane.reconciler.probe import Prober
from control_plane.reconciler.scale import resting_rung, wanted_replicas
from control_plane.reconciler.sweep import sweep
from control_plane.reconciler.telling import observe_start, trace_rollout
from control_plane.security.mesh import PLAIN, Link
from control_plane.steady import Steady
from control_plane.store import endpoints as endpoint_store
from control_plane.store import generations, leases, replicas
from control_plane.store.database import Store
from control_plane.store.ids import new_id

_AT_ONCE = 32
_SWEEP = "sweep"
_FRESH_SECONDS = 1.0
"""How long what was read under a lease is worked by."""
_STAMPS = ("created_at", "ready_at", "unhealthy_at", "draining_at", "woken_at")
_MOVING = frozenset({ReplicaState.INTENDED, ReplicaState.STARTING, ReplicaState.DRAINING, ReplicaState.TERMINATING})
_WANTED_ENDS = frozenset({"not_wanted", "outdated", "endpoint_paused", "deleting"})
_RESTING = frozenset({EndpointState.ZERO, EndpointState.FAILED, EndpointState.PAUSED})


class Reconciler:
    """Keeps every endpoint moving towards what was asked.

    `providers` is by region. `owner` names this process in leases.
    """

    def __init__(
        self,
        store: Store,
        providers: Mapping[str, Provider],
        timing: Timing,
        *,
        owner: str,
        link: Link = PLAIN,
        replica_token: Callable[[str], str] = lambda _: "",
        tracing: Tracing | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._providers = providers
        self._timing = timing
        self._link = link
        self._tracing = tracing
        self._replica_token = replica_token
        self._clock = clock
        self._monotonic = monotonic
        self._steady = Steady(monotonic)
        self._jitter = jitter
        self._policy = Policy(
            liveness_grace=timing.liveness_grace,
            start_timeout=timing.start_timeout,
            drain_settle=timing.drain_settle,
            drain_timeout=timing.drain_timeout,
            stable_after=timing.stable_after,
            backoff_base=timing.backoff_base,
            backoff_cap=timing.backoff_cap,
            max_failures=timing.max_failures,
        )
        self._holding = Holding(store, owner, timing.lease, clock)
        self._sought: set[str] = set()
        """Endpoints that had something to do at the last tick."""
        self._unknown: set[str] = set()
        """Replicas of which their provider didn't know when it was asked last; it was said once."""
        self._poke = store.subscribe("endpoints")
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._working: dict[str, asyncio.Task[None]] = {}
        """What is under way, by endpoint, and the sweep: one that is slow keeps nobody else waiting."""
        self._swept_at = float("-inf")

    async def run(self) -> None:
        """Until cancelled; then its leases are free."""
        prober = Prober(self._timing.probe_timeout, self._link, self._replica_token)
        try:
            await self._holding.inherit()
            while True:
                moving = False
                try:
                    moving = await self.tick(prober)
                except StoreUnavailable as error:
                    event("reconciler.store_unavailable", level=logging.WARNING, reason=error.message)
                except Exception as error:  # a fault of one tick must not end the loop
                    event("reconciler.fault", level=logging.ERROR, error=error)
                await self._poke.wait(self._timing.starting_tick if moving else self._timing.tick)
        finally:
            for task in self._working.values():
                task.cancel()
            await asyncio.gather(*self._working.values(), return_exceptions=True)
            await prober.close()
            await self._holding.release()

    async def tick(self, prober: Prober) -> bool:
        """Look at every endpoint that isn't being worked on, and wait for them, though not for long.

        Returns whether a replica is on its way up or down.
        """
        elsewhere = await self._holding.renew(self._sought, self._working.keys())
        worked_on, read_at = set(self._working), self._monotonic()
        async with self._store.read() as session:
            known = await endpoint_store.list_endpoints(session)
            by_endpoint: dict[str, list[Replica]] = {}
            for replica in await replicas.live_replicas(session):
                by_endpoint.setdefault(replica.endpoint_id, []).append(replica)
        work = [
            endpoint
            for endpoint in known
            if endpoint.region in self._providers and (_restless(endpoint) or endpoint.id in by_endpoint)
        ]
        self._sought = {endpoint.id for endpoint in work}
        for endpoint in work:
            if endpoint.id in elsewhere:
                continue
            # what was read while it was worked on may be from before that work's own writes
            own = None if endpoint.id in worked_on else by_endpoint.get(endpoint.id, [])
            self._start(endpoint.id, self._one(prober, endpoint, own, read_at))
        live = [replica for own in by_endpoint.values() for replica in own]
        self._steady.keep(
            [(replica.id, name) for replica in live for name in _STAMPS] + [(endpoint.id, "retry") for endpoint in work]
        )
        self._unknown &= {replica.id for replica in live}
        if self._monotonic() - self._swept_at > self._timing.sweep:
            self._swept_at = self._monotonic()
            self._start(_SWEEP, sweep(self._store, self._providers, self._clock(), self._timing.drift_tolerance))
        if self._working:
            await asyncio.wait(set(self._working.values()), timeout=self._timing.tick)
        return any(replica.state in _MOVING for replica in live)

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        if name in self._working:
            work.close()
            return
        task = self._working[name] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._working.pop(name, None))

    async def _one(self, prober: Prober, endpoint: Endpoint, own: list[Replica] | None, read_at: float) -> None:
        """`endpoint` and `own` were read at `read_at`; where they can't be worked by, they are read again."""
        async with self._slots:
            try:
                lease = self._holding.held(endpoint.id)
                if lease is not None and own is not None and self._monotonic() - read_at < _FRESH_SECONDS:
                    await self._reconcile(prober, lease, endpoint, own)
                    return
                if lease is None:
                    lease = await self._holding.take(endpoint.id)
                if lease is not None:
                    # read again under the lease: what was read before it may be another controller's past
                    async with self._store.read() as session:
                        found = await endpoint_store.get_endpoint_by_id(session, endpoint.id)
                        own = await replicas.live_replicas(session, [endpoint.id])
                    if found is not None:
                        await self._reconcile(prober, lease, found, own)
            except LeaseLost:
                self._holding.lose(endpoint.id)
                event("reconciler.lease_lost", endpoint=endpoint.id)
            except StoreUnavailable as error:
                event("reconciler.store_unavailable", level=logging.WARNING, reason=error.message)
            except Exception as error:  # one endpoint's fault must not stop the others
                event("reconciler.fault", level=logging.ERROR, endpoint=endpoint.id, error=error)

    async def _reconcile(self, prober: Prober, lease: leases.Lease, endpoint: Endpoint, known: list[Replica]) -> None:
        provider = self._providers[endpoint.region]
        observed = await asyncio.gather(*(self._look(provider, prober, endpoint, replica) for replica in known))
        seen = {replica.id: sight for replica, sight in zip(known, observed, strict=True) if sight is not None}
        metrics.replicas_desired.labels(endpoint.region, endpoint.name).set(wanted_replicas(endpoint))
        ready = sum(replica.state is ReplicaState.READY for replica in known)
        metrics.replicas_ready.labels(endpoint.region, endpoint.name).set(ready)
        metrics.endpoint_failed.labels(endpoint.region, endpoint.name).set(endpoint.given_up)
        for counter in (metrics.start_failures, metrics.replica_losses):
            counter.labels(endpoint.region, endpoint.name)  # begins at 0, so that the first one is seen
        now = self._clock()
        local = [self._local(replica, now) for replica in known]
        retry_at = self._steady.due((endpoint.id, "retry"), endpoint.retry_at, now, self._timing.backoff_cap)
        actions = plan(replace(endpoint, retry_at=retry_at), local, seen, now, self._policy, self._jitter())
        if actions and not await self._stand_again(provider, actions):
            calls = await self._write(lease, endpoint, known, actions)
            for action in calls:
                await self._act(lease, provider, prober, endpoint, seen, action)

    async def _stand_again(self, provider: Provider, actions: list[Action]) -> bool:
        """Whether any that is about to be called terminated came into being while all else was looked at."""
        ended = [
            action.replica_id
            for action in actions
            if isinstance(action, ChangeReplica) and action.changes.get("state") is ReplicaState.TERMINATED
        ]
        again = await asyncio.gather(*(provider.describe(replica_id) for replica_id in ended))
        return any(description.phase is not Phase.ABSENT for description in again)

    def _local(self, replica: Replica, now: float) -> Replica:
        """A row as if this process's clock had stamped it."""
        changes: dict[str, Any] = {}
        for name in _STAMPS:
            stamp = getattr(replica, name)
            if stamp is not None:
                changes[name] = self._steady.local((replica.id, name), stamp, now)
        return replace(replica, **changes)

    async def _look(self, provider: Provider, prober: Prober, endpoint: Endpoint, replica: Replica) -> Seen | None:
        """None where the provider doesn't know now: the replica is then as it was seen last."""
        try:
            description = await provider.describe(replica.id)
        except ProviderError as error:
            if replica.id not in self._unknown:
                self._unknown.add(replica.id)
                event("provider.error", level=logging.WARNING, endpoint=endpoint.name, replica=replica.id,
                      code=error.code, reason=error.message)  # fmt: skip
            return None
        self._unknown.discard(replica.id)
        if description.phase is not Phase.RUNNING or description.address is None:
            return Seen(description)
        if replica.state is ReplicaState.TERMINATING:
            return Seen(description)
        health = await prober.ask(replica.id, description.address)
        proof = proof_ms = None
        if health.healthy and health.rung is Rung.HOT and _is_to_prove(endpoint, replica):
            began = self._monotonic()
            proof = await prober.prove(replica.id, description.address, endpoint.name)
            proof_ms = None if proof else round((self._monotonic() - began) * 1000, 1)
        return Seen(description, health.healthy, health.busy, health.rung, health.wake_phases, proof, proof_ms)

    async def _write(
        self, lease: leases.Lease, endpoint: Endpoint, known: list[Replica], actions: list[Action]
    ) -> list[Call]:
        """Write all that was decided in one guarded transaction; return the provider calls to make after it."""
        now = self._clock()
        calls: list[Call] = []
        if all(isinstance(action, Call) for action in actions):
            return [action for action in actions if isinstance(action, Call)]
        states = {replica.id: replica.state for replica in known}
        async with self._store.write() as session:
            await leases.guard(session, lease, now)
            for action in actions:
                match action:
                    case Launch(why, generation, rung):
                        replica_id = new_id("rep")
                        await replicas.add_intent(session, replica_id, endpoint, generation, rung, now)
                        endpoint_store.add_event(
                            session, endpoint, now, "replica", None, why, state="intended", replica_id=replica_id
                        )
                        calls.append(Ensure(replica_id))
                    case ChangeReplica():
                        await self._change_replica(session, endpoint, states, action, now)
                    case RecordColdStart(replica_id, total_ms, phases):
                        await endpoint_store.add_cold_start(session, endpoint, replica_id, total_ms, phases, now)
                        observe_start(self._tracing, endpoint, replica_id, total_ms, phases, now)
                    case RecordWake(replica_id, rung, total_ms, phases):
                        await generations.add_wake(session, endpoint, replica_id, rung, total_ms, phases, now)
                        observe_start(self._tracing, endpoint, replica_id, total_ms, phases, now, rung)
                    case SettleGeneration(generation, outcome, code, reason):
                        await generations.settle(session, endpoint.id, generation, outcome, code, reason, now)
                    case ChangeEndpoint(changes):
                        await self._change_endpoint(session, endpoint, changes, now)
                    case Ensure() | Drain() | Terminate() | Rest() | Wake():
                        calls.append(action)
        return calls

    async def _change_replica(
        self,
        session: AsyncSession,
        endpoint: Endpoint,
        states: Mapping[str, ReplicaState],
        action: ChangeReplica,
        now: float,
    ) -> None:
        await replicas.write_replica(session, action.replica_id, action.changes)
        state = action.changes.get("state")
        if state is None or state == states.get(action.replica_id):
            return
        if state is ReplicaState.TERMINATING and action.reason_code not in _WANTED_ENDS:
            served = states.get(action.replica_id) in (ReplicaState.READY, ReplicaState.UNHEALTHY)
            counter = metrics.replica_losses if served else metrics.start_failures
            counter.labels(endpoint.region, endpoint.name).inc()
        await endpoint_store.bump_routes(session)
        endpoint_store.add_event(
            session,
            endpoint,
            now,
            "replica",
            action.reason_code,
            action.reason,
            state=state,
            replica_id=action.replica_id,
        )
        event(
            "replica.state",
            endpoint=endpoint.name,
            replica=action.replica_id,
            state=str(state),
            code=action.reason_code,
            reason=action.reason,
        )

    async def _change_endpoint(
        self, session: AsyncSession, endpoint: Endpoint, changes: Mapping[str, Any], now: float
    ) -> None:
        await endpoint_store.write_observed(session, endpoint, changes, now)
        if self._tracing is not None:
            trace_rollout(self._tracing, endpoint, changes, now)
        if {"state", "reason_code"} & changes.keys():
            state = changes.get("state", endpoint.state)
            code = changes.get("reason_code", endpoint.reason_code)
            reason = changes.get("reason", endpoint.reason)
            endpoint_store.add_event(session, endpoint, now, "state", code, reason, state=state)
            event("endpoint.state", endpoint=endpoint.name, state=str(state), code=code, reason=reason)
            if state is EndpointState.DELETED:
                metrics.forget(endpoint.region, endpoint.name)

    async def _act(
        self,
        lease: leases.Lease,
        provider: Provider,
        prober: Prober,
        endpoint: Endpoint,
        seen: Mapping[str, Seen],
        action: Call,
    ) -> None:
        sight = seen.get(action.replica_id)
        address = sight.description.address if sight else None
        try:
            match action:
                case Ensure(replica_id):
                    await self._ensure(provider, endpoint, replica_id)
                case Drain(replica_id):
                    await provider.drain(replica_id)
                case Terminate(replica_id):
                    await provider.terminate(replica_id)
                case Rest(replica_id, rung) if address is not None:
                    await prober.rest(replica_id, address, rung)
                case Wake(replica_id) if address is not None:
                    await prober.wake(replica_id, address)
                    self._poke.set()
        except ProviderError as error:
            event(
                "provider.error", level=logging.WARNING, endpoint=endpoint.name, code=error.code, reason=error.message
            )
            if isinstance(action, Ensure):
                await self._ensure_failed(lease, endpoint.id, action.replica_id, error)

    async def _ensure(self, provider: Provider, endpoint: Endpoint, replica_id: str) -> None:
        """By its row as it was written: what another generation runs may be another thing."""
        async with self._store.read() as session:
            (replica,) = await replicas.by_id(session, [replica_id])
        await provider.ensure(_spec(endpoint, replica))

    async def _ensure_failed(
        self, lease: leases.Lease, endpoint_id: str, replica_id: str, error: ProviderError
    ) -> None:
        """Count the failure. A clear no ends the replica's row; otherwise something may run, and ensure is repeated."""
        now = self._clock()
        refused = isinstance(error, ProviderRefused)
        async with self._store.write() as session:
            await leases.guard(session, lease, now)
            endpoint = await endpoint_store.get_endpoint_by_id(session, endpoint_id)
            if endpoint is None:
                return
            permanent = isinstance(error, ProviderRefused) and error.permanent
            row = next(iter(await replicas.by_id(session, [replica_id])), None)
            fresh = endpoint.proven or row is None or row.generation >= endpoint.runtime_generation
            changes = after_failure(
                endpoint, error.code, error.message, permanent, now, self._policy, self._jitter(), fresh=fresh
            )
            await self._change_endpoint(session, endpoint, changes, now)
            if changes["failed_generation"] == endpoint.generation:
                await generations.settle(
                    session, endpoint.id, endpoint.generation, generations.FAILED, error.code, error.message, now
                )
            if refused:
                action = ChangeReplica(
                    replica_id,
                    {
                        "state": ReplicaState.TERMINATING,
                        "reason_code": error.code,
                        "reason": error.message,
                        "refused_at": now,
                    },
                    error.code,
                    error.message,
                )
                await self._change_replica(session, endpoint, {}, action, now)


def _restless(endpoint: Endpoint) -> bool:
    """Whether an endpoint without replicas has something to do."""
    changed = endpoint.observed_generation != endpoint.generation and not endpoint.given_up
    if endpoint.state not in _RESTING or endpoint.deleting or changed:
        return True
    if endpoint.paused != (endpoint.state is EndpointState.PAUSED):
        return True
    if endpoint.state is EndpointState.PAUSED:
        return False
    if resting_rung(endpoint) is not None:
        return True
    return endpoint.desired_replicas > 0 and (endpoint.falls_back or not endpoint.given_up)


def _is_to_prove(endpoint: Endpoint, replica: Replica) -> bool:
    """Whether it is the first of what is asked: it gets no traffic before it has generated something."""
    starts = replica.state in (ReplicaState.INTENDED, ReplicaState.STARTING)
    return starts and not endpoint.proven and replica.generation >= endpoint.runtime_generation


def _spec(endpoint: Endpoint, replica: Replica) -> ReplicaSpec:
    runtime = endpoint.runtime_of(replica.generation)
    return ReplicaSpec(
        replica_id=replica.id,
        endpoint_name=endpoint.name,
        region=endpoint.region,
        model=runtime.model,
        gpu=runtime.gpu,
        gpus=runtime.gpus,
        engine_args=runtime.engine_args,
        rung=replica.rung,
    )
