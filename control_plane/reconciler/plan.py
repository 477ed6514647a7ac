"""What to do about one endpoint: desired and observed state in, actions out. Pure.

A replica's own steps come first (`_step`), then how many there should be (`scale`), then what the endpoint's state
is called (`_state`). Everything is decided afresh from what is seen, so a lost step is found again at the next tick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from control_plane.domain import (
    PERMANENT_START_FAILURES,
    RESTING_RUNGS,
    Description,
    Endpoint,
    EndpointState,
    Phase,
    Replica,
    ReplicaState,
    Rung,
)
from control_plane.metering.bill import AT_REST
from control_plane.reconciler.actions import (
    RESTING,
    Action,
    ChangeEndpoint,
    Draft,
    Drain,
    Ensure,
    Failure,
    Policy,
    RecordColdStart,
    RecordWake,
    Rest,
    Seen,
    SettleGeneration,
    Terminate,
    Wake,
)
from control_plane.reconciler.scale import canary_replicas, resting_rung, scale, wanted_replicas
from control_plane.warmth import FIRST_STEP

PATIENT_REASONS = frozenset({"no_capacity"})
"""Failures that are waited out for as long as it takes."""


def plan(
    endpoint: Endpoint,
    replicas: Sequence[Replica],
    seen: Mapping[str, Seen],
    now: float,
    policy: Policy,
    jitter: float,
) -> list[Action]:
    """Decide. `replicas` are those not terminated, `jitter` is in [0, 1). One that isn't in `seen` stays as it is."""
    draft = Draft(endpoint, list(replicas))
    for replica in replicas:
        if replica.id in seen:
            _step(draft, replica, seen[replica.id], now, policy)
    written: dict[str, Any] = {}
    if draft.failure is not None and not (endpoint.paused or endpoint.stopped or endpoint.deleting):
        # what fails while it is wound down speaks against nothing
        written = _count(endpoint, draft.failure, now, policy, jitter)
    elif endpoint.failures and _stable(endpoint, draft.replicas, now, policy):
        written = {"failures": 0, "retry_at": 0.0}
    after = replace(endpoint, **written)
    scale(draft, after, now)
    state, code, reason = _state(after, draft.replicas)
    written |= {"state": state, "reason_code": code, "reason": reason}
    if _settled(after, draft.replicas, state):
        written["observed_generation"] = endpoint.generation
    changes = {name: value for name, value in written.items() if getattr(endpoint, name) != value}
    proven = endpoint.proven
    if not proven and _serves(after, draft.replicas):
        changes |= {"stable_generation": endpoint.runtime_generation, "stable_runtime": asdict(endpoint.runtime)}
        proven = True
    if proven and {"stable_generation", "observed_generation"} & changes.keys():
        draft.actions.append(SettleGeneration(endpoint.generation, "serving"))
    elif changes.get("failed_generation") == endpoint.generation and draft.failure is not None:
        draft.actions.append(SettleGeneration(endpoint.generation, "failed", draft.failure.code, draft.failure.message))
    if state is EndpointState.DELETED:
        changes["deleted_at"] = now
    if changes:
        draft.actions.append(ChangeEndpoint(changes))
    intended = {replica.id for replica in draft.replicas if replica.state is ReplicaState.INTENDED}
    return [action for action in draft.actions if not isinstance(action, Ensure) or action.replica_id in intended]


def _count(endpoint: Endpoint, failure: Failure, now: float, policy: Policy, jitter: float) -> dict[str, Any]:
    """What to write of a failure. One of the generation before doesn't speak against what is asked."""
    written = after_failure(
        endpoint, failure.code, failure.message, failure.permanent, now, policy, jitter, fresh=failure.fresh
    )
    if failure.immediate_retry and written["failures"] == 1:
        written["retry_at"] = now
    return written


def after_failure(
    endpoint: Endpoint,
    code: str,
    message: str,
    permanent: bool,
    now: float,
    policy: Policy,
    jitter: float,
    *,
    fresh: bool = True,
) -> dict[str, Any]:
    """What to write of a failure: when to try again, or that this generation is given up on."""
    failures = endpoint.failures + 1
    give_up = fresh and (permanent or (failures >= policy.max_failures and code not in PATIENT_REASONS))
    if endpoint.given_up and not fresh:
        # why the change failed is what an operator must see; what serves on in its place has events of its own
        code, message = endpoint.reason_code or code, endpoint.reason
    return {
        "failures": failures,
        "retry_at": now + backoff(failures, policy, jitter),
        "failed_generation": endpoint.generation if give_up else endpoint.failed_generation if not fresh else 0,
        "reason_code": code,
        "reason": message,
    }


