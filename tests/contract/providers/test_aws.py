"""The AWS provider where AWS fails, over real HTTP. No instance runs anything here."""

from __future__ import annotations

import asyncio
import base64
import functools

import pytest

from control_plane.domain import Phase
from control_plane.errors import ProviderError, ProviderRefused
from control_plane.providers.aws_calls import AwsCalls
from control_plane.providers.aws_marks import Marks
from tests.contract.providers.aws_cloud import Cloud, MakeAws
from tests.contract.providers.aws_proxy import Fault
from tests.contract.providers.common import gone, spec


def asked(cloud: Cloud) -> list[tuple[str, str]]:
    """Type and subnet of each launch that was asked for."""
    calls = cloud.proxy.of("RunInstances")
    return [(call.parameters["InstanceType"], call.parameters["SubnetId"]) for call in calls]


async def test_an_instance_is_private_tagged_and_ends_by_powering_off(make: MakeAws, cloud: Cloud, one: str) -> None:
    await make().ensure(spec(one))
    (instance,) = cloud.instances(replica=one)
    tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
    assert {f"ingle:{name}" for name in ("installation", "region", "endpoint", "replica", "epoch")} <= tags.keys()
    (call,) = cloud.proxy.of("RunInstances")
    assert call.parameters["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert call.parameters["MetadataOptions.HttpTokens"] == "required"
    kinds = {value for name, value in call.parameters.items() if name.endswith(".ResourceType")}
    assert kinds == {"instance", "volume"}
    script = base64.b64decode(call.parameters["UserData"]).decode()
    assert script.splitlines()[1] == "shutdown -P +60"
    assert script.splitlines()[-1] == "shutdown -P now"


async def test_an_answer_that_is_lost_starts_one(make: MakeAws, cloud: Cloud, one: str) -> None:
    cloud.proxy.fail(Fault("RunInstances", drop=True, times=2))
    await make().ensure(spec(one))
    assert len(cloud.proxy.of("RunInstances")) == 3
    assert len(cloud.instances(replica=one)) == 1


async def test_a_no_after_a_lost_answer_is_not_believed(make: MakeAws, cloud: Cloud, one: str) -> None:
    """What AWS says of a token in use, by a code that nobody has told us of."""
    cloud.proxy.fail(Fault("RunInstances", drop=True))
    cloud.proxy.fail(Fault("RunInstances", "TokenInUse"))
    provider = make()
    with pytest.raises(ProviderError) as unsure:
        await provider.ensure(spec(one))
    assert not isinstance(unsure.value, ProviderRefused)
    await provider.ensure(spec(one))
    assert len(cloud.instances(replica=one)) == 1


async def test_an_answer_that_never_comes_is_asked_for_again_by_another_controller(
    make: MakeAws, cloud: Cloud, one: str
) -> None:
    cloud.proxy.fail(Fault("RunInstances", drop=True, times=4))
    cloud.proxy.fail(Fault("DescribeInstances", times=9, status=503, code="Unavailable"))
    first = make()
    with pytest.raises(ProviderError) as lost:
        await first.ensure(spec(one))
    assert not isinstance(lost.value, ProviderRefused)
    cloud.proxy.forgive()
    otherwise = make(machines=[{"type": "c7i.xlarge"}])  # one that would choose another type
    cooled = make()  # one that would ask nowhere
    cloud.proxy.fail(Fault("RunInstances", "InsufficientInstanceCapacity", 500, times=4))
    with pytest.raises(ProviderRefused):
        await cooled.ensure(spec(f"{one}b"))
    cloud.proxy.fail(Fault("DescribeInstances", blind=True, times=99))
    for provider in (otherwise, cooled, first):
        await provider.ensure(spec(one))
        assert len(cloud.instances(replica=one)) == 1
    assert (await cooled.describe(one)).phase is Phase.STARTING


@pytest.mark.parametrize("calls", range(1, 10))
async def test_wherever_a_controller_is_cut_off_another_one_starts_it_once_or_ends_all_of_it(
    make: MakeAws, cloud: Cloud, one: str, installation: str, calls: int
) -> None:
    """Each call of a launch in turn takes effect, and its answer and all after it are lost."""
    other = f"{one}b"
    for replica_id in (one, other):
        cloud.proxy.cut_after(calls)
        with pytest.raises(ProviderError) as cut:
            await make(settle_seconds=1).ensure(spec(replica_id))
        assert not isinstance(cut.value, ProviderRefused)
        cloud.proxy.forgive()
    later = make(settle_seconds=1)
    await later.ensure(spec(one))
    assert len(cloud.instances(replica=one)) == 1
    await gone(later, other)
    for replica_id in await later.list_owned():
        await later.terminate(replica_id)
    assert {found["State"]["Name"] for found in cloud.instances(installation=installation)} == {"terminated"}
    assert not [name for name in cloud.secrets() if one in name]
    assert await later.list_owned() == []
    s3, bucket = cloud.aws.client("s3"), cloud.outputs["Bucket"]
    for kind in ("live", "reports"):
        assert s3.list_objects_v2(Bucket=bucket, Prefix=f"{kind}/{installation}/")["KeyCount"] == 0


async def test_a_mark_is_the_first_ones(cloud: Cloud, make: MakeAws, installation: str) -> None:
    calls = AwsCalls(cloud.aws.region, cloud.proxy.url)
    marks = Marks(calls, cloud.outputs["Bucket"], installation)
    found = await asyncio.gather(*(marks.claim("live", "rep_a", name.encode()) for name in "abcd"))
    assert len(set(found)) == 1
    mark = await marks.get("live", "rep_a")
    assert mark is not None
    moved = await asyncio.gather(*(marks.replace("live", "rep_a", mark.version, name.encode()) for name in "efgh"))
    assert len(set(moved)) == 1
    assert moved[0] in b"efgh"
    cloud.proxy.fail(Fault("PUT live", drop=True))
    assert await marks.claim("live", "rep_b", b"mine") == b"mine"
    await marks.delete("live", "rep_a")
    await marks.delete("live", "rep_b")
    calls.close()


async def test_one_whose_launch_nobody_has_seen_is_not_called_absent(make: MakeAws, cloud: Cloud, one: str) -> None:
    cloud.proxy.fail(Fault("RunInstances", silent=False, code="InternalError", status=500, times=4))
    provider = make()
    with pytest.raises(ProviderError):
        await provider.ensure(spec(one))
    assert (await provider.describe(one)).phase is Phase.STARTING
    await provider.terminate(one)
    assert (await provider.describe(one)).phase is Phase.STARTING
    await gone(provider, one)
    await provider.terminate(one)
    assert await provider.list_owned() == []
    assert not [name for name in cloud.secrets() if one in name]


async def test_without_room_the_next_zone_is_asked_and_the_first_left_in_peace(
    make: MakeAws, cloud: Cloud, one: str
) -> None:
    full, free = cloud.settings().subnets
    cloud.proxy.fail(Fault("RunInstances", "InsufficientInstanceCapacity", 500, times=9, where={"SubnetId": full}))
    provider = make()
    await provider.ensure(spec(one))
    assert asked(cloud) == [("c7i.large", full), ("c7i.large", free)]
    (instance,) = cloud.instances(replica=one)
    assert instance["SubnetId"] == free
    await provider.ensure(spec(f"{one}b"))
    assert asked(cloud)[2:] == [("c7i.large", free)]


async def test_without_room_anywhere_it_is_refused_and_nothing_stays(make: MakeAws, cloud: Cloud, one: str) -> None:
    cloud.proxy.fail(Fault("RunInstances", "InsufficientInstanceCapacity", 500, times=9))
    provider = make()
    for replica_id in (one, f"{one}b"):
        with pytest.raises(ProviderRefused) as refused:
            await provider.ensure(spec(replica_id))
        assert (refused.value.code, refused.value.permanent) == ("no_capacity", False)
    assert len(set(asked(cloud))) == len(asked(cloud)) == 4  # each type in each zone, and then none for a while
    assert (await provider.describe(one)).phase is Phase.ABSENT
    assert await provider.list_owned() == []
    assert not [name for name in cloud.secrets() if one in name]


async def test_a_quota_moves_to_another_type_and_then_says_so(make: MakeAws, cloud: Cloud, one: str) -> None:
    subnets = cloud.settings().subnets
    cloud.proxy.fail(Fault("RunInstances", "VcpuLimitExceeded", where={"InstanceType": "c7i.large"}))
    provider = make()
    await provider.ensure(spec(one))
    assert asked(cloud) == [("c7i.large", subnets[0]), ("c7i.xlarge", subnets[0])]
    cloud.proxy.fail(Fault("RunInstances", "VcpuLimitExceeded", times=9))
    with pytest.raises(ProviderRefused) as refused:
        await provider.ensure(spec(f"{one}b", gpu="L4"))
    assert (refused.value.code, refused.value.permanent) == ("quota_exceeded", False)
    assert len(asked(cloud)) == 3


async def test_throttles_are_waited_out(make: MakeAws, cloud: Cloud, one: str) -> None:
    cloud.proxy.fail(Fault("RunInstances", "RequestLimitExceeded", 503, times=2))
    cloud.proxy.fail(Fault("DescribeInstances", "RequestLimitExceeded", 503, times=2))
    provider = make(fresh=0.0)
    await provider.ensure(spec(one))
    assert await provider.list_owned() == [one]
    assert len(cloud.instances(replica=one)) == 1
    cloud.proxy.fail(Fault("DescribeInstances", "RequestLimitExceeded", 503, times=9))
    with pytest.raises(ProviderError) as throttled:
        await provider.describe(one)
    assert throttled.value.code == "throttled"


@pytest.mark.parametrize(
    ("action", "code"),
    [
        ("RunInstances", "UnauthorizedOperation"),
        ("RunInstances", "AuthFailure"),
        ("CreateSecret", "AccessDeniedException"),
        ("HEAD ended", "AccessDenied"),
        ("RunInstances", "InvalidAMIID.NotFound"),
    ],
)
async def test_what_is_not_allowed_or_wrong_is_not_tried_again(
    make: MakeAws, cloud: Cloud, one: str, action: str, code: str
) -> None:
    cloud.proxy.fail(Fault(action, code, 403 if "NotFound" not in code else 400, times=9))
    with pytest.raises(ProviderRefused) as refused:
        await make().ensure(spec(one))
    assert refused.value.permanent
    assert len(cloud.proxy.of(action)) == 1
    assert cloud.instances(replica=one) == []
    assert not [name for name in cloud.secrets() if one in name]


async def test_silence_ends(make: MakeAws, cloud: Cloud, one: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.security.aws._READ_SECONDS", 0.2)
    cloud.proxy.fail(Fault("DescribeSubnets", silent=True, times=9))
    with pytest.raises(ProviderError) as silent:
        await make().offers()
    assert silent.value.code == "cloud_unreachable"


async def test_an_end_is_repeated_and_survives_lost_answers(make: MakeAws, cloud: Cloud, one: str) -> None:
    provider = make()
    await provider.ensure(spec(one))
    cloud.proxy.fail(Fault("TerminateInstances", drop=True))
    cloud.proxy.fail(Fault("DeleteSecret", drop=True))
    for _ in range(3):
        await provider.terminate(one)
    await gone(make(), one)
    assert [instance["State"]["Name"] for instance in cloud.instances(replica=one)] == ["terminated"]
    assert not [name for name in cloud.secrets() if one in name]
    await make().terminate(one)
    await make().ensure(spec(one))
    assert len(cloud.instances(replica=one)) == 1


async def test_an_end_that_comes_while_it_starts_wins(make: MakeAws, cloud: Cloud, one: str, installation: str) -> None:
    """The one who ends it looks before there is anything to be seen."""
    key, s3 = f"ended/{installation}/{one}", cloud.aws.client("s3")
    end = functools.partial(s3.put_object, Bucket=cloud.outputs["Bucket"], Key=key)
    cloud.proxy.fail(Fault("RunInstances", before=end))
    await make().ensure(spec(one))
    assert [found["State"]["Name"] for found in cloud.instances(replica=one)] == ["terminated"]


async def test_what_others_own_is_left_alone(make: MakeAws, cloud: Cloud, one: str, installation: str) -> None:
    mine, theirs = make(), make(name=f"{installation}-b")
    await theirs.ensure(spec(one))
    subnet = cloud.settings().subnets[0]
    ec2 = cloud.aws.client("ec2")
    stray = ec2.run_instances(ImageId="ami-1", MinCount=1, MaxCount=1, SubnetId=subnet)["Instances"][0]["InstanceId"]
    assert await mine.list_owned() == []
    assert (await mine.describe(one)).phase is Phase.ABSENT
    await mine.terminate(one)
    assert cloud.proxy.of("TerminateInstances") == []
    assert await theirs.list_owned() == [one]
    assert [found["State"]["Name"] for found in cloud.instances(replica=one)] == ["running"]
    ec2.terminate_instances(InstanceIds=[stray])


async def test_one_that_was_just_made_is_nobodys_only_after_a_grace(make: MakeAws, one: str) -> None:
    await make().ensure(spec(one))
    assert await make(reap_grace=600).list_owned() == []
    assert await make().list_owned() == [one]
