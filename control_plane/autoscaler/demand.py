"""What gateways and replicas report, brought together per endpoint, and how it was of late."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from control_plane.domain import Demand, Endpoint, Replica
from control_plane.steady import Steady

SLOW_SECONDS = 60.0
"""How far back a decision looks."""
AGAIN_SECONDS = 300.0
"""A load that twice comes back so soon after it seemed to have gone is taken to come again, for twice as long."""


@dataclass(frozen=True, slots=True)
class Load:
    """One endpoint's load now."""

    in_flight: int
    held: int
    last_finished_at: float
    held_at: float = field(default=float("-inf"), compare=False)
    """When a gateway last said that it holds somebody."""

    @property
    def total(self) -> int:
        return self.in_flight + self.held


def combine(reports: Sequence[Demand], replicas: Sequence[Replica], now: float, stale_after: float) -> Load:
    """Sum the gateways' reports.

    A gateway that fell silent may have died with requests open: its counts stop counting after `stale_after`
    seconds, and its last word then counts as the end of them. Replicas know what still runs on them, so work that
    no gateway reports any more still counts.
    """
    in_flight = held = 0
    last = 0.0
    held_at = float("-inf")
    for report in reports:
        last = max(last, report.last_finished_at)
        if now - report.reported_at <= stale_after:
            in_flight += report.in_flight
            held += report.held
            held_at = max(held_at, report.reported_at) if report.held else held_at
        elif report.in_flight or report.held:
            last = max(last, report.reported_at)
    busy = sum(replica.busy for replica in replicas)
    return Load(max(in_flight, busy), held, last, held_at)


class Memory:
    """An endpoint's last minute: the load over it, what was wanted in it, when it was in panic or came back.

    Survives restarts by `dump` and `load`, whose times are ages, since another process has another clock.
    """

    def __init__(self, keep: float = SLOW_SECONDS) -> None:
        self._keep = keep
        self.held_at = float("-inf")
        """When somebody was last seen to be held."""
        self._loads: deque[tuple[float, int]] = deque()
        """When the load became what it was then; the first one may have begun before the window."""
        self._wanted: deque[tuple[float, int]] = deque()
        self.panic_at: float | None = None
        self._gone: tuple[float, int] | None = None
        """When load seemed to have gone for good, and how many replicas were enough from then on."""
        self._came_back: deque[float] = deque(maxlen=2)

    def note(self, load: int, now: float) -> None:
        if not self._loads or self._loads[-1][1] != load:
            self._loads.append((now, load))
        while len(self._loads) > 1 and self._loads[1][0] <= now - self._keep:
            self._loads.popleft()
        if len(self._loads) > _MOST_CHANGES:
            self._thin()

    def average(self, seconds: float, now: float) -> float:
        """Mean load of the last `seconds`, each weighted by how long it stood; of all that is known if that is less."""
        area = span = 0.0
        end = now
        for start, load in reversed(self._loads):
            start = max(start, now - seconds)
            area += load * max(0.0, end - start)
            span += max(0.0, end - start)
            end = start
            if start <= now - seconds:
                break
        return area / span if span > 0 else float(self._loads[-1][1] if self._loads else 0)

    def before(self, seconds: float, now: float) -> int:
        """The load that was `seconds` ago; the oldest that is known, if that is later."""
        for start, load in reversed(self._loads):
            if start <= now - seconds:
                return load
        return self._loads[0][1] if self._loads else 0

    def most_wanted(self, wanted: int, now: float) -> int:
        """Note what is wanted, and tell the most that was in the last `SLOW_SECONDS`."""
        while self._wanted and self._wanted[-1][1] <= wanted:
            self._wanted.pop()
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - self._keep:
            self._wanted.popleft()
        return self._wanted[0][1]

    def comes_again(self, wanted: int, enough: int, now: float) -> bool:
        """Note that `enough` would do for good, by what is seen now; tell whether that was wrong twice of late."""
        if self._gone is not None and now - self._gone[0] > AGAIN_SECONDS:
            self._gone = None
        if self._gone is not None and wanted > self._gone[1]:
            self._came_back.append(now)
            self._gone = None
        most = self._wanted[0][1] if self._wanted else wanted
        if enough < most and (self._gone is None or enough < self._gone[1]):
            self._gone = (now, enough)
        if self._came_back and now - self._came_back[-1] > 2 * AGAIN_SECONDS:
            self._came_back.clear()
        return len(self._came_back) == 2

    def forget_wanted(self) -> None:
        self._wanted.clear()

    def rest(self) -> None:
        """Nobody has called for long: only the load itself is remembered."""
        self.forget_wanted()
        self.panic_at = self._gone = None
        self._came_back.clear()

    @property
    def idle(self) -> bool:
        """Whether nothing is in it that a restart would lose."""
        return not any(load for _, load in self._loads) and self.panic_at is None and not self._came_back

    def dump(self, now: float) -> dict[str, Any]:
        return {
            "loads": [[round(now - at, 2), load] for at, load in self._loads],
            "wanted": [[round(now - at, 2), wanted] for at, wanted in self._wanted],
            "panic": None if self.panic_at is None else round(now - self.panic_at, 2),
            "came_back": [round(now - at, 2) for at in self._came_back],
        }

    @classmethod
    def load(cls, state: Mapping[str, Any], age: float, now: float) -> Memory:
        """What `dump` gave, `age` seconds ago."""
        memory = cls()
        memory._loads.extend((now - age - float(ago), int(load)) for ago, load in state["loads"])
        memory._wanted.extend((now - age - float(ago), int(wanted)) for ago, wanted in state["wanted"])
        memory.panic_at = None if state["panic"] is None else now - age - float(state["panic"])
        # a version before this one doesn't write it
        memory._came_back.extend(now - age - float(ago) for ago in state.get("came_back", ()))
        return memory

    def _thin(self) -> None:
        """Join neighbours by twos, at the greater load: what is forgotten is only how it went within a moment."""
        items = list(self._loads)
        last = items.pop()
        self._loads = deque(
            (first[0], max(first[1], second[1])) for first, second in zip(items[::2], items[1::2], strict=False)
        )
        self._loads.append(last)