def backoff(failures: int, policy: Policy, jitter: float) -> float:
    """Seconds to wait after the n-th failure in a row: doubled each time, capped, up to a half of it by chance."""
    full = min(policy.backoff_cap, policy.backoff_base * 2.0 ** min(failures - 1, 30))
    return full * (0.5 + jitter / 2)


def _step(draft: Draft, replica: Replica, seen: Seen, now: float, policy: Policy) -> None:
    phase, where = seen.description.phase, seen.description.region
    if where not in (None, replica.region) and replica.state is not ReplicaState.TERMINATING:
        # its provider's word counts for more than our own record
        message = f"its provider says that it runs in {where}, not in {replica.region}"
        draft.end(replica, "residency_mismatch", message)
        draft.fail(replica, "residency_mismatch", message, permanent=True)
    elif replica.state is ReplicaState.TERMINATING:
        if phase is Phase.ABSENT:
            draft.change(replica, replica.reason_code, replica.reason, state=ReplicaState.TERMINATED, terminated_at=now)
        else:
            draft.actions.append(Terminate(replica.id))
    elif replica.state is ReplicaState.DRAINING:
        _step_draining(draft, replica, seen, now, policy)
    elif replica.state is ReplicaState.INTENDED and phase is Phase.ABSENT:
        if now >= draft.endpoint.retry_at:
            draft.actions.append(Ensure(replica.id))
    elif phase in (Phase.ABSENT, Phase.EXITED, Phase.FAILED):
        _lost(draft, replica, seen.description)
    elif replica.state in (ReplicaState.INTENDED, ReplicaState.STARTING):
        _step_starting(draft, replica, seen, now, policy)
    elif replica.state is ReplicaState.RESTING:
        _step_resting(draft, replica, seen, now, policy)
    else:
        _step_serving(draft, replica, seen, now, policy)


def _step_starting(draft: Draft, replica: Replica, seen: Seen, now: float, policy: Policy) -> None:
    began = replica.created_at if replica.woken_at is None else replica.woken_at
    up = seen.description.phase is Phase.RUNNING and seen.healthy
    if up and seen.proof:
        message = f"it starts, but doesn't answer: {seen.proof}"
        draft.end(replica, "generation_failed", message)
        draft.fail(replica, "generation_failed", message, permanent=False)
    elif up and seen.rung is Rung.HOT:
        _step_ready(draft, replica, seen, now)
    elif up and replica.woken_at is None and seen.rung is replica.rung:
        reason = f"rests at {seen.rung}"
        code = f"{AT_REST}{seen.rung}"
        draft.change(replica, code, reason, state=ReplicaState.RESTING, address=seen.description.address)
    elif now - began > policy.start_timeout:
        message = f"not ready after {policy.start_timeout:g} s"
        draft.end(replica, "start_timeout", message)
        draft.fail(replica, "start_timeout", message, permanent=False)
    else:
        if up and replica.woken_at is not None:
            draft.actions.append(Wake(replica.id))
        if replica.state is ReplicaState.INTENDED:
            draft.change(replica, None, "its process runs", state=ReplicaState.STARTING)


def _step_ready(draft: Draft, replica: Replica, seen: Seen, now: float) -> None:
    rested = replica.rung is not Rung.HOT and replica.woken_at is not None and replica.address is not None
    began = replica.woken_at if rested and replica.woken_at is not None else replica.created_at
    total_ms = round((now - began) * 1000, 1)
    changes: dict[str, Any] = {"ready_at": now, "rung": Rung.HOT, "woken_at": None}
    changes |= {"weights": seen.description.weights or replica.weights}
    if not rested:
        changes |= {"address": seen.description.address, "startup_ms": total_ms}
    draft.change(replica, None, f"answers at {seen.description.address}", state=ReplicaState.READY, **changes)
    if rested:
        draft.actions.append(RecordWake(replica.id, replica.rung, total_ms, seen.wake_phases))
    else:
        proved = {} if seen.proof_ms is None else {FIRST_STEP: seen.proof_ms}
        draft.actions.append(RecordColdStart(replica.id, total_ms, _phases(seen.description) | proved))


