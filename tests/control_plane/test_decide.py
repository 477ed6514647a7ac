from __future__ import annotations

import copy
import json
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest

from control_plane.autoscaler.decide import NO_SIGNALS, Signals, decide, within
from control_plane.autoscaler.demand import Load, LocalTimes, Memory, combine
from control_plane.domain import Demand, Replica, ReplicaState, Window
from control_plane.steady import Steady
from tests.control_plane.test_plan import NOW, endpoint, replica

NOTHING = Load(0, 0, 0.0)


QUIET = Load(0, 0, NOW - 5)


def remembering(load: int, wanted: int = 0) -> Memory:
    """A minute at one load."""
    memory = Memory()
    memory.note(load, NOW - 59)
    memory.most_wanted(wanted, NOW - 15)
    return memory


@pytest.mark.parametrize(
    ("changes", "load", "running", "wanted"),
    [
        # at zero
        ({"desired_replicas": 0}, NOTHING, [], 0),
        ({"desired_replicas": 0}, Load(0, 1, 0.0), [], 1),
        ({"desired_replicas": 0}, Load(0, 200, 0.0), [], 4),
        ({"desired_replicas": 0, "max_replicas": 1}, Load(0, 200, 0.0), [], 1),
        ({"desired_replicas": 0, "wake_at": NOW - 1}, NOTHING, [], 1),
        ({"desired_replicas": 0, "wake_at": NOW - 301}, NOTHING, [], 0),
        # idle: counted from the last finished request, from being woken, from being ready
        ({}, Load(0, 0, NOW - 299), [], 1),
        ({}, Load(0, 0, NOW - 300), [], 0),
        ({"wake_at": NOW - 299}, Load(0, 0, NOW - 900), [], 1),
        ({}, Load(0, 0, NOW - 900), [replica(ready_at=NOW - 299)], 1),
        ({}, Load(0, 0, NOW - 900), [replica(ready_at=NOW - 301)], 0),
        ({}, Load(0, 0, NOW - 900), [replica(ReplicaState.DRAINING, ready_at=NOW - 1)], 0),
        ({"desired_replicas": 0}, Load(0, 0, NOW - 900), [replica(ReplicaState.RESTING, ready_at=NOW - 1)], 0),
        # a start that takes longer than the idle time is not undone before it could serve
        ({}, Load(0, 0, NOW - 900), [replica(ReplicaState.STARTING, created_at=NOW - 400)], 1),
        ({"sleep_at": NOW - 1}, NOTHING, [replica(ReplicaState.STARTING, created_at=NOW - 9)], 0),
        # never with anything in flight or held, however long it takes
        ({}, Load(1, 0, NOW - 9000), [], 1),
        ({"sleep_at": NOW}, Load(1, 0, NOW - 9000), [], 1),
        ({"sleep_at": NOW}, Load(0, 1, NOW - 9000), [], 1),
        # asked to sleep
        ({"sleep_at": NOW - 1}, Load(0, 0, NOW - 2), [replica(ready_at=NOW - 3)], 0),
        ({"sleep_at": NOW - 5}, Load(0, 0, NOW - 2), [replica(ready_at=NOW - 9)], 1),
        # a request whose end was heard of late
        ({"sleep_at": NOW - 3}, Load(0, 0, NOW - 2), [replica(ready_at=NOW - 9)], 0),
        ({"sleep_at": NOW - 3, "wake_at": NOW - 1, "desired_replicas": 0}, NOTHING, [], 1),
        # bounds
        ({"min_replicas": 2}, NOTHING, [], 2),
        ({"min_replicas": 2}, Load(1, 0, 0.0), [], 2),
        ({"min_replicas": 2, "sleep_at": NOW}, Load(0, 0, NOW - 2), [], 2),
        # 70 % of the target is used
        ({"target": 10.0}, Load(7, 0, 0.0), [], 1),
        ({"target": 10.0}, Load(8, 0, 0.0), [], 2),
        ({"target": 1.0}, Load(1, 1, 0.0), [], 3),
    ],
)
def test_how_many_replicas(changes: dict[str, Any], load: Load, running: list[Replica], wanted: int) -> None:
    assert decide(endpoint(**changes), load, Memory(), NO_SIGNALS, running, NOW).replicas == wanted


