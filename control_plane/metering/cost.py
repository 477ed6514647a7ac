"""What an endpoint's replicas cost beside what they served. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Life:
    """When a replica existed, in seconds since the epoch; `end` is None while it does."""

    replica_id: str
    start: float
    end: float | None


@dataclass(frozen=True, slots=True)
class Hours:
    """`busy` of `alive` at least one request ran; the rest is the price of warmth."""

    alive: float
    busy: float

    @property
    def idle(self) -> float:
        return self.alive - self.busy


def hours(lives: Iterable[Life], work: Iterable[tuple[str, float, float]], since: float, until: float) -> Hours:
    """Replica hours within `[since, until)`. `work` has a replica id, a start and an end for each request, by start."""
    alive: dict[str, tuple[float, float]] = {}
    for life in lives:
        start, end = max(since, life.start), min(until, until if life.end is None else life.end)
        if end > start:
            alive[life.replica_id] = (start, end)
    busy = 0.0
    reached = {replica_id: start for replica_id, (start, _) in alive.items()}
    for replica_id, start, end in work:
        if replica_id in alive:
            end = min(end, alive[replica_id][1])
            busy += max(0.0, end - max(start, reached[replica_id]))
            reached[replica_id] = max(reached[replica_id], end)
    total = sum(end - start for start, end in alive.values())
    return Hours(total / 3600, busy / 3600)
