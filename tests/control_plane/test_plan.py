"""Decisions of the reconciler and the autoscaler, as tables: state in, actions out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from control_plane.domain import Address, Description, Endpoint, EndpointState, Phase, Replica, ReplicaState, Runtime
from control_plane.reconciler.actions import (
    Action,
    ChangeEndpoint,
    ChangeReplica,
    Drain,
    Ensure,
    Launch,
    Policy,
    RecordColdStart,
    Seen,
    Terminate,
)
from control_plane.reconciler.plan import backoff, plan

NOW = 1000.0
POLICY = Policy(
    liveness_grace=10,
    start_timeout=100,
    drain_settle=1,
    drain_timeout=60,
    stable_after=20,
    backoff_base=1,
    backoff_cap=60,
    max_failures=3,
)
S = ReplicaState
WHERE = Address("127.0.0.1", 9)


def endpoint(**changes: Any) -> Endpoint:
    base = Endpoint(
        id="ep", tenant_id="t", name="chat", region="local-eu", model="m", gpu=None, gpus=0, engine_args=(),
        min_replicas=0, max_replicas=4, idle_timeout=300, max_wait=60, warmth="cold", paused=False, deleting=False,
        generation=1, runtime_generation=1, observed_generation=1, desired_replicas=1, state=EndpointState.READY,
        reason_code=None, reason="1 of 1 replicas ready", failures=0, retry_at=0, failed_generation=0, wake_at=0,
        sleep_at=0, created_at=0, updated_at=0, stable_generation=1, stable_runtime=Runtime("m"),
    )  # fmt: skip
    return replace(base, **changes)


def replica(state: ReplicaState = S.READY, name: str = "r1", **changes: Any) -> Replica:
    served = state in (S.READY, S.UNHEALTHY, S.DRAINING)
    base = Replica(
        id=name, endpoint_id="ep", generation=1, region="local-eu", state=state, address=WHERE if served else None,
        reason_code=None, reason="", created_at=900, ready_at=950 if served else None,
        unhealthy_at=None, draining_at=NOW - 5 if state is S.DRAINING else None, terminated_at=None,
        startup_ms=None, busy=0,
    )  # fmt: skip
    return replace(base, **changes)


RUNNING = Description(Phase.RUNNING, WHERE, phases={"load": 5.0})
UP = Seen(RUNNING, healthy=True, busy=0)
BUSY = Seen(RUNNING, healthy=True, busy=2)
SICK = Seen(RUNNING, healthy=False)
ABSENT = Seen(Description(Phase.ABSENT))
STARTING = Seen(Description(Phase.STARTING))
EXITED = Seen(Description(Phase.EXITED, code="replica_exited", message="its process ended by signal 9"))
BAD_MODEL = Seen(Description(Phase.FAILED, code="model_not_found", message="no such model"))
NO_MEMORY = Seen(Description(Phase.FAILED, code="out_of_memory", message="not enough memory"))


def decide(what: Endpoint, *pairs: tuple[Replica, Seen]) -> list[Action]:
    return plan(what, [one for one, _ in pairs], {one.id: seen for one, seen in pairs}, NOW, POLICY, jitter=1.0)


def states(actions: list[Action]) -> dict[str, ReplicaState]:
    """The new state of each replica that gets one."""
    return {a.replica_id: a.changes["state"] for a in actions if isinstance(a, ChangeReplica) and "state" in a.changes}


def change(actions: list[Action]) -> dict[str, Any]:
    """What is written to the endpoint."""
    return {name: value for a in actions if isinstance(a, ChangeEndpoint) for name, value in a.changes.items()}


def of(actions: list[Action], kind: type[Action]) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


def test_a_machine_that_is_taken_back_is_drained_and_replaced() -> None:
    notice = Seen(replace(RUNNING, code="spot_interrupted", message="in two minutes"), healthy=True, busy=3)
    actions = decide(endpoint(), (replica(), notice))
    assert Drain("r1") in actions
    assert any(isinstance(action, Launch) for action in actions)


@pytest.mark.parametrize("state", [S.STARTING, S.READY, S.RESTING])
def test_one_that_runs_elsewhere_by_its_providers_word_is_ended(state: ReplicaState) -> None:
    elsewhere = Seen(replace(RUNNING, region="us-1"), healthy=True, busy=0)
    actions = decide(endpoint(), (replica(state), elsewhere))
    assert Terminate("r1") in actions
    (ended,) = [action for action in actions if isinstance(action, ChangeReplica)]
    assert ended.reason_code == "residency_mismatch"
    (written,) = [action.changes for action in actions if isinstance(action, ChangeEndpoint)]
    assert written["failed_generation"] == 1, "and nothing is started again before somebody looked"


def test_why_a_change_failed_outlives_trouble_with_what_serves_in_its_place() -> None:
    fallen = endpoint(
        generation=2, runtime_generation=2, model="bad", stable_generation=1, failed_generation=2, failures=1,
        state=EndpointState.DEGRADED, reason_code="model_not_found", reason="no such model",
    )  # fmt: skip
    actions = decide(fallen, (replica(generation=1), EXITED))
    (changes,) = [action.changes for action in actions if isinstance(action, ChangeEndpoint)]
    assert changes["failures"] == 2
    assert changes.get("reason_code", fallen.reason_code) == "model_not_found"
    assert changes.get("reason", fallen.reason).startswith("no such model")
    assert "failed_generation" not in changes


@pytest.mark.parametrize("winding", [{"paused": True}, {"deleting": True}])
def test_what_fails_while_it_is_wound_down_speaks_against_nothing(winding: dict[str, bool]) -> None:
    actions = decide(endpoint(**winding), (replica(S.STARTING), BAD_MODEL))
    changes = [action.changes for action in actions if isinstance(action, ChangeEndpoint)]
    assert not [one for one in changes if "failures" in one or "failed_generation" in one]
    assert Terminate("r1") in actions


def test_nothing_to_do_is_no_action() -> None:
    assert decide(endpoint(), (replica(), UP)) == []
    idle = endpoint(desired_replicas=0, state=EndpointState.ZERO, reason="no replica runs; the next request starts one")
    assert decide(idle) == []


@pytest.mark.parametrize(
    ("state", "seen", "after"),
    [
        (S.INTENDED, STARTING, S.STARTING),
        (S.STARTING, STARTING, None),
        (S.STARTING, SICK, None),
        (S.STARTING, UP, S.READY),
        (S.INTENDED, UP, S.READY),
        (S.STARTING, EXITED, S.TERMINATING),
        (S.STARTING, ABSENT, S.TERMINATING),
        (S.STARTING, BAD_MODEL, S.TERMINATING),
        (S.READY, BUSY, None),
        (S.READY, SICK, S.UNHEALTHY),
        (S.READY, EXITED, S.TERMINATING),
        (S.READY, ABSENT, S.TERMINATING),
        (S.UNHEALTHY, EXITED, S.TERMINATING),
        (S.DRAINING, EXITED, S.TERMINATING),
        (S.DRAINING, UP, S.TERMINATING),
        (S.DRAINING, BUSY, None),
        (S.TERMINATING, EXITED, None),
        (S.TERMINATING, UP, None),
        (S.TERMINATING, ABSENT, S.TERMINATED),
    ],
)
def test_a_replicas_own_steps(state: ReplicaState, seen: Seen, after: ReplicaState | None) -> None:
    actions = decide(endpoint(), (replica(state), seen))
    assert states(actions).get("r1") == after
    ends = after is S.TERMINATING or (state is S.TERMINATING and after is None)
    assert (Terminate("r1") in actions) == ends


def test_an_intent_that_nothing_came_of_is_ensured_again_with_the_same_id() -> None:
    assert Ensure("r1") in decide(endpoint(), (replica(S.INTENDED), ABSENT))
    assert of(decide(endpoint(retry_at=NOW + 1), (replica(S.INTENDED), ABSENT)), Ensure) == []
    unwanted = decide(endpoint(desired_replicas=0), (replica(S.INTENDED), ABSENT))
    assert of(unwanted, Ensure) == []
    assert states(unwanted) == {"r1": S.TERMINATING}


def test_a_start_is_measured_from_the_intent() -> None:
    actions = decide(endpoint(state=EndpointState.LOADING), (replica(S.STARTING), UP))
    assert RecordColdStart("r1", 100_000.0, {"load": 5.0}) in actions
    proved = decide(endpoint(state=EndpointState.LOADING), (replica(S.STARTING), replace(UP, proof="", proof_ms=40.0)))
    assert RecordColdStart("r1", 100_000.0, {"load": 5.0, "first_step": 40.0}) in proved
    assert change(actions)["state"] is EndpointState.READY


def test_a_start_that_takes_too_long_is_a_failure() -> None:
    actions = decide(endpoint(), (replica(S.STARTING, created_at=NOW - 101), STARTING))
    assert states(actions) == {"r1": S.TERMINATING}
    assert change(actions)["failures"] == 1
    assert change(actions)["reason_code"] == "start_timeout"
    assert of(actions, Launch) == []


def test_a_dead_replica_is_replaced_at_once_and_a_dying_one_with_patience() -> None:
    first = decide(endpoint(), (replica(), EXITED))
    assert len(of(first, Launch)) == 1
    again = decide(endpoint(failures=1), (replica(), EXITED))
    assert of(again, Launch) == []
    assert change(again)["retry_at"] > NOW
    assert "failed_generation" not in change(again)
    last = decide(endpoint(failures=2), (replica(), EXITED))
    assert change(last)["failed_generation"] == 1


def test_a_permanent_failure_ends_the_generation_and_nothing_else() -> None:
    failed = decide(endpoint(state=EndpointState.LOADING), (replica(S.STARTING), BAD_MODEL))
    assert of(failed, Launch) == []
    written = change(failed)
    assert (written["failed_generation"], written["state"]) == (1, EndpointState.FAILED)
    assert (written["reason_code"], written["reason"]) == ("model_not_found", "no such model")
    passing = decide(endpoint(state=EndpointState.LOADING), (replica(S.STARTING), NO_MEMORY))
    assert change(passing)["state"] is EndpointState.PROVISIONING
    assert change(passing)["retry_at"] == NOW + 1
    given_up = endpoint(failed_generation=1, failures=1, state=EndpointState.FAILED, reason_code="x", reason="y")
    assert decide(given_up) == []


def test_a_failed_update_leaves_the_old_generation_serving() -> None:
    updated = endpoint(generation=2, runtime_generation=2)
    old, new = replica(), replica(S.STARTING, "r2", generation=2)
    actions = decide(updated, (old, UP), (new, BAD_MODEL))
    assert states(actions) == {"r2": S.TERMINATING}
    assert of(actions, Launch) == []
    written = change(actions)
    assert (written["state"], written["reason_code"]) == (EndpointState.DEGRADED, "model_not_found")
    assert written["failed_generation"] == 2


@pytest.mark.parametrize(("stable", "proven"), [({"stable_generation": 0, "stable_runtime": None}, True), ({}, False)])
def test_of_the_first_generation_one_replica_will_do_to_fall_back_to(stable: dict[str, Any], proven: bool) -> None:
    wanted = endpoint(generation=2, runtime_generation=2, desired_replicas=2, state=EndpointState.LOADING, **stable)
    first, second = replica(S.STARTING, generation=2), replica(S.STARTING, "r2", generation=2)
    written = change(decide(wanted, (first, UP), (second, STARTING)))
    assert written.get("stable_generation") == (2 if proven else None)


def test_an_update_starts_the_new_before_it_drains_the_old() -> None:
    updated = endpoint(generation=2, runtime_generation=2)
    assert len(of(decide(updated, (replica(), UP)), Launch)) == 1
    new = replica(S.STARTING, "r2", generation=2)
    assert states(decide(updated, (replica(), UP), (new, STARTING))) == {}
    actions = decide(updated, (replica(), UP), (new, UP))
    assert states(actions) == {"r1": S.DRAINING, "r2": S.READY}
    assert Drain("r1") in actions
    assert change(actions)["observed_generation"] == 2


def test_a_hung_replica_goes_after_its_grace() -> None:
    assert states(decide(endpoint(), (replica(S.UNHEALTHY, unhealthy_at=NOW - 9), SICK))) == {}
    actions = decide(endpoint(), (replica(S.UNHEALTHY, unhealthy_at=NOW - 11), SICK))
    assert states(actions) == {"r1": S.TERMINATING}
    assert len(of(actions, Launch)) == 1
    well = decide(endpoint(), (replica(S.UNHEALTHY, unhealthy_at=NOW - 11), UP))
    assert states(well) == {"r1": S.READY}


@pytest.mark.parametrize(
    ("changes", "states_after", "state"),
    [
        ({"desired_replicas": 0}, {"r1": S.DRAINING, "r2": S.TERMINATING}, EndpointState.DRAINING),
        ({"paused": True, "desired_replicas": 2}, {"r1": S.DRAINING, "r2": S.TERMINATING}, EndpointState.DRAINING),
        ({"deleting": True, "desired_replicas": 2}, {"r1": S.DRAINING, "r2": S.TERMINATING}, EndpointState.DRAINING),
        ({"desired_replicas": 1}, {"r2": S.TERMINATING}, EndpointState.READY),
        ({"desired_replicas": 2}, {}, EndpointState.DEGRADED),
        ({"desired_replicas": 9, "max_replicas": 2}, {}, EndpointState.DEGRADED),
    ],
)
def test_how_many_there_are(
    changes: dict[str, Any], states_after: dict[str, ReplicaState], state: EndpointState
) -> None:
    actions = decide(endpoint(**changes), (replica(), UP), (replica(S.STARTING, "r2"), STARTING))
    assert states(actions) == states_after
    assert change(actions).get("state", EndpointState.READY) is state
    assert of(actions, Launch) == []


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"desired_replicas": 0}, EndpointState.ZERO),
        ({"paused": True}, EndpointState.PAUSED),
        ({"deleting": True}, EndpointState.DELETED),
        ({"desired_replicas": 1}, EndpointState.PROVISIONING),
        ({"desired_replicas": 0, "failed_generation": 1}, EndpointState.FAILED),
    ],
)
def test_what_an_endpoint_without_replicas_is(changes: dict[str, Any], state: EndpointState) -> None:
    actions = decide(endpoint(**changes))
    assert change(actions)["state"] is state
    assert ("deleted_at" in change(actions)) == (state is EndpointState.DELETED)


def test_scaling_down_waits_for_what_is_in_flight_but_not_for_ever() -> None:
    asleep = endpoint(desired_replicas=0, state=EndpointState.DRAINING)
    assert states(decide(asleep, (replica(S.DRAINING, draining_at=NOW - 59), BUSY))) == {}
    assert states(decide(asleep, (replica(S.DRAINING, draining_at=NOW - 61), BUSY))) == {"r1": S.TERMINATING}
    # A gateway may not know yet: an idle one stays for a moment too.
    assert states(decide(asleep, (replica(S.DRAINING, draining_at=NOW - 0.5), UP))) == {}


def test_deleted_is_said_only_once_the_provider_says_that_all_is_gone() -> None:
    gone = endpoint(deleting=True, state=EndpointState.DRAINING)
    assert "deleted_at" not in change(decide(gone, (replica(S.TERMINATING), EXITED)))
    assert change(decide(gone, (replica(S.TERMINATING), ABSENT)))["deleted_at"] == NOW


def test_failures_are_forgotten_once_a_replica_stays_up() -> None:
    troubled = endpoint(failures=2, retry_at=NOW + 5)
    assert change(decide(troubled, (replica(ready_at=NOW - 19), UP))) == {}
    assert change(decide(troubled, (replica(ready_at=NOW - 21), UP))) == {"failures": 0, "retry_at": 0.0}
    # One that stays up says nothing of another that can't be had.
    short = replace(
        troubled, desired_replicas=2, state=EndpointState.DEGRADED, reason_code="no_capacity", reason="full"
    )
    assert change(decide(short, (replica(ready_at=NOW - 500), UP))) == {}


def test_backoff_doubles_up_to_its_cap_with_jitter_below() -> None:
    assert [backoff(n, POLICY, 1.0) for n in (1, 2, 3, 7, 8, 500)] == [1, 2, 4, 60, 60, 60]
    assert backoff(3, POLICY, 0.0) == 2
