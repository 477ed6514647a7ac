"""How many replicas an endpoint should have, and which term said so. Pure, but for the memory that is handed in.

Each term asks for a number; the greatest counts. Up goes at once: by this moment's load and what it grew by of late.
Down goes to the most that was wanted in a minute. Both heed chance: where requests come apart from each other, n at
once are n give or take √n. Growth within that is none; and a load so far below that no chance brings it back was a
burst, which has gone, unless bursts came back twice of late. In panic, when load outgrew twice what serves, nothing
goes down. Windows and panic are Knative's idea; see its documents. How long they are was found by replaying traces:
`make bench-scaler`.
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
    growth_seconds: float = 8.0
    """What the load grew by in so long, beyond chance, it is taken to grow by again while a replica starts."""
    by_chance: float = 4.0
    """How many √n a load of n may grow by, by chance alone, within a minute."""
    fallen: float = 2.0
    """So many √n below its mean of a minute, a load has fallen: what was measured in that minute says no more."""
    panic_ratio: float = 2.0
    """How many times what serves the load must outgrow."""
    panic_seconds: float = 10.0
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
            memory.rest()
            return quiet
    if _up_to(load.total, aim.fallen) < memory.average(SLOW_SECONDS, now):
        signals = NO_SIGNALS
    ready = sum(replica.state is ReplicaState.READY for replica in replicas)
    terms = [_load_term(endpoint, load, memory, ready, now, aim), _late_term(endpoint, load, signals, ready, aim)]
    terms += [_cache_term(load, signals, ready, aim), floor]
    best = max(terms, key=lambda term: term.replicas)
    # as soon as the windows see nothing any more, one stays until it was idle for long enough
    best = max(best, Decision(1, "nobody asks, within its idle time", "idle"), key=lambda term: term.replicas)
    best = _slowly(best, endpoint, load, memory, now, aim)
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
    grown = load.total - memory.before(aim.growth_seconds, now) if ready else 0
    growth = max(0.0, grown - math.sqrt(load.total))
    wanted = _enough(load.total + growth, endpoint, aim)
    if wanted > aim.panic_ratio * max(1, ready):
        memory.panic_at = now
    more = f", and {growth:.3g} by growth" if growth else ""
    capacity = f"({endpoint.target:g} × {aim.utilization:g})"
    said = f"{load.in_flight} in flight, {load.held} held{more}: {load.total + growth:.3g} / {capacity} = {wanted}"
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


def _slowly(best: Decision, endpoint: Endpoint, load: Load, memory: Memory, now: float, aim: Aim) -> Decision:
    most = memory.most_wanted(best.replicas, now)
    if memory.panic_at is not None and now - memory.panic_at > aim.panic_seconds:
        memory.panic_at = None
    if memory.panic_at is not None and endpoint.desired_replicas > best.replicas:
        since = f"panic {now - memory.panic_at:.0f} s ago"
        return Decision(endpoint.desired_replicas, f"{since}: {best.why}", "panic")
    usual = max(load.total, memory.average(aim.growth_seconds, now))
    enough = max(best.replicas, _enough(_up_to(usual, aim.by_chance), endpoint, aim))
    kept = most if memory.comes_again(best.replicas, enough, now) else min(most, enough)
    if kept > best.replicas:
        return Decision(kept, f"{kept} of {most} wanted within {SLOW_SECONDS:g} s stay; now {best.why}", "slow-down")
    return best


def _enough(load: float, endpoint: Endpoint, aim: Aim) -> int:
    return math.ceil(load / (endpoint.target * aim.utilization) - 1e-9)


def _up_to(load: float, deviations: float) -> float:
    return load + deviations * math.sqrt(load)


def last_activity(endpoint: Endpoint, load: Load, replicas: Sequence[Replica]) -> float:
    """When the endpoint last did, or was asked to do, something. A start counts once it is done, so that idle time
    begins when it could serve."""
    started = [
        replica.ready_at or replica.created_at
        for replica in replicas
        if replica.state.active and replica.state is not ReplicaState.RESTING
    ]
    return max([load.last_finished_at, endpoint.wake_at, *started])
