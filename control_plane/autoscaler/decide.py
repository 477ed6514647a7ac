"""How many replicas an endpoint should have, and which term said so. Pure, but for the memory that is handed in.

Each term asks for a number; the greatest counts. Up goes fast: by the mean of the last two seconds and what it grew by
of late, and by this moment where somebody is held. Down goes slowly: to the most that was wanted in half a minute. In
panic, when load outgrew twice what serves, nothing goes down at all. The two windows and the panic are Knative's idea;
see its documents. How long the windows are was found by replaying traces: `make bench-scaler`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from control_plane.autoscaler.demand import SLOW_SECONDS, Load, Memory
from control_plane.domain import Endpoint, Replica, ReplicaState, Rung, Window


@dataclass(frozen=True, slots=True)
class Aim:
    """What the terms go by. `utilization` is the part of a replica's target that is used; the rest is for growth."""

    utilization: float = 0.7
    fast_seconds: float = 2.0
    growth_seconds: float = 5.0
    """What the load grew by in so long, it is taken to grow by again while a replica starts."""
    panic_ratio: float = 2.0
    kv_high: float = 0.9
    kv_low: float = 0.75
    most_growth: float = 2.0
    """By how much a late first token multiplies what serves, at most."""


AIM = Aim()
_NO_LOAD = Load(0, 0, 0.0)
_REPORTED_LATE = 2.0
"""Seconds by which the end of a request may be heard of late: it doesn't undo a sleep that was asked for after it."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What was measured of late; None where nothing was."""

    ttft_p95: float | None = None
    """Seconds."""
    kv_usage: float | None = None
    """Of the fullest replica, 0 to 1."""


NO_SIGNALS = Signals()


@dataclass(frozen=True, slots=True)
class Decision:
    replicas: int
    why: str
    term: str


def decide(
    endpoint: Endpoint,
    load: Load,
    memory: Memory,
    signals: Signals,
    replicas: Sequence[Replica],
    now: float,
    aim: Aim = AIM,
) -> Decision:
    """Notes `load` in `memory`, and decides. Times in `endpoint`, `load` and `replicas` are of the clock of `now`."""
    memory.note(load.total, now)
    memory.held_at = max(memory.held_at, load.held_at)
    floor = minimum(endpoint, now)
    if load.total == 0:
        quiet = _quiet(endpoint, load, memory, replicas, floor, now)
        if quiet is not None:
            memory.panic_at = None
            memory.forget_wanted()
            return quiet
    ready = sum(replica.state is ReplicaState.READY for replica in replicas)
    terms = [_load_term(endpoint, load, memory, ready, now, aim), _late_term(endpoint, load, signals, ready, aim)]
    terms += [_cache_term(load, signals, ready, aim), floor]
    best = max(terms, key=lambda term: term.replicas)
    # as soon as the windows see nothing any more, one stays until it was idle for long enough
    best = max(best, Decision(1, "idle, within its idle time", "idle"), key=lambda term: term.replicas)
    best = _slowly(best, memory, ready, endpoint, now, aim)
    if best.replicas > endpoint.max_replicas:
        return Decision(endpoint.max_replicas, f"{best.why}; at most {endpoint.max_replicas}", "max")
    return best


def minimum(endpoint: Endpoint, now: float) -> Decision:
    """The least that is always there, or in this part of the week."""
    best = Decision(endpoint.min_replicas, f"at least {endpoint.min_replicas} asked for", "minimum")
    if endpoint.warmth == Rung.HOT and best.replicas == 0:
        best = Decision(1, f"hot: no colder rung gives a first token within {endpoint.max_wait:g} s", "warmth")
    for window in endpoint.schedule:
        if window.min_replicas > best.replicas and within(window, now):
            best = Decision(window.min_replicas, f"at least {window.min_replicas} by schedule", "schedule")
    return Decision(min(best.replicas, endpoint.max_replicas), best.why, best.term)


def within(window: Window, now: float) -> bool:
    """Whether `now` is in that part of the week, by the clocks of its zone."""
    local = datetime.fromtimestamp(now, UTC).astimezone(ZoneInfo(window.zone))
    minute = local.hour * 60 + local.minute
    if window.start < window.end:
        return local.weekday() in window.days and window.start <= minute < window.end
    yesterday = (local - timedelta(days=1)).weekday()
    return (local.weekday() in window.days and minute >= window.start) or (
        yesterday in window.days and minute < window.end
    )


