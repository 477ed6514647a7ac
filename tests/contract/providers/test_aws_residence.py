"""Where a region's bucket and secrets are, by AWS's word: elsewhere nothing is launched, read or kept."""

from __future__ import annotations

import pytest

from control_plane.domain import Kept, Phase, Weights
from control_plane.errors import ProviderRefused
from control_plane.providers.aws_calls import AwsCalls
from control_plane.providers.aws_residence import Residence
from tests.contract.providers.aws_cloud import BUCKET_ELSEWHERE, ELSEWHERE, Cloud, MakeAws
from tests.contract.providers.aws_machines import Machines
from tests.contract.providers.aws_proxy import Fault
from tests.contract.providers.common import becomes, spec

ASKED = "HEAD "
"""The call that asks for a bucket itself."""


def tells(region: str, times: int = 1) -> Fault:
    """S3 says that the bucket is in `region`."""
    return Fault(ASKED, times=times, headers={"x-amz-bucket-region": region})


async def refused(make: MakeAws, replica_id: str, **settings: object) -> ProviderRefused:
    with pytest.raises(ProviderRefused) as found:
        await make(**settings).ensure(spec(replica_id))
    return found.value


async def test_where_the_bucket_is_elsewhere_nothing_is_launched(make: MakeAws, cloud: Cloud, one: str) -> None:
    provider = make(bucket=BUCKET_ELSEWHERE)
    for _ in range(2):
        with pytest.raises(ProviderRefused) as refused:
            await provider.ensure(spec(one))
        assert (refused.value.code, refused.value.permanent) == ("residency_mismatch", True)
        assert refused.value.message == "bucket weights-far-away is in us-west-2, not in eu-central-1"
    with pytest.raises(ProviderRefused, match="is in us-west-2"):
        await provider.offers()
    assert [call.action for call in cloud.proxy.calls] == [ASKED]
    assert cloud.instances(replica=one) == []
    assert not [name for name in cloud.secrets() if one in name]


async def test_what_s3_said_is_believed_for_a_while(cloud: Cloud, make: MakeAws) -> None:
    now, calls = [0.0], AwsCalls(cloud.aws.region, cloud.proxy.url)
    residence = Residence(calls, cloud.outputs["Bucket"], clock=lambda: now[0])
    cloud.proxy.fail(tells(ELSEWHERE))
    for now[0], says in ((0.0, ELSEWHERE), (59.0, ELSEWHERE), (61.0, cloud.aws.region), (120.0, cloud.aws.region)):
        assert await residence.bucket() == says
    assert len(cloud.proxy.of(ASKED)) == 2
    calls.close()


async def test_s3_is_believed_where_it_lets_nobody_look(make: MakeAws, cloud: Cloud, one: str) -> None:
    cloud.proxy.fail(Fault(ASKED, "403", 403, headers={"x-amz-bucket-region": ELSEWHERE}))
    assert (await refused(make, one)).code == "residency_mismatch"
    cloud.proxy.fail(Fault(ASKED, "403", 403))
    assert (await refused(make, one)).code == "not_authorized"


async def test_where_s3_says_nothing_nothing_is_launched_yet(make: MakeAws, cloud: Cloud, one: str) -> None:
    cloud.proxy.fail(tells(""))
    found = await refused(make, one)
    assert (found.code, found.permanent) == ("residency_unknown", False)
    await make().ensure(spec(one))
    assert len(cloud.instances(replica=one)) == 1


async def test_a_secret_that_came_to_be_elsewhere_is_taken_back(make: MakeAws, cloud: Cloud, one: str) -> None:
    cloud.proxy.fail(Fault("CreateSecret", rewrite=(f":{cloud.aws.region}:", f":{ELSEWHERE}:")))
    found = await refused(make, one)
    assert (found.code, found.permanent) == ("residency_mismatch", True)
    assert f"is in {ELSEWHERE}, not in" in found.message
    assert cloud.proxy.of("RunInstances") == []
    assert not [name for name in cloud.secrets() if one in name]


async def test_a_machine_reads_no_weights_from_elsewhere(
    make: MakeAws, cloud: Cloud, one: str, machines: Machines
) -> None:
    """A client of S3 follows a bucket; this one came to be elsewhere after the controller asked."""
    provider = make()
    await provider.offers()
    cloud.proxy.fail(tells(ELSEWHERE, times=9))
    await provider.ensure(spec(one))
    failed = await becomes(provider, one, Phase.FAILED)
    assert failed.code == "residency_mismatch"
    assert failed.message.endswith(f"is in {ELSEWHERE}, not in {cloud.aws.region}")
    assert cloud.proxy.of("GET weights") == []


async def test_it_is_told_where_weights_were_read_and_secrets_lie(
    make: MakeAws, cloud: Cloud, one: str, machines: Machines
) -> None:
    s3, secrets = cloud.aws.client("s3"), cloud.aws.client("secretsmanager")
    bucket, key = cloud.outputs["Bucket"], "weights/fast/model.gguf"
    s3.put_object(Bucket=bucket, Key=key, Body=b"weights")
    try:
        provider = make()
        await provider.ensure(spec(one))
        found = await becomes(provider, one, Phase.RUNNING)
        assert found.weights == Weights(f"s3://{bucket}/weights/fast", cloud.aws.region)
        marks = Kept("marks and logs", f"s3://{bucket}", "eu-1")
        mine = Kept("secrets", "AWS Secrets Manager", "eu-1")
        assert await provider.kept(one) == [marks, mine]
        (name,) = [name for name in cloud.secrets() if one in name]
        secrets.replicate_secret_to_regions(SecretId=name, AddReplicaRegions=[{"Region": ELSEWHERE}])
        assert await provider.kept(one) == [marks, mine, Kept("secrets", "AWS Secrets Manager", ELSEWHERE)]
        secrets.remove_regions_from_replication(SecretId=name, RemoveReplicaRegions=[ELSEWHERE])
    finally:
        s3.delete_object(Bucket=bucket, Key=key)
