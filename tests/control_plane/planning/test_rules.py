"""The rules that ours is held against, and a part of `make bench-scaler`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from control_plane.planning.replay import Fleet, Rule, Server
from tests.bench.scaler import cheapest, stage
from tests.control_plane.planning.rules import Knative, Naive


def fleet(ready: int, in_flight: int, *, held: int = 0, finished: float = 0.0) -> Fleet:
    found = Fleet(64.0)
    found.servers = [Server(number, 0.0, 0.0) for number in range(ready)]
    found.in_flight, found.held, found.last_finished_at = in_flight, held, finished
    return found


@pytest.mark.parametrize(
    ("what", "now", "wanted"),
    [
        (fleet(0, 0), 0, 0),
        (fleet(0, 0, held=1), 0, 1),
        (fleet(1, 21), 0, 3),
        (fleet(3, 1), 0, 1),
        (fleet(3, 0, finished=100), 159, 1),
        (fleet(3, 0, finished=100), 160, 0),
    ],
)
def test_the_naive_rule(what: Fleet, now: float, wanted: int) -> None:
    assert Naive(10, 60).wanted(what, now) == wanted


def told(rule: Rule, steps: int, at: Callable[[int], Fleet]) -> list[int]:
    return [rule.wanted(at(second), float(second)) for second in range(steps)]


def test_knative_goes_by_seven_tenths_of_its_target_over_a_minute() -> None:
    assert told(Knative(10, 0), 70, lambda _: fleet(2, 14))[-1] == 2
    assert told(Knative(10, 0), 70, lambda _: fleet(3, 15))[-1] == 3


def test_knative_panics_at_twice_what_is_ready_and_then_ends_nothing_for_a_minute() -> None:
    wanted = told(Knative(10, 0), 100, lambda second: fleet(1, 35 if 10 <= second < 20 else 7))
    assert wanted[9] == 1
    assert max(wanted[:20]) == 5, "by the mean of six seconds"
    assert wanted[70] == 5
    assert wanted[99] == 1


def test_knative_ends_half_at_most_and_the_last_after_a_minute_and_a_grace() -> None:
    wanted = told(Knative(10, 0), 200, lambda second: fleet(8, 56 if second < 5 else 0))
    assert min(wanted[:60]) >= 4
    alone = told(Knative(10, 0), 200, lambda second: fleet(1, 5 if second < 10 else 0))
    assert alone[98] == 1
    assert alone[105] == 0
    kept = told(Knative(10, 90), 200, lambda second: fleet(1, 5 if second < 10 else 0))
    assert kept[155] == 1
    assert kept[165] == 0


@pytest.mark.slow
def test_ours_costs_less_than_both_where_as_many_are_served_in_time() -> None:
    on = stage(rate=0.3, days=2, seed=1)
    found = {rule: cheapest(on, rule, 0.99, rounds=7, low=4, high=40) for rule in ("ingle", "naive", "knative")}
    ours = found["ingle"]
    assert ours is not None
    for rule in ("naive", "knative"):
        other = found[rule]
        assert other is None or ours.cost < other.cost, (ours, other)
