"""Replays traffic on a scaler's rule in simulated time.

Every replica starts after its time, takes requests up to its slots, computes prompts one after the other and decodes in
batches; requests that find none are held, first come first served. One thing is simpler than the truth: a request
keeps the speed of the batch that it met.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from control_plane.planning.fit import Fit
from control_plane.planning.traffic import Traffic

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast one replica serves: seconds of a prompt (`fixed` and for each token), and of a step by its batch."""

    prompt_fixed: float
    prompt_token: float
    steps: tuple[float, ...]
    """Of a batch of 1, 2, …; as many sequences run at once, the others queue."""
    cache_sequences: float
    """That the KV cache has room for."""

    @property
    def slots(self) -> int:
        return len(self.steps)


def speed_of(fit: Fit, context: float) -> Speed:
    """The speed of `fit` where sequences have `context` tokens on average."""
    short, long = fit.prefill_seconds(1), fit.prefill_seconds(max(2, round(context)))
    each = (long - short) / max(1, round(context) - 1)
    slots = fit.slots(context)
    steps = tuple(fit.step_seconds(batch, context) for batch in range(1, slots + 1))
    return Speed(short, each, steps, max(1.0, fit.kv_tokens / max(1.0, context)))


@dataclass(frozen=True, slots=True)
class Starts:
    """Seconds until a replica serves: from nothing, and from the rung that it rests on (None where none rests)."""

    cold: float
    resting: float | None = None


@dataclass(eq=False, slots=True)
class Server:
    """One replica. `busy` has when each running request ends, and ends of queued ones replace them."""

    number: int
    created_at: float
    ready_at: float
    draining: bool = False
    open: int = 0
    busy: list[float] = field(default_factory=list)
    prompts_until: float = 0.0
    worked: float = 0.0
    working_since: float = 0.0


class Fleet:
    """What a rule sees: the demand, and the replicas that there are."""

    def __init__(self, cache_sequences: float) -> None:
        self._cache_sequences = cache_sequences
        self.servers: list[Server] = []
        """Those that are ready or start; draining ones are on their way out."""
        self.in_flight = 0
        self.held = 0
        self.last_finished_at = 0.0
        self.recent: deque[tuple[float, float]] = deque(maxlen=512)
        """When first tokens came and how long they took, of late."""

    def ready(self, now: float) -> int:
        return sum(server.ready_at <= now for server in self.servers)

    @property
    def fullest(self) -> float:
        """How much of the fullest replica's KV cache is taken, 0 to 1."""
        return min(1.0, max((server.open for server in self.servers), default=0) / self._cache_sequences)


