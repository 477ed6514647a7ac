"""What to do about one endpoint: desired and observed state in, actions out. Pure.

A replica's own steps come first (`_step`), then how many there should be (`_scale`), then what the endpoint's state
is called (`_state`). Everything is decided afresh from what is seen, so a lost step is found again at the next tick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from control_plane.domain import (
    PERMANENT_START_FAILURES,
    Description,
    Endpoint,
    EndpointState,
    Phase,
    Replica,
    ReplicaState,
)

PATIENT_REASONS = frozenset({"no_capacity"})
"""Failures that are waited out for as long as it takes."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Patience, in seconds."""

    liveness_grace: float
    start_timeout: float
    drain_settle: float
    drain_timeout: float
    stable_after: float
    backoff_base: float
    backoff_cap: float
    max_failures: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What provider and probe say of a replica. `healthy` is None where nothing was probed."""

    description: Description
    healthy: bool | None = None
    busy: int | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """Write an intent for a new replica, then ensure it."""

    why: str


@dataclass(frozen=True, slots=True)
class Ensure:
    replica_id: str


@dataclass(frozen=True, slots=True)
class Drain:
    replica_id: str


@dataclass(frozen=True, slots=True)
class Terminate:
    replica_id: str


@dataclass(frozen=True, slots=True)
class ChangeReplica:
    """Write `changes` to a replica's row; a change of state is an event with `reason`."""

    replica_id: str
    changes: Mapping[str, Any]
    reason_code: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RecordColdStart:
    replica_id: str
    total_ms: float
    phases: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ChangeEndpoint:
    changes: Mapping[str, Any]


Action = Launch | Ensure | Drain | Terminate | ChangeReplica | RecordColdStart | ChangeEndpoint


@dataclass(slots=True)
class _Failure:
    code: str
    message: str
    permanent: bool
    immediate_retry: bool = False


@dataclass(slots=True)
class _Draft:
    """A plan in the making: replicas as they will be after the actions so far."""

    replicas: list[Replica]
    actions: list[Action] = field(default_factory=list)
    failure: _Failure | None = None

    def change(self, replica: Replica, code: str | None = None, reason: str = "", **changes: Any) -> Replica:
        after = replace(replica, **changes)
        self.replicas[self.replicas.index(replica)] = after
        written = dict(changes)
        if "state" in changes:
            written |= {"reason_code": code, "reason": reason}
        address = written.pop("address", None)
        if address is not None:
            written |= {"host": address.host, "port": address.port}
        self.actions.append(ChangeReplica(replica.id, written, code, reason))
        return after


def plan(
    endpoint: Endpoint,
    replicas: Sequence[Replica],
    seen: Mapping[str, Seen],
    now: float,
    policy: Policy,
    jitter: float,
) -> list[Action]:
    """Decide. `replicas` are those not terminated, `jitter` is in [0, 1)."""
    draft = _Draft(list(replicas))
    for replica in replicas:
        _step(draft, endpoint, replica, seen[replica.id], now, policy)
    written: dict[str, Any] = {}
    if draft.failure is not None:
        failure = draft.failure
        written = after_failure(endpoint, failure.code, failure.message, failure.permanent, now, policy, jitter)
        if failure.immediate_retry and written["failures"] == 1:
            written["retry_at"] = now
    elif endpoint.failures and _stable(endpoint, draft.replicas, now, policy):
        written = {"failures": 0, "retry_at": 0.0}
    after = replace(endpoint, **written)
    _scale(draft, after, now)
    state, code, reason = _state(after, draft.replicas)
    written |= {"state": state, "reason_code": code, "reason": reason}
    if _settled(after, draft.replicas, state):
        written["observed_generation"] = endpoint.generation
    changes = {name: value for name, value in written.items() if getattr(endpoint, name) != value}
    if state is EndpointState.DELETED:
        changes["deleted_at"] = now
    if changes:
        draft.actions.append(ChangeEndpoint(changes))
    intended = {replica.id for replica in draft.replicas if replica.state is ReplicaState.INTENDED}
    return [action for action in draft.actions if not isinstance(action, Ensure) or action.replica_id in intended]


def after_failure(
    endpoint: Endpoint, code: str, message: str, permanent: bool, now: float, policy: Policy, jitter: float
) -> dict[str, Any]:
    """What to write of a failure: when to try again, or that this generation is given up on."""
    failures = endpoint.failures + 1
    give_up = permanent or (failures >= policy.max_failures and code not in PATIENT_REASONS)
    return {
        "failures": failures,
        "retry_at": now + backoff(failures, policy, jitter),
        "failed_generation": endpoint.generation if give_up else 0,
        "reason_code": code,
        "reason": message,
    }


