"""The real scaler as a rule for replays: `autoscaler.decide` on rows as the store would have them."""

from __future__ import annotations

from dataclasses import replace

from control_plane.autoscaler.decide import AIM, NO_SIGNALS, Aim, Signals, decide
from control_plane.autoscaler.demand import Load, Memory
from control_plane.domain import Endpoint, EndpointState, Replica, ReplicaState
from control_plane.planning.replay import Fleet, Server

_POINT = 60.0
"""Seconds that a measured point tells of."""


class Ours:
    """An endpoint's settings at work. Simulated time begins on a Monday's midnight, UTC, for schedules."""

    def __init__(self, endpoint: Endpoint, *, tick: float = 1.0, aim: Aim = AIM) -> None:
        self.tick = tick
        self._endpoint = endpoint
        self._aim = aim
        self._memory = Memory()
        self._rows: dict[int, Replica] = {}
        self._minute = -1.0
        self._signals = NO_SIGNALS

    def wanted(self, fleet: Fleet, now: float) -> int:
        at = now + _EPOCH
        load = Load(fleet.in_flight, fleet.held, fleet.last_finished_at + _EPOCH if fleet.last_finished_at else 0.0)
        rows = [self._row(server, now) for server in fleet.servers]
        decision = decide(self._endpoint, load, self._memory, self._measure(fleet, now), rows, at, self._aim)
        if decision.replicas != self._endpoint.desired_replicas:
            self._endpoint = replace(self._endpoint, desired_replicas=decision.replicas)
            self._rows = {server.number: row for server, row in zip(fleet.servers, rows, strict=True)}
        return decision.replicas

    def _row(self, server: Server, now: float) -> Replica:
        known = self._rows.get(server.number)
        ready = server.ready_at <= now
        if known is None or (known.ready_at is None) is ready:
            known = self._rows[server.number] = Replica(
                id=str(server.number),
                endpoint_id=self._endpoint.id,
                generation=1,
                region=self._endpoint.region,
                state=ReplicaState.READY if ready else ReplicaState.STARTING,
                address=None,
                reason_code=None,
                reason="",
                created_at=server.created_at + _EPOCH,
                ready_at=server.ready_at + _EPOCH if ready else None,
                unhealthy_at=None,
                draining_at=None,
                terminated_at=None,
                startup_ms=None,
                busy=0,
            )
        return known

    def _measure(self, fleet: Fleet, now: float) -> Signals:
        """What the last whole minute tells, as the history's points do."""
        minute = now // _POINT
        if minute != self._minute:
            self._minute = minute
            took = sorted(took for at, took in fleet.recent if (minute - 1) * _POINT <= at < minute * _POINT)
            late = took[int(len(took) * 0.95)] if took else None
            self._signals = Signals(late, fleet.fullest if fleet.servers else None)
        return self._signals


_EPOCH = 4 * 86_400.0
"""1970-01-05 was a Monday."""


def endpoint(
    *,
    min_replicas: int = 0,
    max_replicas: int = 64,
    idle_timeout: float = 300.0,
    max_wait: float = 60.0,
    target: float = 16.0,
    ttft_slo: float | None = None,
) -> Endpoint:
    """An endpoint that only a replay knows: at zero, with these settings."""
    return Endpoint(
        id="plan", tenant_id="", name="plan", region="plan", model="", gpu=None, gpus=0, engine_args=(),
        min_replicas=min_replicas, max_replicas=max_replicas, idle_timeout=idle_timeout, max_wait=max_wait,
        warmth="cold", paused=False, deleting=False, generation=1, runtime_generation=1, observed_generation=1,
        desired_replicas=0, state=EndpointState.ZERO, reason_code=None, reason="", failures=0, retry_at=0.0,
        failed_generation=0, wake_at=0.0, sleep_at=0.0, created_at=0.0, updated_at=0.0, target=target,
        ttft_slo=ttft_slo,
    )  # fmt: skip
