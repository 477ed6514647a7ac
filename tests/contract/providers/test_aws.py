"""The AWS provider where AWS fails, over real HTTP."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from control_plane.domain import Description, Phase, ReplicaSpec
from control_plane.errors import ProviderError, ProviderRefused
from control_plane.providers.aws import AwsProvider
from control_plane.providers.aws_calls import AwsCalls
from control_plane.providers.aws_marks import Marks
from control_plane.security.aws import aws_client
from control_plane.security.secret import load_secret
from tests.contract.providers.aws_cloud import Cloud
from tests.contract.providers.aws_machines import Machines
from tests.contract.providers.aws_proxy import Fault
from tests.contract.providers.conftest import COMMAND, GRACE, LOG_BYTES

Make = Callable[..., AwsProvider]


@pytest.fixture
def installation() -> str:
    return f"ingle-{secrets.token_hex(8)}"


@pytest.fixture
def machines(cloud: Cloud) -> Machines:
    """For tests whose instances run what they are told; those of other tests are never reachable."""
    return cloud.proxy.machines


@pytest.fixture
async def make(request: pytest.FixtureRequest, cloud: Cloud, tmp_path: Path, installation: str) -> AsyncIterator[Make]:
    """Providers of one installation, or of another by name; `cloud` forgets its faults and calls."""
    made: list[AwsProvider] = []
    cloud.proxy.forgive()
    cloud.proxy.machines.boots = "machines" in request.fixturenames

    def provider(*, name: str = installation, word: float = 0.2, beat: float = 0.2, **more: Any) -> AwsProvider:
        made.append(
            AwsProvider(
                "eu-1",
                cloud.settings(node_home=str(tmp_path / "node"), **more),
                load_secret(tmp_path),
                installation=name,
                home=tmp_path,
                command=COMMAND,
                terminate_grace=GRACE,
                log_bytes=LOG_BYTES,
                fresh=0.02,
                beat=beat,
                word=word,
            )
        )
        return made[-1]

    yield provider
    cloud.proxy.forgive()
    cloud.proxy.machines.boots = True
    for owner in made:
        for replica_id in await owner.list_owned():
            await owner.terminate(replica_id)
        await owner.close()


def spec(replica_id: str, *, gpu: str | None = None) -> ReplicaSpec:
    return ReplicaSpec(replica_id, "chat", "eu-1", "fast", gpu=gpu)


async def becomes(provider: AwsProvider, replica_id: str, phase: Phase) -> Description:
    async with asyncio.timeout(30):
        while (found := await provider.describe(replica_id)).phase is not phase:
            await asyncio.sleep(0.05)
    return found


async def gone(provider: AwsProvider, replica_id: str) -> None:
    async with asyncio.timeout(30):
        while (await provider.describe(replica_id)).phase is not Phase.ABSENT:
            await provider.terminate(replica_id)
            await asyncio.sleep(0.05)


def asked(cloud: Cloud) -> list[tuple[str, str]]:
    """Type and subnet of each launch that was asked for."""
    calls = cloud.proxy.of("RunInstances")
    return [(call.parameters["InstanceType"], call.parameters["SubnetId"]) for call in calls]


async def test_an_instance_is_private_tagged_and_ends_by_powering_off(make: Make, cloud: Cloud, one: str) -> None:
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


async def test_an_answer_that_is_lost_starts_one(make: Make, cloud: Cloud, one: str) -> None:
    cloud.proxy.fail(Fault("RunInstances", drop=True, times=2))
    await make().ensure(spec(one))
    assert len(cloud.proxy.of("RunInstances")) == 3
    assert len(cloud.instances(replica=one)) == 1


async def test_an_answer_that_never_comes_is_asked_for_again_by_another_controller(
    make: Make, cloud: Cloud, one: str
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


async def test_a_mark_is_the_first_ones(cloud: Cloud, make: Make, installation: str) -> None:
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


async def test_one_whose_launch_nobody_has_seen_is_not_called_absent(make: Make, cloud: Cloud, one: str) -> None:
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
    make: Make, cloud: Cloud, one: str
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


async def test_without_room_anywhere_it_is_refused_and_nothing_stays(make: Make, cloud: Cloud, one: str) -> None:
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


async def test_a_quota_moves_to_another_type_and_then_says_so(make: Make, cloud: Cloud, one: str) -> None:
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


async def test_throttles_are_waited_out(make: Make, cloud: Cloud, one: str) -> None:
    cloud.proxy.fail(Fault("RunInstances", "RequestLimitExceeded", 503, times=2))
    cloud.proxy.fail(Fault("DescribeInstances", "RequestLimitExceeded", 503, times=2))
    provider = make()
    await provider.ensure(spec(one))
    assert await provider.list_owned() == [one]
    assert len(cloud.instances(replica=one)) == 1
    cloud.proxy.fail(Fault("DescribeInstances", "RequestLimitExceeded", 503, times=9))
    await asyncio.sleep(0.05)  # what was seen before is stale by then
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
    make: Make, cloud: Cloud, one: str, action: str, code: str
) -> None:
    cloud.proxy.fail(Fault(action, code, 403 if "NotFound" not in code else 400, times=9))
    with pytest.raises(ProviderRefused) as refused:
        await make().ensure(spec(one))
    assert refused.value.permanent
    assert len(cloud.proxy.of(action)) == 1
    assert cloud.instances(replica=one) == []
    assert not [name for name in cloud.secrets() if one in name]


async def test_silence_ends(make: Make, cloud: Cloud, one: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.security.aws._READ_SECONDS", 0.2)
    cloud.proxy.fail(Fault("DescribeSubnets", silent=True, times=9))
    with pytest.raises(ProviderError) as silent:
        await make().offers()
    assert silent.value.code == "cloud_unreachable"


async def test_an_end_is_repeated_and_survives_lost_answers(make: Make, cloud: Cloud, one: str) -> None:
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


async def test_an_end_that_comes_while_it_starts_wins(make: Make, cloud: Cloud, one: str, installation: str) -> None:
    """The one who ends it looks before there is anything to be seen."""
    key, s3 = f"ended/{installation}/{one}", cloud.aws.client("s3")
    end = functools.partial(s3.put_object, Bucket=cloud.outputs["Bucket"], Key=key)
    cloud.proxy.fail(Fault("RunInstances", before=end))
    await make().ensure(spec(one))
    assert [found["State"]["Name"] for found in cloud.instances(replica=one)] == ["terminated"]


async def test_what_others_own_is_left_alone(make: Make, cloud: Cloud, one: str, installation: str) -> None:
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


async def test_one_that_was_just_made_is_nobodys_only_after_a_grace(make: Make, one: str) -> None:
    await make().ensure(spec(one))
    assert await make(reap_grace=600).list_owned() == []
    assert await make().list_owned() == [one]


async def test_tokens_are_in_no_request_but_the_secrets_own(
    make: Make, cloud: Cloud, one: str, tmp_path: Path, machines: Machines
) -> None:
    provider = make()
    await provider.ensure(spec(one))
    await becomes(provider, one, Phase.RUNNING)
    token = load_secret(tmp_path).replica_token(one)
    assert any(one in name for name in cloud.secrets())
    users = {"CreateSecret", "PutSecretValue"}
    for call in cloud.proxy.calls:
        decoded = base64.b64decode(call.parameters.get("UserData", "")).decode()
        assert call.action in users or token not in call.body.decode(errors="replace") + decoded, call.action
    await gone(provider, one)
    assert not any(one in name for name in cloud.secrets())


async def test_a_machine_powers_off_when_no_controller_speaks(
    make: Make, cloud: Cloud, one: str, machines: Machines
) -> None:
    """A minute is a second here."""
    provider = make(beat=0.1, deadman_minutes=3)
    await provider.ensure(spec(one))
    await becomes(provider, one, Phase.RUNNING)
    (instance,) = cloud.instances(replica=one)
    machine = machines.by_id[instance["InstanceId"]]
    async with asyncio.timeout(30):
        while len(machine.shutdowns) < 3:  # put off by each word
            await provider.describe(one)
            await asyncio.sleep(0.02)
        assert set(machine.shutdowns) == {"3"}
        while cloud.instances(replica=one)[0]["State"]["Name"] == "running":
            await asyncio.sleep(0.1)
    assert (await provider.describe(one)).phase is Phase.ABSENT


async def test_a_machine_that_finds_its_replica_ended_powers_off(
    make: Make, cloud: Cloud, one: str, machines: Machines
) -> None:
    provider = make()
    await provider.ensure(spec(one))
    await becomes(provider, one, Phase.RUNNING)
    cloud.proxy.fail(Fault("TerminateInstances", "Unavailable", 503, times=99))
    with pytest.raises(ProviderError):
        await provider.terminate(one)
    ended = await becomes(provider, one, Phase.ABSENT)
    assert "terminated" in ended.message


async def test_a_second_machine_for_the_same_replica_does_not_run_it(
    make: Make, cloud: Cloud, one: str, machines: Machines
) -> None:
    """Whatever AWS makes of tokens: as by a repetition long after they are forgotten."""
    provider = make()
    await provider.ensure(spec(one))
    running = await becomes(provider, one, Phase.RUNNING)
    request = json.loads(_live(cloud, one))["request"] | {"ClientToken": "forgotten"}
    seen = aws_client("ec2", cloud.aws.region, cloud.proxy.url)
    second = seen.run_instances(**request)["Instances"][0]["InstanceId"]
    async with asyncio.timeout(20):
        while _states(cloud, one)[second] != "terminated":
            await asyncio.sleep(0.05)
    assert sorted(_states(cloud, one).values()) == ["running", "terminated"]
    assert await provider.describe(one) == running


async def test_a_spot_instance_that_is_taken_back_says_so_first(
    make: Make, cloud: Cloud, one: str, machines: Machines
) -> None:
    provider = make(spot=True)
    await provider.ensure(spec(one))
    await becomes(provider, one, Phase.RUNNING)
    (call,) = cloud.proxy.of("RunInstances")
    assert call.parameters["InstanceMarketOptions.MarketType"] == "spot"
    (instance,) = cloud.instances(replica=one)
    machines.notices[instance["InstanceId"]] = '{"action": "terminate", "time": "2026-12-01T08:22:00Z"}'
    async with asyncio.timeout(20):
        while (found := await provider.describe(one)).code != "spot_interrupted":
            await asyncio.sleep(0.05)
    assert found.phase is Phase.RUNNING
    assert "2026-12-01T08:22:00Z" in found.message


async def test_weights_come_from_the_regions_bucket(
    make: Make, cloud: Cloud, one: str, tmp_path: Path, machines: Machines
) -> None:
    body = secrets.token_bytes(9 * 1024 * 1024)  # more than one part
    s3 = cloud.aws.client("s3")
    s3.put_object(Bucket=cloud.outputs["Bucket"], Key="weights/fast/model.gguf", Body=body)
    try:
        provider = make()
        await provider.ensure(spec(one))
        await becomes(provider, one, Phase.RUNNING)
        assert (tmp_path / "node" / "weights" / "weights" / "fast" / "model.gguf").read_bytes() == body
    finally:
        s3.delete_object(Bucket=cloud.outputs["Bucket"], Key="weights/fast/model.gguf")


def _states(cloud: Cloud, replica_id: str) -> dict[str, str]:
    return {found["InstanceId"]: found["State"]["Name"] for found in cloud.instances(replica=replica_id)}


def _live(cloud: Cloud, replica_id: str) -> bytes:
    s3 = cloud.aws.client("s3")
    keys = [one["Key"] for one in s3.list_objects_v2(Bucket=cloud.outputs["Bucket"], Prefix="live/")["Contents"]]
    (key,) = [key for key in keys if key.endswith(f"/{replica_id}")]
    body: bytes = s3.get_object(Bucket=cloud.outputs["Bucket"], Key=key)["Body"].read()
    return body