def backoff(failures: int, policy: Policy, jitter: float) -> float:
    """Seconds to wait after the n-th failure in a row: doubled each time, capped, up to a half of it by chance."""
    full = min(policy.backoff_cap, policy.backoff_base * 2.0 ** min(failures - 1, 30))
    return full * (0.5 + jitter / 2)


def _step(draft: _Draft, endpoint: Endpoint, replica: Replica, seen: Seen, now: float, policy: Policy) -> None:
    phase = seen.description.phase
    if replica.state is ReplicaState.TERMINATING:
        if phase is Phase.ABSENT:
            draft.change(replica, replica.reason_code, replica.reason, state=ReplicaState.TERMINATED, terminated_at=now)
        else:
            draft.actions.append(Terminate(replica.id))
    elif replica.state is ReplicaState.DRAINING:
        _step_draining(draft, replica, seen, now, policy)
    elif replica.state is ReplicaState.INTENDED and phase is Phase.ABSENT:
        if now >= endpoint.retry_at:
            draft.actions.append(Ensure(replica.id))
    elif phase in (Phase.ABSENT, Phase.EXITED, Phase.FAILED):
        _lost(draft, replica, seen.description, now)
    elif replica.state in (ReplicaState.INTENDED, ReplicaState.STARTING):
        _step_starting(draft, replica, seen, now, policy)
    else:
        _step_serving(draft, replica, seen, now, policy)


def _step_starting(draft: _Draft, replica: Replica, seen: Seen, now: float, policy: Policy) -> None:
    description = seen.description
    if description.phase is Phase.RUNNING and seen.healthy:
        startup_ms = round((now - replica.created_at) * 1000, 1)
        draft.change(
            replica,
            None,
            f"answers at {description.address}",
            state=ReplicaState.READY,
            address=description.address,
            ready_at=now,
            startup_ms=startup_ms,
        )
        draft.actions.append(RecordColdStart(replica.id, startup_ms, description.phases))
    elif now - replica.created_at > policy.start_timeout:
        message = f"not ready after {policy.start_timeout:g} s"
        _end(draft, replica, "start_timeout", message)
        draft.failure = _Failure("start_timeout", message, permanent=False)
    elif replica.state is ReplicaState.INTENDED:
        draft.change(replica, None, "its process runs", state=ReplicaState.STARTING)


def _step_serving(draft: _Draft, replica: Replica, seen: Seen, now: float, policy: Policy) -> None:
    if seen.healthy and replica.state is ReplicaState.UNHEALTHY:
        draft.change(replica, None, "answers again", state=ReplicaState.READY, unhealthy_at=None)
    elif seen.healthy is False and replica.state is ReplicaState.READY:
        draft.change(replica, "unhealthy", "its health check fails", state=ReplicaState.UNHEALTHY, unhealthy_at=now)
    elif replica.unhealthy_at is not None and now - replica.unhealthy_at > policy.liveness_grace:
        message = f"no sign of progress for {policy.liveness_grace:g} s"
        _end(draft, replica, "unresponsive", message)
        draft.failure = _Failure("unresponsive", message, permanent=False, immediate_retry=True)
    elif seen.busy is not None and seen.busy != replica.busy:
        draft.change(replica, busy=seen.busy)


def _step_draining(draft: _Draft, replica: Replica, seen: Seen, now: float, policy: Policy) -> None:
    since = replica.draining_at if replica.draining_at is not None else now
    idle = seen.busy == 0 and now - since >= policy.drain_settle
    if seen.description.phase is not Phase.RUNNING or idle or now - since > policy.drain_timeout:
        _end(draft, replica, replica.reason_code, replica.reason)
    else:
        draft.actions.append(Drain(replica.id))


def _lost(draft: _Draft, replica: Replica, description: Description, now: float) -> None:
    served = replica.ready_at is not None
    code = description.code or ("replica_lost" if served else "start_failed")
    message = description.message or "the replica is gone"
    _end(draft, replica, code, message)
    permanent = not served and code in PERMANENT_START_FAILURES
    draft.failure = _Failure(code, message, permanent, immediate_retry=served)


def _end(draft: _Draft, replica: Replica, code: str | None, reason: str) -> None:
    draft.change(replica, code, reason, state=ReplicaState.TERMINATING)
    draft.actions.append(Terminate(replica.id))


