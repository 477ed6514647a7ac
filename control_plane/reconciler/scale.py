"""How many replicas of which generation there are to be, and which rest. Pure; a part of `plan`."""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.domain import RESTING_RUNGS, Endpoint, Replica, ReplicaState, Rung
from control_plane.reconciler.actions import RESTING, Draft, Launch, Rest, Wake

_READINESS = (
    ReplicaState.READY,
    ReplicaState.UNHEALTHY,
    ReplicaState.DRAINING,
    ReplicaState.STARTING,
    ReplicaState.RESTING,
    ReplicaState.INTENDED,
)
"""Those that serve, or will soonest, are kept first."""


def scale(draft: Draft, endpoint: Endpoint, now: float) -> None:
    """Bring the replicas of a draft to what is wanted. `endpoint` is as it will be written.

    A new generation grows beside the old one, which goes once the new one serves; one that is given up on goes itself.
    As a canary it stays at its share. Where it has failed before, the old one is kept at full strength meanwhile.
    """
    wanted = wanted_replicas(endpoint)
    active = [replica for replica in draft.replicas if counts(replica)]
    fresh = [replica for replica in active if replica.generation >= endpoint.runtime_generation]
    old = [replica for replica in active if replica.generation < endpoint.runtime_generation]
    if wanted == 0:
        _down(draft, endpoint, old if endpoint.falls_back else fresh, active, now)
    elif endpoint.falls_back:
        _fill(draft, endpoint, old, wanted, endpoint.stable_generation, now)
        for replica in fresh:
            draft.retire(replica, now, "given_up", f"generation {endpoint.generation} failed: {endpoint.reason}")
    elif endpoint.given_up:
        for replica in fresh:
            if replica.state is ReplicaState.INTENDED:
                draft.end(replica, endpoint.reason_code, endpoint.reason)
    else:
        share = canary_replicas(endpoint, wanted)
        _fill(draft, endpoint, fresh, wanted if share is None else share, endpoint.generation, now)
        if share is not None or (old and not endpoint.proven and endpoint.failures):
            _fill(draft, endpoint, old, wanted, endpoint.stable_generation, now)
        elif sum(replica.state is ReplicaState.READY for replica in fresh) >= wanted:
            for replica in old:
                draft.retire(replica, now, "outdated", f"generation {endpoint.runtime_generation} serves")


def wanted_replicas(endpoint: Endpoint) -> int:
    """How many replicas the endpoint is to have now."""
    if endpoint.deleting or endpoint.paused or endpoint.stopped:
        return 0
    return min(endpoint.desired_replicas, endpoint.max_replicas)


def canary_replicas(endpoint: Endpoint, wanted: int) -> int | None:
    """Of a generation that is tried on a part of the traffic; None where none is."""
    if endpoint.canary is None or endpoint.proven or endpoint.stable_runtime is None:
        return None
    return max(1, round(wanted * endpoint.canary / 100))


def resting_rung(endpoint: Endpoint) -> Rung | None:
    """How warm one replica is kept at zero; None for not at all."""
    rung = Rung(endpoint.warmth)
    unproven = endpoint.stable_runtime is None or not (endpoint.proven or endpoint.falls_back)
    if rung not in RESTING_RUNGS or endpoint.deleting or endpoint.paused or endpoint.stopped or unproven:
        return None
    return rung


def counts(replica: Replica) -> bool:
    """Whether it is one of those that were asked for: it isn't on its way out."""
    return replica.state.active or (replica.state is ReplicaState.DRAINING and replica.reason_code == RESTING)


def _fill(draft: Draft, endpoint: Endpoint, group: Sequence[Replica], wanted: int, generation: int, now: float) -> None:
    ordered = sorted(group, key=lambda replica: (_READINESS.index(replica.state), replica.created_at))
    for replica in ordered[wanted:]:
        draft.retire(replica, now, "not_wanted", f"{wanted} wanted")
    for replica in ordered[:wanted]:
        if replica.state is ReplicaState.DRAINING:
            draft.change(replica, None, "wanted again", state=ReplicaState.READY, draining_at=None)
        elif replica.state is ReplicaState.RESTING:
            draft.change(replica, None, f"woken from {replica.rung}", state=ReplicaState.STARTING, woken_at=now)
            draft.actions.append(Wake(replica.id))
        elif replica.rung is not Rung.HOT and replica.woken_at is None and replica.state is not ReplicaState.READY:
            draft.change(replica, woken_at=now)  # it starts, to rest: now it is to come all the way up
    if now >= endpoint.retry_at:
        for _ in range(wanted - len(group)):
            draft.actions.append(Launch(f"{wanted} wanted, {len(group)} there", generation))


def _down(draft: Draft, endpoint: Endpoint, serving: Sequence[Replica], active: Sequence[Replica], now: float) -> None:
    """To zero: all end, but for one that rests where the endpoint keeps one warm."""
    rung = resting_rung(endpoint)
    kept = None
    if rung is not None:
        order = (ReplicaState.RESTING, ReplicaState.DRAINING, ReplicaState.READY, ReplicaState.STARTING)
        able = [
            replica
            for replica in serving
            if replica.state in order or (replica.state is ReplicaState.INTENDED and replica.rung is not Rung.HOT)
        ]
        kept = min(able, key=lambda one: order.index(one.state) if one.state in order else len(order), default=None)
        if kept is None:
            if now >= endpoint.retry_at:
                generation = endpoint.stable_generation if endpoint.falls_back else endpoint.generation
                draft.actions.append(Launch(f"kept at {rung}", generation, rung))
        elif kept.state is ReplicaState.READY:
            draft.change(
                kept, RESTING, f"no work: to {rung}", state=ReplicaState.DRAINING, draining_at=now, woken_at=None
            )
        elif kept.state is ReplicaState.RESTING and kept.rung is not rung:
            draft.actions.append(Rest(kept.id, rung))
    for replica in active:
        if kept is None or replica.id != kept.id:
            draft.retire(replica, now, "not_wanted", "scaled to zero")