def _phases(description: Description) -> dict[str, float]:
    """With what a start took beside its phases, such as the start of a process. Milliseconds."""
    beside = (description.startup_ms or 0.0) - sum(description.phases.values())
    return {"start": round(beside, 1), **description.phases} if beside > 0 else dict(description.phases)


def _step_serving(draft: Draft, replica: Replica, seen: Seen, now: float, policy: Policy) -> None:
    if seen.description.code == "spot_interrupted":
        # its machine is taken back soon: what it has is finished there, and another takes its place at once
        draft.retire(replica, now, "spot_interrupted", seen.description.message)
    elif seen.healthy and seen.rung is not Rung.HOT:
        draft.actions.append(Wake(replica.id))
    elif seen.healthy and replica.state is ReplicaState.UNHEALTHY:
        draft.change(replica, None, "answers again", state=ReplicaState.READY, unhealthy_at=None)
    elif seen.healthy is False and replica.state is ReplicaState.READY:
        draft.change(replica, "unhealthy", "its health check fails", state=ReplicaState.UNHEALTHY, unhealthy_at=now)
    elif replica.unhealthy_at is not None and now - replica.unhealthy_at > policy.liveness_grace:
        _unresponsive(draft, replica, policy)
    elif seen.busy is not None and seen.busy != replica.busy:
        draft.change(replica, busy=seen.busy)


def _step_resting(draft: Draft, replica: Replica, seen: Seen, now: float, policy: Policy) -> None:
    if seen.healthy and replica.unhealthy_at is not None:
        draft.change(replica, unhealthy_at=None)
    elif seen.healthy and seen.rung in RESTING_RUNGS and seen.rung is not replica.rung:
        draft.change(replica, rung=seen.rung)
    elif seen.healthy and seen.rung is Rung.HOT:
        draft.actions.append(Rest(replica.id, replica.rung))
    elif seen.healthy is False and replica.unhealthy_at is None:
        draft.change(replica, unhealthy_at=now)
    elif replica.unhealthy_at is not None and now - replica.unhealthy_at > policy.liveness_grace:
        _unresponsive(draft, replica, policy)


def _unresponsive(draft: Draft, replica: Replica, policy: Policy) -> None:
    message = f"no sign of progress for {policy.liveness_grace:g} s"
    draft.end(replica, "unresponsive", message)
    draft.fail(replica, "unresponsive", message, permanent=False, immediate_retry=True)


def _step_draining(draft: Draft, replica: Replica, seen: Seen, now: float, policy: Policy) -> None:
    since = replica.draining_at if replica.draining_at is not None else now
    idle = seen.busy == 0 and now - since >= policy.drain_settle
    over = seen.description.phase is not Phase.RUNNING or now - since > policy.drain_timeout
    rung = resting_rung(draft.endpoint) if replica.reason_code == RESTING else None
    if over or (idle and rung is None):
        draft.end(replica, replica.reason_code, replica.reason)
    elif rung is None:
        draft.actions.append(Drain(replica.id))
    elif seen.rung in RESTING_RUNGS:
        reason = f"rests at {seen.rung}"
        draft.change(
            replica,
            f"{AT_REST}{seen.rung}",
            reason,
            state=ReplicaState.RESTING,
            rung=seen.rung,
            draining_at=None,
            busy=0,
        )
    elif idle and wanted_replicas(draft.endpoint) == 0:
        draft.actions.append(Rest(replica.id, rung))