def _scale(draft: _Draft, endpoint: Endpoint, now: float) -> None:
    """Bring the number of replicas to what is wanted."""
    wanted = wanted_replicas(endpoint)
    active = [replica for replica in draft.replicas if replica.state.active]
    if wanted == 0:
        for replica in active:
            _retire(draft, replica, now, "not_wanted", "scaled to zero")
        return
    current = [replica for replica in active if replica.generation >= endpoint.runtime_generation]
    old = [replica for replica in active if replica.generation < endpoint.runtime_generation]
    # Those that don't serve yet go first, then the newest.
    current.sort(key=lambda replica: (replica.ready_at is None, replica.created_at))
    for replica in current[wanted:]:
        _retire(draft, replica, now, "not_wanted", f"{wanted} wanted")
    ready = sum(replica.state is ReplicaState.READY for replica in current[:wanted])
    if ready >= wanted:
        for replica in old:
            _retire(draft, replica, now, "outdated", f"generation {endpoint.runtime_generation} serves")
    if endpoint.given_up:
        for replica in current[:wanted]:
            if replica.state is ReplicaState.INTENDED:
                _end(draft, replica, endpoint.reason_code, endpoint.reason)
    elif now >= endpoint.retry_at:
        for _ in range(wanted - len(current)):
            draft.actions.append(Launch(f"{wanted} wanted, {len(current)} there"))


def _retire(draft: _Draft, replica: Replica, now: float, code: str, reason: str) -> None:
    if replica.state is ReplicaState.READY:
        draft.change(replica, code, reason, state=ReplicaState.DRAINING, draining_at=now)
        draft.actions.append(Drain(replica.id))
    else:
        _end(draft, replica, code, reason)


def wanted_replicas(endpoint: Endpoint) -> int:
    """How many replicas the endpoint is to have now."""
    if endpoint.deleting or endpoint.paused:
        return 0
    return min(endpoint.desired_replicas, endpoint.max_replicas)


def _state(endpoint: Endpoint, replicas: Sequence[Replica]) -> tuple[EndpointState, str | None, str]:
    alive = [replica for replica in replicas if replica.state is not ReplicaState.TERMINATED]
    ready = sum(replica.state is ReplicaState.READY for replica in alive)
    wanted = wanted_replicas(endpoint)
    if endpoint.deleting:
        if alive:
            return EndpointState.DRAINING, "deleting", "replicas end before the endpoint is deleted"
        return EndpointState.DELETED, "deleted", "deleted as asked"
    if endpoint.paused:
        if alive:
            return EndpointState.DRAINING, "endpoint_paused", "replicas end before the endpoint pauses"
        return EndpointState.PAUSED, "endpoint_paused", "paused by an operator"
    if wanted == 0:
        if any(replica.state is not ReplicaState.TERMINATING for replica in alive):
            return EndpointState.DRAINING, "not_wanted", "finishing what is in flight"
        if alive:
            return EndpointState.DRAINING, "not_wanted", "ending replicas"
        if endpoint.given_up:
            return EndpointState.FAILED, endpoint.reason_code or "start_failed", endpoint.reason
        return EndpointState.ZERO, None, "no replica runs; the next request starts one"
    troubled = endpoint.given_up or endpoint.failures > 0
    if ready >= wanted and not endpoint.given_up:
        return EndpointState.READY, None, f"{ready} of {wanted} replicas ready"
    if ready:
        code = endpoint.reason_code if troubled else "scaling"
        return EndpointState.DEGRADED, code, endpoint.reason if troubled else f"{ready} of {wanted} replicas ready"
    if endpoint.given_up:
        return EndpointState.FAILED, endpoint.reason_code or "start_failed", endpoint.reason
    code, reason = (endpoint.reason_code, endpoint.reason) if troubled else (None, "a replica starts")
    if any(replica.state in (ReplicaState.STARTING, ReplicaState.UNHEALTHY) for replica in alive):
        return EndpointState.LOADING, code, reason
    return EndpointState.PROVISIONING, code, reason


def _settled(endpoint: Endpoint, replicas: Sequence[Replica], state: EndpointState) -> bool:
    if state in (EndpointState.ZERO, EndpointState.PAUSED):
        return True
    return state is EndpointState.READY and not any(
        replica.state.active and replica.generation < endpoint.runtime_generation for replica in replicas
    )


def _stable(endpoint: Endpoint, replicas: Sequence[Replica], now: float, policy: Policy) -> bool:
    """Whether all that is wanted is there and has been for a while: only then is trouble over."""
    ready = [replica.ready_at for replica in replicas if replica.state is ReplicaState.READY and replica.ready_at]
    if not ready or len(ready) < wanted_replicas(endpoint):
        return False
    return now - max(ready) > policy.stable_after