_MOST_CHANGES = 512


class LocalTimes:
    """Reads rows as if this process's clock had stamped them."""

    def __init__(self, steady: Steady) -> None:
        self._steady = steady

    def endpoint(self, item: Endpoint, now: float) -> Endpoint:
        wake = self._steady.local((item.id, "wake"), item.wake_at, now)
        sleep = self._steady.local((item.id, "sleep"), item.sleep_at, now)
        if item.wake_at > item.sleep_at and wake <= sleep:
            wake = sleep + 1e-3  # seen at once, but one clock stamped both
        return replace(item, wake_at=wake, sleep_at=sleep)

    def replica(self, item: Replica, now: float) -> Replica:
        ready = item.ready_at
        return replace(
            item,
            created_at=self._steady.local((item.id, "created"), item.created_at, now),
            ready_at=None if ready is None else self._steady.local((item.id, "ready"), ready, now),
        )

    def report(self, endpoint_id: str, report: Demand, now: float) -> Demand:
        at = self._steady.local((endpoint_id, report.gateway_id), report.reported_at, now)
        return replace(
            report, reported_at=at, last_finished_at=at - max(0.0, report.reported_at - report.last_finished_at)
        )

    def keep(
        self, endpoints: Sequence[Endpoint], replicas: Sequence[Replica], reports: Mapping[str, Sequence[Demand]]
    ) -> None:
        """Forget what isn't there any more."""
        keys: list[tuple[str, str]] = [(item.id, kind) for item in endpoints for kind in ("wake", "sleep")]
        keys += [(item.id, kind) for item in replicas for kind in ("created", "ready")]
        keys += [(endpoint_id, report.gateway_id) for endpoint_id, found in reports.items() for report in found]
        self._steady.keep(keys)