READY = [replica(id="a", ready_at=NOW - 900), replica(id="b", ready_at=NOW - 900)]


@pytest.mark.parametrize(
    ("changes", "load", "memory", "signals", "wanted", "term"),
    [
        # what it grew by of late, beyond what it may by chance, is taken to come again
        ({}, Load(22, 0, 0.0), remembering(10), NO_SIGNALS, 3, "load"),
        ({}, Load(11, 0, 0.0), remembering(8), NO_SIGNALS, 1, "load"),
        ({}, Load(5, 0, 0.0), remembering(30), NO_SIGNALS, 1, "load"),
        ({}, Load(20, 4, 0.0), remembering(24), NO_SIGNALS, 3, "load"),
        ({}, Load(20, 4, 0.0), remembering(2), NO_SIGNALS, 4, "load"),
        ({}, Load(30, 0, 0.0), remembering(30), NO_SIGNALS, 3, "load"),
        # down by the most that was wanted in a minute, as far as chance may bring it back
        ({"desired_replicas": 3}, Load(11, 0, 0.0), remembering(11, wanted=3), NO_SIGNALS, 3, "slow-down"),
        ({"desired_replicas": 4}, Load(8, 0, 0.0), remembering(8, wanted=4), NO_SIGNALS, 2, "slow-down"),
        ({"desired_replicas": 3}, Load(1, 0, 0.0), remembering(1, wanted=3), NO_SIGNALS, 1, "load"),
        ({"desired_replicas": 3}, Load(1, 0, 0.0), remembering(11, wanted=3), NO_SIGNALS, 3, "slow-down"),
        ({"desired_replicas": 3}, QUIET, remembering(11, wanted=3), NO_SIGNALS, 3, "slow-down"),
        ({"desired_replicas": 3}, QUIET, remembering(0, wanted=1), NO_SIGNALS, 1, "idle"),
        # late first tokens: as many more as they are late, twice as many at most
        ({"ttft_slo": 1.0}, Load(9, 0, 0.0), remembering(9), Signals(ttft_p95=1.4), 3, "ttft"),
        ({"ttft_slo": 1.0}, Load(9, 0, 0.0), remembering(9), Signals(ttft_p95=60.0), 4, "ttft"),
        ({"ttft_slo": 2.0}, Load(9, 0, 0.0), remembering(9), Signals(ttft_p95=1.4), 1, "load"),
        ({"ttft_slo": 1.0}, QUIET, remembering(0), Signals(ttft_p95=60.0), 1, "idle"),
        # a full KV cache: one more above nine tenths, none less above three quarters
        ({}, Load(9, 0, 0.0), remembering(9), Signals(kv_usage=0.95), 3, "kv"),
        ({}, Load(9, 0, 0.0), remembering(9), Signals(kv_usage=0.8), 2, "kv"),
        ({}, Load(9, 0, 0.0), remembering(9), Signals(kv_usage=0.5), 1, "load"),
        ({}, Load(300, 1, 0.0), remembering(9), Signals(kv_usage=0.95), 4, "max"),
        # what was measured under a load that has gone counts no more; one that is less by chance hasn't
        ({}, Load(1, 0, 0.0), remembering(9), Signals(kv_usage=0.95), 1, "load"),
        ({}, Load(5, 0, 0.0), remembering(9), Signals(kv_usage=0.95), 3, "kv"),
        ({"ttft_slo": 1.0}, Load(1, 0, 0.0), remembering(9), Signals(ttft_p95=1.4), 1, "load"),
    ],
)
def test_the_term_that_asks_for_most_decides(
    changes: dict[str, Any], load: Load, memory: Memory, signals: Signals, wanted: int, term: str
) -> None:
    decision = decide(endpoint(**changes), load, copy.deepcopy(memory), signals, READY, NOW)
    assert (decision.replicas, decision.term) == (wanted, term), decision.why


