"""Two other scalers' rules, to hold ours against: a naive one, and Knative's as its documents have it."""

from __future__ import annotations

import math

from control_plane.autoscaler.demand import Memory
from control_plane.planning.replay import Fleet


class Naive:
    """Requests at once over what one replica should carry, at every moment; to zero after a fixed time."""

    def __init__(self, target: float, idle_timeout: float, *, max_replicas: int = 64, tick: float = 1.0) -> None:
        self.tick = tick
        self._target, self._idle_timeout, self._most = target, idle_timeout, max_replicas

    def wanted(self, fleet: Fleet, now: float) -> int:
        load = fleet.in_flight + fleet.held
        if load:
            return min(self._most, math.ceil(load / self._target))
        ready = max((server.ready_at for server in fleet.servers), default=0.0)
        quiet = now - max(fleet.last_finished_at, ready) >= self._idle_timeout
        return 0 if quiet or not fleet.servers else 1


class Knative:
    """The Knative Pod Autoscaler with the defaults of config-autoscaler; `retention` is its
    scale-to-zero-pod-retention-period. Knative 0.14 to 1.14, knative.dev/docs/serving/autoscaling, read 2026-12-01.

    It decides every second here and every two there, which is in its favour.
    """

    STABLE, PANIC, PANIC_RATIO = 60.0, 6.0, 2.0
    UTILIZATION = 0.7
    UP, DOWN = 1000.0, 2.0
    GRACE = 30.0

    def __init__(self, target: float, retention: float, *, max_replicas: int = 64, tick: float = 1.0) -> None:
        self.tick = tick
        self._each = target * self.UTILIZATION
        self._after = max(self.GRACE, retention)
        self._most = max_replicas
        self._memory = Memory(60.0)
        self._panic_at: float | None = None
        self._panic_most = 0
        self._zero_since: float | None = None

    def wanted(self, fleet: Fleet, now: float) -> int:
        self._memory.note(fleet.in_flight + fleet.held, now)
        ready = max(1, fleet.ready(now))
        stable = self._clip(self._memory.average(self.STABLE, now), ready)
        panic = self._clip(self._memory.average(self.PANIC, now), ready)
        if panic / ready >= self.PANIC_RATIO:
            self._panic_at = now
        elif self._panic_at is not None and now - self._panic_at > self.STABLE:
            self._panic_at, self._panic_most = None, 0
        if self._panic_at is not None:
            self._panic_most = max(self._panic_most, panic, len(fleet.servers))
            return min(self._most, self._panic_most)
        if stable > 0 or not fleet.servers:
            self._zero_since = None
            return min(self._most, max(stable, 1 if fleet.held else 0))
        self._zero_since = now if self._zero_since is None else self._zero_since
        return 0 if now - self._zero_since >= self._after else 1

    def _clip(self, average: float, ready: int) -> int:
        wanted = math.ceil(average / self._each - 1e-9)
        return int(min(max(wanted, math.floor(ready / self.DOWN)), math.ceil(ready * self.UP)))
