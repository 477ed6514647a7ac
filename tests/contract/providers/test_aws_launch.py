"""The AWS provider's pure decisions."""

from __future__ import annotations

import pytest

from control_plane.domain import ReplicaSpec
from control_plane.errors import ProviderRefused
from control_plane.provider_settings import AwsMachine, AwsSettings
from control_plane.providers.aws_errors import Kind, kind_of, reason_of
from control_plane.providers.aws_launch import CoolDowns, Intent, Place, choose, first_intent, fitting, next_intent
from control_plane.providers.aws_sight import region_of

MACHINES = [
    AwsMachine(type="p5.48xlarge", accelerator="H100", count=8, price_per_hour=90),
    AwsMachine(type="g6.xlarge", accelerator="L4", count=1, price_per_hour=0.8),
    AwsMachine(type="g6.12xlarge", accelerator="L4", count=4, price_per_hour=4.6),
    AwsMachine(type="c7i.large", price_per_hour=0.1),
]
ZONES = ("subnet-00000001", "subnet-00000002")


@pytest.mark.parametrize(
    ("zone", "region"),
    [
        ("eu-central-1a", "eu-central-1"),
        ("us-west-2-lax-1a", "us-west-2"),
        ("us-gov-east-1b", "us-gov-east-1"),
        ("ap-south-10a", "ap-south-10"),
        ("", ""),
    ],
)
def test_a_zones_region(zone: str, region: str) -> None:
    assert region_of(zone) == region


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("InsufficientInstanceCapacity", 500, Kind.CAPACITY),
        ("Unsupported", 400, Kind.CAPACITY),
        ("VcpuLimitExceeded", 400, Kind.QUOTA),
        ("MaxSpotInstanceCountExceeded", 400, Kind.QUOTA),
        ("RequestLimitExceeded", 503, Kind.THROTTLED),
        ("Throttling", 400, Kind.THROTTLED),
        ("UnauthorizedOperation", 403, Kind.DENIED),
        ("SomethingNew", 403, Kind.DENIED),
        ("ExpiredToken", 403, Kind.PASSING),
        ("404", 404, Kind.MISSING),
        ("PreconditionFailed", 412, Kind.TAKEN),
        ("IdempotentParameterMismatch", 400, Kind.TAKEN),
        ("InvalidParameterValue", 400, Kind.INVALID),
        ("InternalError", 500, Kind.PASSING),
        ("RequestTimeout", 408, Kind.PASSING),
        ("", 0, Kind.PASSING),
    ],
)
def test_what_an_error_means(code: str, status: int, kind: Kind) -> None:
    assert kind_of(code, status) is kind


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("Server.SpotInstanceTermination", "spot_interrupted"),
        ("Server.InsufficientInstanceCapacity", "no_capacity"),
        ("Client.InstanceInitiatedShutdown", "replica_exited"),
        ("", "replica_lost"),
    ],
)
def test_why_an_instance_went(reason: str, code: str) -> None:
    assert reason_of(reason) == code


@pytest.mark.parametrize(
    ("gpu", "gpus", "types"),
    [
        (None, 0, ["c7i.large"]),
        ("cpu", 0, ["c7i.large"]),
        ("L4", 1, ["g6.xlarge", "g6.12xlarge"]),
        ("L4", 2, ["g6.12xlarge"]),
        ("cuda", 0, ["g6.xlarge", "g6.12xlarge", "p5.48xlarge"]),
        ("H100", 8, ["p5.48xlarge"]),
    ],
)
def test_the_cheapest_machine_that_fits_comes_first(gpu: str | None, gpus: int, types: list[str]) -> None:
    assert [machine.type for machine in fitting(_spec(gpu, gpus), MACHINES)] == types


@pytest.mark.parametrize(("gpu", "gpus"), [("H200", 1), ("L4", 8)])
def test_what_no_machine_has_is_refused_for_good(gpu: str, gpus: int) -> None:
    with pytest.raises(ProviderRefused, match=f"not {gpus} {gpu}") as refused:
        fitting(_spec(gpu, gpus), MACHINES)
    assert (refused.value.code, refused.value.permanent) == ("accelerator_not_offered", True)


def test_zones_come_before_dearer_types_and_full_ones_are_left_alone_for_a_while() -> None:
    small, large = Place("g6.xlarge", ZONES[0]), Place("g6.12xlarge", ZONES[0])
    next_zone = Place("g6.xlarge", ZONES[1])
    machines, cool = fitting(_spec("L4", 1), MACHINES), CoolDowns(100.0)
    assert choose(machines, ZONES, (), frozenset(), cool, 0.0) == small
    assert choose(machines, ZONES, (small,), frozenset(), cool, 0.0) == next_zone
    assert choose(machines, ZONES, (), frozenset({"g6.xlarge"}), cool, 0.0) == large
    cool.note(small, 0.0)
    assert choose(machines, ZONES, (), frozenset(), cool, 99.0) == next_zone
    assert choose(machines, ZONES, (), frozenset(), cool, 100.0) == small
    cool.note(next_zone, 100.0)
    assert set(cool.until) == {next_zone}
    assert choose(machines[:1], ZONES, (small,), frozenset(), cool, 150.0) is None


def test_an_intent_is_the_same_after_it_was_written_down_and_moves_under_another_token() -> None:
    settings = AwsSettings(
        aws_region="eu-central-1",
        bucket="weights",
        launch_template="lt-0123456789abcdef0",
        subnets=ZONES,
        machines=tuple(MACHINES),
    )
    place, other = Place("c7i.large", ZONES[0]), Place("c7i.large", ZONES[1])
    first = first_intent(_spec(None, 0), place, 7, settings, installation="ingle-a")
    assert Intent.decode(first.encode()) == first
    moved = next_intent(first, "rep_a", other)
    assert (moved.place, moved.tried, moved.epoch) == (other, (place,), 7)
    assert Intent.decode(moved.encode()) == moved
    tokens = [intent.request["ClientToken"] for intent in (first, moved, next_intent(moved, "rep_a", place))]
    assert len(set(tokens)) == 3
    assert all(len(token) <= 64 for token in tokens)
    fixed = {"ClientToken", "SubnetId"}
    assert {name: value for name, value in moved.request.items() if name not in fixed} == {
        name: value for name, value in first.request.items() if name not in fixed
    }


def _spec(gpu: str | None, gpus: int) -> ReplicaSpec:
    return ReplicaSpec("rep_a", "chat", "eu-1", "fast", gpu=gpu, gpus=gpus)
