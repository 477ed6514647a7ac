from __future__ import annotations

from dataclasses import dataclass

import pytest

from control_plane.domain import Endpoint
from control_plane.planning.replay import Fleet, Outcome, Replay, Rule, Speed, Starts
from control_plane.planning.scaler import Ours, endpoint
from control_plane.planning.traffic import Traffic

# a prompt of 100 tokens takes 1 s, each further token 0.1 s, and two run at once
SPEED = Speed(0.0, 0.01, (0.1, 0.1), 2.0)
COLD = Starts(10.0)


@dataclass
class Fixed:
    """Always `count`, from the first request on."""

    count: int
    tick: float = 1.0
    came: bool = False

    def wanted(self, fleet: Fleet, now: float) -> int:
        self.came |= bool(fleet.held)
        return self.count if self.came else 0


def traffic(*rows: tuple[float, int, int]) -> Traffic:
    found = Traffic()
    for row in rows:
        found.add(*row)
    return found


def replay(of: Traffic, rule: Rule, *, starts: Starts = COLD, bound: float = 2.0, max_wait: float = 60.0) -> Outcome:
    return Replay(of, SPEED, starts, rule, bound=bound, max_wait=max_wait).run()


def test_a_first_request_waits_for_the_start_and_its_prompt() -> None:
    found = replay(traffic((100, 100, 11)), Fixed(1))
    assert found.ttft_p50 == pytest.approx(11.0)
    assert (found.starts, found.within, found.gave_up, found.hours) == (1, 0.0, 0, 1.0)
    assert found.replica_hours * 3600 == pytest.approx(3500), "from its start to the end of the hour"
    assert (found.replica_hours - found.idle_hours) * 3600 == pytest.approx(2.0), "busy with one prompt and ten tokens"


def test_later_ones_find_it_ready_and_share_it() -> None:
    found = replay(traffic((100, 100, 1), (200, 100, 11), (200, 100, 11), (200, 100, 11)), Fixed(1), bound=1.5)
    # of the three at once the second waits for the first's prompt, the third for a place too: the first ends at 202
    times = sorted([11.0, 1.0, 2.0, 3.0])
    assert found.ttft_p50 == pytest.approx(times[1])
    assert found.ttft_p95 == pytest.approx(times[3])
    assert found.within == 0.25


def test_two_replicas_take_turns() -> None:
    found = replay(traffic((0, 100, 1), (100, 100, 1), (100, 100, 1)), Fixed(2), bound=1.0)
    assert (found.starts, found.most_replicas) == (2, 2)
    assert found.within == pytest.approx(2 / 3)


def test_who_waits_for_too_long_is_given_up() -> None:
    found = replay(traffic((0, 100, 1), (8, 100, 1)), Fixed(1), max_wait=5.0, bound=60)
    assert (found.gave_up, found.within) == (1, 0.5)


def test_resting_replicas_wake_sooner_and_cost_while_they_rest() -> None:
    found = replay(traffic((0, 100, 1), (1800, 100, 1)), Ours(endpoint(idle_timeout=60)), starts=Starts(10.0, 0.5))
    assert (found.starts, found.wakes) == (0, 2)
    assert found.ttft_p95 == pytest.approx(1.5)
    assert found.resting_hours == pytest.approx(found.hours - found.replica_hours, rel=0.01)


@pytest.mark.parametrize(
    ("what", "starts", "hours"),
    [
        (endpoint(idle_timeout=300), 2, (2 * 310 / 3600, 2 * 330 / 3600)),
        (endpoint(idle_timeout=3000), 1, (0.99, 1.0)),
        (endpoint(min_replicas=1), 1, (1.0, 1.0)),
    ],
)
def test_the_real_scaler_keeps_an_endpoints_settings(what: Endpoint, starts: int, hours: tuple[float, float]) -> None:
    found = replay(traffic((0, 100, 1), (1800, 100, 1)), Ours(what))
    assert found.starts == starts
    assert hours[0] <= found.replica_hours <= hours[1] + 1e-9


def test_the_real_scaler_adds_replicas_under_load_and_ends_them_after_it() -> None:
    crowd = [(60 + place * 0.25, 10, 200) for place in range(400)]
    found = replay(traffic(*crowd, (3000, 10, 10)), Ours(endpoint(target=2, max_replicas=6)))
    assert found.most_replicas == 6
    assert found.gave_up == 0
    assert found.replica_hours < 6 * found.hours / 3


def test_time_is_conserved() -> None:
    crowd = [(place * 7.0, 50, 30) for place in range(500)]
    found = replay(traffic(*crowd), Ours(endpoint(target=2, idle_timeout=30)))
    assert 0 <= found.idle_hours <= found.replica_hours
    assert found.requests == 500
    work = 500 * (0.5 + 29 * 0.1) / 3600
    assert found.replica_hours - found.idle_hours <= work + 1e-6, "requests that overlap share their replica's time"
