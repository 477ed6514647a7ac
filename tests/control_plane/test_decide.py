from __future__ import annotations

from typing import Any

import pytest

from control_plane.autoscaler.decide import decide
from control_plane.autoscaler.demand import Load, PeakWindow, combine
from control_plane.domain import Demand, Replica, ReplicaState
from tests.control_plane.test_plan import NOW, endpoint, replica

NOTHING = Load(0, 0, 0.0)


@pytest.mark.parametrize(
    ("changes", "load", "peak", "running", "wanted"),
    [
        # at zero
        ({"desired_replicas": 0}, NOTHING, 0, [], 0),
        ({"desired_replicas": 0}, Load(0, 1, 0.0), 1, [], 1),
        ({"desired_replicas": 0}, Load(0, 200, 0.0), 200, [], 4),
        ({"desired_replicas": 0, "max_replicas": 1}, Load(0, 200, 0.0), 200, [], 1),
        ({"desired_replicas": 0, "wake_at": NOW - 1}, NOTHING, 0, [], 1),
        ({"desired_replicas": 0, "wake_at": NOW - 301}, NOTHING, 0, [], 0),
        # idle: counted from the last finished request, from being woken, from being ready
        ({}, Load(0, 0, NOW - 299), 0, [], 1),
        ({}, Load(0, 0, NOW - 300), 0, [], 0),
        ({"wake_at": NOW - 299}, Load(0, 0, NOW - 900), 0, [], 1),
        ({}, Load(0, 0, NOW - 900), 0, [replica(ready_at=NOW - 299)], 1),
        ({}, Load(0, 0, NOW - 900), 0, [replica(ready_at=NOW - 301)], 0),
        ({}, Load(0, 0, NOW - 900), 0, [replica(ReplicaState.DRAINING, ready_at=NOW - 1)], 0),
        # a start that takes longer than the idle time is not undone before it could serve
        ({}, Load(0, 0, NOW - 900), 0, [replica(ReplicaState.STARTING, created_at=NOW - 400)], 1),
        ({"sleep_at": NOW - 1}, NOTHING, 0, [replica(ReplicaState.STARTING, created_at=NOW - 9)], 0),
        # never with anything in flight or held, however long it takes
        ({}, Load(1, 0, NOW - 9000), 1, [], 1),
        ({"sleep_at": NOW}, Load(1, 0, NOW - 9000), 1, [], 1),
        ({"sleep_at": NOW}, Load(0, 1, NOW - 9000), 1, [], 1),
        # asked to sleep
        ({"sleep_at": NOW - 1}, Load(0, 0, NOW - 2), 0, [replica(ready_at=NOW - 3)], 0),
        ({"sleep_at": NOW - 3}, Load(0, 0, NOW - 2), 0, [replica(ready_at=NOW - 9)], 1),
        ({"sleep_at": NOW - 3, "wake_at": NOW - 1, "desired_replicas": 0}, NOTHING, 0, [], 1),
        # bounds
        ({"min_replicas": 2}, NOTHING, 0, [], 2),
        ({"min_replicas": 2}, Load(1, 0, 0.0), 1, [], 2),
        # up with the load, down with the peak
        ({}, Load(17, 0, 0.0), 17, [], 2),
        ({"desired_replicas": 3}, Load(1, 0, 0.0), 40, [], 3),
        ({"desired_replicas": 3}, Load(0, 0, NOW - 5), 40, [], 3),
        ({"desired_replicas": 3}, Load(0, 0, NOW - 90), 0, [], 1),
    ],
)
def test_how_many_replicas(changes: dict[str, Any], load: Load, peak: int, running: list[Replica], wanted: int) -> None:
    assert decide(endpoint(**changes), load, peak, running, NOW).replicas == wanted


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


def test_a_peak_is_forgotten_after_its_window() -> None:
    window = PeakWindow(60)
    assert [window.add(value, float(at)) for at, value in ((0, 3), (10, 9), (20, 1), (70, 2), (71, 0))] == [
        3,
        9,
        9,
        9,
        2,
    ]