def _quiet(
    endpoint: Endpoint, load: Load, memory: Memory, replicas: Sequence[Replica], floor: Decision, now: float
) -> Decision | None:
    """For an endpoint without work: zero or its minimum where its time has come; None while it isn't idle for long."""
    active_at = last_activity(endpoint, load, replicas)
    asked_at = max(last_activity(endpoint, _NO_LOAD, replicas), memory.held_at, load.last_finished_at - _REPORTED_LATE)
    if endpoint.sleep_at >= asked_at:
        return floor if floor.replicas else Decision(0, "put to sleep", "sleep")
    if any(_starts(replica) for replica in replicas):
        return None
    idle = now - active_at
    if idle >= endpoint.idle_timeout:
        return floor if floor.replicas else Decision(0, f"no request for {endpoint.idle_timeout:g} s", "idle")
    if endpoint.desired_replicas == 0 and endpoint.wake_at < active_at:
        return floor
    return None


def _starts(replica: Replica) -> bool:
    return replica.state in (ReplicaState.INTENDED, ReplicaState.STARTING) and replica.rung == "hot"


def _load_term(endpoint: Endpoint, load: Load, memory: Memory, ready: int, now: float, aim: Aim) -> Decision:
    each = endpoint.target * aim.utilization
    mean = memory.average(aim.fast_seconds, now)
    counted, over = (float(load.total), "now") if load.held or not ready else (mean, f"over {aim.fast_seconds:g} s")
    growth = max(0, load.total - memory.before(aim.growth_seconds, now)) if ready else 0
    counted += growth
    wanted = math.ceil(counted / each - 1e-9)
    if wanted > aim.panic_ratio * max(1, ready) or (memory.panic_at is not None and wanted > ready):
        memory.panic_at = now
    grown = f", {growth} of it by growth," if growth else ""
    capacity = f"({endpoint.target:g} × {aim.utilization:g})"
    said = f"{load.in_flight} in flight, {load.held} held: {counted:.3g} {over}{grown} / {capacity} = {wanted}"
    return Decision(max(wanted, 1 if load.total else 0), said, "load")


def _late_term(endpoint: Endpoint, load: Load, signals: Signals, ready: int, aim: Aim) -> Decision:
    slo, seen = endpoint.ttft_slo, signals.ttft_p95
    if slo is None or seen is None or seen <= slo or not load.total or not ready:
        return Decision(0, "", "ttft")
    wanted = math.ceil(ready * min(aim.most_growth, seen / slo))
    return Decision(wanted, f"first tokens after {seen:.3g} s (p95), {slo:g} s asked, with {ready} ready", "ttft")


def _cache_term(load: Load, signals: Signals, ready: int, aim: Aim) -> Decision:
    used = signals.kv_usage
    if used is None or used < aim.kv_low or not load.total or not ready:
        return Decision(0, "", "kv")
    # between the two marks what is there stays, so that one more doesn't come and go
    wanted = ready + 1 if used >= aim.kv_high else ready
    return Decision(wanted, f"KV cache {used:.0%} full with {ready} ready", "kv")


def _slowly(best: Decision, memory: Memory, ready: int, endpoint: Endpoint, now: float, aim: Aim) -> Decision:
    if memory.panic_at is not None and now - memory.panic_at > SLOW_SECONDS:
        memory.panic_at = None
    most = memory.most_wanted(best.replicas, now)
    if memory.panic_at is not None and endpoint.desired_replicas > max(most, best.replicas):
        return Decision(endpoint.desired_replicas, f"panic since {now - memory.panic_at:.0f} s: {best.why}", "panic")
    if most > best.replicas:
        return Decision(most, f"{most} wanted within {SLOW_SECONDS:g} s; now {best.why}", "slow-down")
    return best


def last_activity(endpoint: Endpoint, load: Load, replicas: Sequence[Replica]) -> float:
    """When the endpoint last did, or was asked to do, something. A start counts once it is done, so that idle time
    begins when it could serve."""
    started = [
        replica.ready_at or replica.created_at
        for replica in replicas
        if replica.state.active and replica.state is not ReplicaState.RESTING
    ]
    return max([load.last_finished_at, endpoint.wake_at, *started])
