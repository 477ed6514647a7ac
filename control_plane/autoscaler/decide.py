"""How many replicas an endpoint should have. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.autoscaler.demand import Load
from control_plane.domain import Endpoint, Replica

TARGET_PER_REPLICA = 16
"""Requests at once that one replica should carry before another is added."""


@dataclass(frozen=True, slots=True)
class Decision:
    replicas: int
    why: str


def decide(endpoint: Endpoint, load: Load, peak: int, replicas: Sequence[Replica], now: float) -> Decision:
    """`peak` is the highest load of the last minute: scaling up follows the load, scaling down follows the peak."""
    needed = math.ceil(max(load.total, peak) / TARGET_PER_REPLICA)
    if load.total > 0:
        wanted = max(1, endpoint.min_replicas, min(needed, endpoint.max_replicas))
        return Decision(wanted, f"{load.in_flight} in flight, {load.held} held")
    if endpoint.min_replicas > 0:
        wanted = max(endpoint.min_replicas, min(needed, endpoint.max_replicas))
        return Decision(wanted, f"at least {endpoint.min_replicas} asked for")
    active_at = last_activity(endpoint, load, replicas)
    if endpoint.sleep_at >= active_at:
        return Decision(0, "put to sleep")
    if any(replica.state.active and replica.ready_at is None for replica in replicas):
        return Decision(max(1, endpoint.desired_replicas), "a start is under way")
    idle = now - active_at
    if idle >= endpoint.idle_timeout:
        return Decision(0, f"no request for {endpoint.idle_timeout:g} s")
    # Idle but not for long enough: keep what runs, and start one if it was woken.
    woken = endpoint.wake_at >= active_at
    keep = max(1, min(needed, endpoint.max_replicas))
    return Decision(keep if woken or endpoint.desired_replicas > 0 else 0, "idle, within its idle time")


def last_activity(endpoint: Endpoint, load: Load, replicas: Sequence[Replica]) -> float:
    """When the endpoint last did, or was asked to do, something. A start counts once it is done, so that idle time
    begins when it could serve."""
    started = [replica.ready_at or replica.created_at for replica in replicas if replica.state.active]
    return max([load.last_finished_at, endpoint.wake_at, *started])