def _lost(draft: Draft, replica: Replica, description: Description) -> None:
    served = replica.ready_at is not None or replica.state is ReplicaState.RESTING
    code = description.code or ("replica_lost" if served else "start_failed")
    message = description.message or "the replica is gone"
    draft.end(replica, code, message)
    permanent = not served and code in PERMANENT_START_FAILURES
    draft.fail(replica, code, message, permanent=permanent, immediate_retry=served)


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
    if endpoint.stopped:
        if alive:
            return (
                EndpointState.DRAINING,
                "spend_limit_reached",
                "replicas end: it has cost as much as it may this month",
            )
        return EndpointState.PAUSED, "spend_limit_reached", "it has cost as much as it may this month"
    if wanted == 0:
        rung = resting_rung(endpoint)
        kept = [replica for replica in alive if _rests(replica, rung)]
        others = [replica for replica in alive if replica not in kept]
        if others:
            ending = all(replica.state is ReplicaState.TERMINATING for replica in others)
            why = ("not_wanted", "ending replicas" if ending else "finishing what is in flight")
            # the reason of a failure is kept for as long as what failed is asked for
            return EndpointState.DRAINING, *((endpoint.reason_code, endpoint.reason) if endpoint.given_up else why)
        if endpoint.falls_back:
            return EndpointState.ZERO, endpoint.reason_code or "start_failed", _fallen(endpoint)
        if endpoint.given_up:
            return EndpointState.FAILED, endpoint.reason_code or "start_failed", endpoint.reason
        if any(replica.state is ReplicaState.RESTING for replica in kept):
            return EndpointState.ZERO, None, f"a replica rests at {rung}; the next request wakes it"
        return EndpointState.ZERO, None, "no replica runs; the next request starts one"
    troubled = endpoint.given_up or endpoint.failures > 0
    if endpoint.falls_back and ready:
        return EndpointState.DEGRADED, endpoint.reason_code or "start_failed", _fallen(endpoint)
    if ready >= wanted and not endpoint.given_up:
        share = canary_replicas(endpoint, wanted)
        told = "" if share is None else f"; generation {endpoint.generation} gets {endpoint.canary} % of requests"
        return EndpointState.READY, None, f"{ready} of {wanted + (share or 0)} replicas ready{told}"
    if ready:
        code = endpoint.reason_code if troubled else "scaling"
        return EndpointState.DEGRADED, code, endpoint.reason if troubled else f"{ready} of {wanted} replicas ready"
    if endpoint.given_up and not endpoint.falls_back:
        return EndpointState.FAILED, endpoint.reason_code or "start_failed", endpoint.reason
    code, reason = (endpoint.reason_code, endpoint.reason) if troubled else (None, "a replica starts")
    if any(replica.state in (ReplicaState.STARTING, ReplicaState.UNHEALTHY) for replica in alive):
        return EndpointState.LOADING, code, reason
    return EndpointState.PROVISIONING, code, reason


def _fallen(endpoint: Endpoint) -> str:
    """Said once, though the reason is written and read again at each tick."""
    end = f" (generation {endpoint.stable_generation} serves on)"
    return endpoint.reason if endpoint.reason.endswith(end) else f"{endpoint.reason}{end}"


def _rests(replica: Replica, rung: Rung | None) -> bool:
    """Whether it may be there at zero: it rests, or starts to rest."""
    if rung is None:
        return False
    starts = replica.state in (ReplicaState.INTENDED, ReplicaState.STARTING) and replica.rung is not Rung.HOT
    return replica.state is ReplicaState.RESTING or starts


def _settled(endpoint: Endpoint, replicas: Sequence[Replica], state: EndpointState) -> bool:
    if state in (EndpointState.ZERO, EndpointState.PAUSED):
        return True
    return state is EndpointState.READY and not any(
        replica.state.active and replica.generation < endpoint.runtime_generation for replica in replicas
    )


def _serves(endpoint: Endpoint, replicas: Sequence[Replica]) -> bool:
    """Whether what is asked serves as much as is wanted, all of it and not as a canary.

    Of the first that ever served one replica will do: there is nothing else to fall back to.
    """
    wanted = wanted_replicas(endpoint)
    if wanted == 0 or endpoint.given_up or canary_replicas(endpoint, wanted) is not None:
        return False
    ready = sum(_fresh(endpoint, replica) and replica.state is ReplicaState.READY for replica in replicas)
    return ready >= (1 if endpoint.stable_runtime is None else wanted)


def _fresh(endpoint: Endpoint, replica: Replica) -> bool:
    return replica.generation >= endpoint.runtime_generation


def _stable(endpoint: Endpoint, replicas: Sequence[Replica], now: float, policy: Policy) -> bool:
    """Whether all that is wanted is there and has been for a while: only then is trouble over.

    While a new generation is tried, only its own replicas tell.
    """
    wanted = wanted_replicas(endpoint)
    tried = not endpoint.proven and not endpoint.falls_back
    if tried and (share := canary_replicas(endpoint, wanted)) is not None:
        wanted = share
    ready = [
        replica.ready_at
        for replica in replicas
        if replica.state is ReplicaState.READY and replica.ready_at and (_fresh(endpoint, replica) or not tried)
    ]
    if not ready or len(ready) < wanted:
        return False
    return now - max(ready) > policy.stable_after