def test_nothing_goes_down_in_panic() -> None:
    memory, one = remembering(1), READY[:1]
    assert decide(endpoint(desired_replicas=1), Load(60, 9, 0.0), memory, NO_SIGNALS, one, NOW).replicas == 4
    down = endpoint(desired_replicas=4)
    for second, expected in ((1, "panic"), (9, "panic"), (11, "load")):
        memory.forget_wanted()  # to see the panic alone
        decision = decide(down, Load(12, 0, 0.0), memory, NO_SIGNALS, one, NOW + second)
        assert (decision.replicas, decision.term) == (4 if expected == "panic" else 2, expected), decision
    assert memory.panic_at is None


@pytest.mark.parametrize(
    ("load", "seconds"),
    [
        (15, None),  # still wants two
        (11, 60),  # by chance there could soon be two replicas' load again
        (1, 7),  # a burst that has gone
    ],
)
def test_how_long_a_second_replica_stays(load: int, seconds: int | None) -> None:
    memory = remembering(20)
    counts = {
        second: decide(endpoint(desired_replicas=2), Load(load if second else 20, 0, 0.0), memory, NO_SIGNALS, READY,
                       NOW + second).replicas
        for second in range(90)
    }  # fmt: skip
    assert [second for second, count in counts.items() if count == 2][-1] == (89 if seconds is None else seconds)


def test_what_goes_and_comes_again_keeps_its_replicas() -> None:
    memory, counts = Memory(), [2]
    for second in range(1800):
        load = Load(20 if second % 20 < 10 else 2, 0, 0.0)
        there = endpoint(desired_replicas=counts[-1])
        counts.append(decide(there, load, memory, NO_SIGNALS, READY[: counts[-1]], NOW + second).replicas)
        if second % 300 == 299:  # another process goes on
            memory = Memory.load(json.loads(json.dumps(memory.dump(NOW + second))), age=0.0, now=NOW + second)
    changes = [second for second, (before, after) in enumerate(pairwise(counts)) if before != after]
    assert changes == [18, 20, 35, 38, 40], "let go twice, and not again"
    asleep = copy.deepcopy(memory)
    asleep_at = NOW + 1800 + 61
    assert decide(endpoint(sleep_at=asleep_at), NOTHING, asleep, NO_SIGNALS, [], asleep_at).term == "sleep"
    asleep.note(0, asleep_at + 61)
    assert asleep.idle, "nothing is written down of one at rest"
    calm = [decide(endpoint(), Load(2, 0, 0.0), memory, NO_SIGNALS, READY, NOW + 1800 + second) for second in range(62)]
    assert calm[-1].replicas == 1


WORK = Window((0, 1, 2, 3, 4), 8 * 60, 18 * 60, 2, "Europe/Berlin")
NIGHT = Window((4,), 22 * 60, 6 * 60, 3)


@pytest.mark.parametrize(
    ("at", "window", "inside"),
    [
        ("2026-11-30T07:00:00+00:00", WORK, True),  # a Monday, 8 in Berlin
        ("2026-11-30T06:59:00+00:00", WORK, False),
        ("2026-11-30T17:00:00+00:00", WORK, False),
        ("2026-11-29T12:00:00+00:00", WORK, False),  # a Sunday
        ("2026-07-01T06:00:00+00:00", WORK, True),  # daylight saving time
        ("2026-12-04T21:59:00+00:00", NIGHT, False),  # a Friday
        ("2026-12-04T22:00:00+00:00", NIGHT, True),
        ("2026-12-05T05:59:00+00:00", NIGHT, True),
        ("2026-12-05T22:00:00+00:00", NIGHT, False),
    ],
)
def test_a_part_of_the_week_has_its_own_minimum(at: str, window: Window, inside: bool) -> None:
    now = datetime.fromisoformat(at).timestamp()
    assert within(window, now) is inside
    quiet = endpoint(desired_replicas=0, schedule=(window,), wake_at=0.0, sleep_at=-1.0, max_replicas=2)
    decision = decide(quiet, NOTHING, Memory(), NO_SIGNALS, [], now)
    assert (decision.replicas, decision.term) == ((2, "schedule") if inside else (0, "idle"))