class Rule(Protocol):
    """Decides how many replicas there should be. `tick` is the seconds between two decisions."""

    tick: float

    def wanted(self, fleet: Fleet, now: float) -> int: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a replay. Times in seconds; requests that were given up count as late."""

    requests: int
    within: float
    """Share of requests whose first token came within the bound."""
    ttft_p50: float
    ttft_p95: float
    gave_up: int
    starts: int
    wakes: int
    replica_hours: float
    idle_hours: float
    resting_hours: float
    most_replicas: int
    hours: float


class Replay:
    """One run: `traffic` on replicas of `speed` that `rule` starts and ends."""

    def __init__(
        self, traffic: Traffic, speed: Speed, starts: Starts, rule: Rule, *, bound: float, max_wait: float = 60.0
    ) -> None:
        self._traffic, self._speed, self._starts, self._rule = traffic, speed, starts, rule
        self._bound, self._max_wait = bound, max_wait
        self._fleet = Fleet(speed.cache_sequences)
        self._resting = 0 if starts.resting is None else 1
        self._rested_at = 0.0
        self._resting_seconds = self._alive = self._worked = 0.0
        self._held: deque[int] = deque()
        self._ends: list[tuple[float, int, Server]] = []
        self._ttft = array("f", bytes(4 * len(traffic)))
        self._made = self._started = self._woken = self._gave_up = self._most = 0

    def run(self) -> Outcome:
        """Until the last request is answered, or given up, within the hours that are paid for."""
        end = self._traffic.seconds
        now = 0.0
        arrivals = self._traffic.at
        place = 0
        self._decide(now)
        for server in self._fleet.servers:  # what is always there was there before
            server.ready_at = now
        while now < end:
            self._decide(now)
            nap = now + self._nap()
            while place < len(arrivals) and arrivals[place] < nap:
                self._finish_until(arrivals[place])
                if self._arrive(place):
                    nap = min(nap, arrivals[place])
                place += 1
            now = min(nap, end)
            self._finish_until(now)
            self._release(now)
        self._close(end)
        return self._outcome(end)

    def _nap(self) -> float:
        """Seconds until the next decision: a tick, and less often while nothing is there or nothing happens."""
        fleet = self._fleet
        if fleet.in_flight or fleet.held or any(server.open for server in fleet.servers):
            return self._rule.tick
        return max(self._rule.tick, 5.0 if fleet.servers else 30.0)

    def _decide(self, now: float) -> None:
        fleet = self._fleet
        while self._held and now - self._traffic.at[self._held[0]] > self._max_wait:
            self._give_up(self._held.popleft())
        fleet.held = len(self._held)
        wanted = self._rule.wanted(fleet, now)
        while len(fleet.servers) < wanted:
            self._start(now)
        while len(fleet.servers) > wanted:
            self._end(now)
        self._most = max(self._most, len(fleet.servers))

    def _start(self, now: float) -> None:
        if self._resting:
            assert self._starts.resting is not None  # noqa: S101 -- nothing rests without it
            self._resting -= 1
            self._resting_seconds += now - self._rested_at
            self._woken += 1
            delay = self._starts.resting
        else:
            self._started += 1
            delay = self._starts.cold
        self._made += 1
        self._fleet.servers.append(Server(self._made, now, now + delay))

    def _end(self, now: float) -> None:
        """Those that still start go first, then those with the least to do."""
        going = min(self._fleet.servers, key=lambda server: (server.ready_at <= now, server.open, -server.number))
        self._fleet.servers.remove(going)
        going.draining = True
        if not going.open:
            self._gone(going, now)

    def _gone(self, server: Server, now: float) -> None:
        self._alive += now - server.created_at
        self._worked += server.worked
        if self._starts.resting is not None and not self._resting:
            self._resting, self._rested_at = 1, now

    def _arrive(self, place: int) -> bool:
        """Whether the scaler must be asked at once: nothing is there that will take the request."""
        if not self._held and (server := self._least(self._traffic.at[place])) is not None:
            self._serve(server, place, self._traffic.at[place])
            return False
        self._held.append(place)
        self._fleet.held = len(self._held)
        return not self._fleet.servers

    def _least(self, now: float) -> Server | None:
        ready = [server for server in self._fleet.servers if server.ready_at <= now]
        return min(ready, key=lambda server: server.open) if ready else None

    def _release(self, now: float) -> None:
        """Give held requests to replicas that became ready since, from then on."""
        while self._held:
            ready = [server for server in self._fleet.servers if server.ready_at <= now]
            if not ready:
                break
            server = min(ready, key=lambda server: server.open)
            place = self._held.popleft()
            at = max(server.ready_at, self._traffic.at[place])
            if at - self._traffic.at[place] > self._max_wait:
                self._give_up(place)
            else:
                self._serve(server, place, at)
        self._fleet.held = len(self._held)

    def _serve(self, server: Server, place: int, now: float) -> None:
        busy, speed = server.busy, self._speed
        while busy and busy[0] <= now:
            heapq.heappop(busy)
        began = now if len(busy) < speed.slots else heapq.heappop(busy)
        step = speed.steps[len(busy)]
        prompt = speed.prompt_fixed + speed.prompt_token * self._traffic.inputs[place]
        first = max(began, server.prompts_until) + prompt
        server.prompts_until = first
        finish = first + step * (self._traffic.outputs[place] - 1)
        heapq.heappush(busy, finish)
        heapq.heappush(self._ends, (finish, place, server))
        if not server.open:
            server.working_since = now
        server.open += 1
        self._fleet.in_flight += 1
        took = first - self._traffic.at[place]
        self._ttft[place] = took
        self._fleet.recent.append((first, took))

    def _finish_until(self, now: float) -> None:
        ends = self._ends
        while ends and ends[0][0] <= now:
            at, _, server = heapq.heappop(ends)
            server.open -= 1
            self._fleet.in_flight -= 1
            self._fleet.last_finished_at = at
            if not server.open:
                server.worked += at - server.working_since
                if server.draining:
                    self._gone(server, at)

    def _give_up(self, place: int) -> None:
        self._ttft[place] = math.inf
        self._gave_up += 1

    def _close(self, end: float) -> None:
        """What is still there is paid for until `end`; what still runs then is answered, and counts as work."""
        for place in self._held:
            self._give_up(place)
        running = {server.number: server for _, _, server in self._ends}
        for server in {server.number: server for server in (*self._fleet.servers, *running.values())}.values():
            self._alive += end - server.created_at
            self._worked += server.worked + (end - server.working_since if server.open else 0.0)
        if self._resting:
            self._resting_seconds += end - self._rested_at

    def _outcome(self, end: float) -> Outcome:
        times = sorted(self._ttft)
        return Outcome(
            requests=len(times),
            within=sum(took <= self._bound for took in times) / max(1, len(times)),
            ttft_p50=_part(times, 0.5),
            ttft_p95=_part(times, 0.95),
            gave_up=self._gave_up,
            starts=self._started,
            wakes=self._woken,
            replica_hours=self._alive / HOUR,
            idle_hours=(self._alive - self._worked) / HOUR,
            resting_hours=self._resting_seconds / HOUR,
            most_replicas=self._most,
            hours=end / HOUR,
        )


def _part(times: Sequence[float], share: float) -> float:
    return times[min(len(times) - 1, math.ceil(share * len(times)) - 1)] if times else 0.0
