"""Machines that run what they are told: the guest of the AWS provider, as its instances boot it."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from pathlib import Path

import pytest

from control_plane.domain import Description, Phase
from control_plane.errors import ProviderError
from control_plane.providers.aws_sight import UNSAID, report_of
from control_plane.security.aws import aws_client
from control_plane.security.secret import load_secret
from tests.contract.providers.aws_cloud import Cloud, MakeAws
from tests.contract.providers.aws_machines import Machines
from tests.contract.providers.aws_proxy import Fault
from tests.contract.providers.common import becomes, gone, spec


async def test_tokens_are_in_no_request_but_the_secrets_own(
    make: MakeAws, cloud: Cloud, one: str, tmp_path: Path, machines: Machines
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
    make: MakeAws, cloud: Cloud, one: str, machines: Machines
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
    make: MakeAws, cloud: Cloud, one: str, machines: Machines
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
    make: MakeAws, cloud: Cloud, one: str, machines: Machines
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
    make: MakeAws, cloud: Cloud, one: str, machines: Machines
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
    make: MakeAws, cloud: Cloud, one: str, tmp_path: Path, machines: Machines
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


async def test_a_machine_that_may_not_read_its_secret_says_so(
    make: MakeAws, cloud: Cloud, one: str, machines: Machines
) -> None:
    cloud.proxy.fail(Fault("GetSecretValue", "AccessDeniedException", times=9))
    provider = make()
    await provider.ensure(spec(one))
    failed = await becomes(provider, one, Phase.FAILED)
    assert failed.code == "not_authorized"
    assert "get_secret_value" in failed.message


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", b"[]", b"{}", b'{"phase": "flying", "instance": "i-1"}', b'{"phase": "running"}']
)
def test_a_report_that_cannot_be_read_says_nothing(body: bytes) -> None:
    assert report_of(body) == UNSAID


def test_a_report_does_not_say_where_it_is_nor_that_it_is_gone() -> None:
    said = {
        "phase": "absent",
        "instance": "i-1",
        "phases": {},
        "address": {"host": "10.0.0.1", "port": 1},
        "code": "x" * 99,
    }
    assert report_of(json.dumps(said).encode()).found == Description(Phase.STARTING, code="x" * 64)


def _states(cloud: Cloud, replica_id: str) -> dict[str, str]:
    return {found["InstanceId"]: found["State"]["Name"] for found in cloud.instances(replica=replica_id)}


def _live(cloud: Cloud, replica_id: str) -> bytes:
    s3 = cloud.aws.client("s3")
    keys = [one["Key"] for one in s3.list_objects_v2(Bucket=cloud.outputs["Bucket"], Prefix="live/")["Contents"]]
    (key,) = [key for key in keys if key.endswith(f"/{replica_id}")]
    body: bytes = s3.get_object(Bucket=cloud.outputs["Bucket"], Key=key)["Body"].read()
    return body