def test_memory_survives_a_restart_with_another_clock() -> None:
    memory = remembering(20, wanted=3)
    memory.panic_at = NOW - 10
    state = json.loads(json.dumps(memory.dump(NOW)))
    again = Memory.load(state, age=2.0, now=5000.0)
    assert again.panic_at == pytest.approx(4988.0)
    assert again.average(6.0, 5000.0) == 20
    assert again.most_wanted(1, 5000.0) == 3


def test_memory_is_bounded_and_keeps_its_mean() -> None:
    memory = Memory()
    for step in range(100_000):
        memory.note(step % 2 + 5, NOW + step / 1000)
    assert len(memory.dump(NOW + 100)["loads"]) <= 512
    assert 5 <= memory.average(6.0, NOW + 100) <= 6


def test_of_a_sleep_and_a_wake_that_are_seen_at_once_the_later_counts() -> None:
    clocks = Clocks()
    times = LocalTimes(Steady(lambda: clocks.monotonic))
    before = endpoint(wake_at=NOW - 50, sleep_at=NOW - 60)
    times.endpoint(before, clocks.wall)
    clocks.passes(1)
    both = times.endpoint(replace(before, sleep_at=clocks.wall - 0.2, wake_at=clocks.wall - 0.1), clocks.wall)
    assert both.wake_at > both.sleep_at
    assert decide(both, NOTHING, Memory(), NO_SIGNALS, [], clocks.wall).replicas == 1
    again = times.endpoint(replace(before, sleep_at=clocks.wall, wake_at=clocks.wall - 0.1), clocks.wall)
    assert decide(again, NOTHING, Memory(), NO_SIGNALS, [], clocks.wall).replicas == 0


class Clocks:
    """A wall clock that somebody sets, and a monotonic one."""

    def __init__(self) -> None:
        self.wall, self.monotonic = NOW, 50.0

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
@pytest.mark.parametrize("skew", [-300.0, 0.0, 300.0])
def test_ages_don_t_care_for_clocks(jump: float, skew: float) -> None:
    """A gateway's clock differs by `skew`, and in mid-run this machine's is set by `jump`."""
    clocks = Clocks()
    times = LocalTimes(Steady(lambda: clocks.monotonic))
    # the first look trusts what it reads, from the second on only what passes counts
    times.report("e", Demand("g", 1, 0, clocks.wall + skew - 2, clocks.wall + skew), clocks.wall)
    clocks.passes(1)
    report = Demand("g", 1, 0, clocks.wall + skew - 2, clocks.wall + skew)
    for passed in (0, 5, 4):
        clocks.passes(passed)
        local = times.report("e", report, clocks.wall)
    assert clocks.wall - local.reported_at == pytest.approx(9)
    assert clocks.wall - local.last_finished_at == pytest.approx(11)
    clocks.wall += jump
    clocks.passes(3)
    local = times.report("e", report, clocks.wall)
    assert clocks.wall - local.reported_at == pytest.approx(12)
    assert combine([local], [], clocks.wall, stale_after=15).in_flight == 1


@pytest.mark.parametrize(
    ("reports", "running", "load"),
    [
        ([], [], NOTHING),
        ([Demand("a", 1, 2, 5.0, NOW), Demand("b", 3, 0, 9.0, NOW - 14)], [], Load(4, 2, 9.0)),
        # silent for too long: its last word counts as the end of what it had open
        ([Demand("a", 1, 0, 5.0, NOW - 16)], [], Load(0, 0, NOW - 16)),
        ([Demand("a", 0, 0, 5.0, NOW - 16)], [], Load(0, 0, 5.0)),
        # what runs on a replica counts though no gateway speaks of it
        ([Demand("a", 1, 0, 5.0, NOW - 16)], [replica(busy=2)], Load(2, 0, NOW - 16)),
        ([Demand("a", 5, 0, 5.0, NOW)], [replica(busy=2)], Load(5, 0, 5.0)),
    ],
)
def test_reports_are_brought_together(reports: list[Demand], running: list[Replica], load: Load) -> None:
    assert combine(reports, running, NOW, stale_after=15) == load
