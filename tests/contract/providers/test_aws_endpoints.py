"""Endpoints on AWS, as their users see them: through the gateway and by mutual TLS to the instance."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.client import AdminClient
from control_plane.providers.processes import marked
from tests.contract.providers.aws_cloud import BUCKET_ELSEWHERE, Cloud
from tests.contract.providers.aws_machines import MACHINE
from tests.contract.providers.aws_proxy import Fault
from tests.control_plane.harness import Installation, chat, create, installed, until


@pytest.fixture
def home_on_aws(cloud: Cloud, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Installation]:
    """An installation with a region of this machine and one of AWS; its settings may be the fixture's parameter."""
    cloud.proxy.forgive()
    own = cloud.values(node_home=str(tmp_path / "node"), **getattr(request, "param", {}))
    regions = [{"name": "local-eu"}, {"name": "de-1", "jurisdiction": "DE", "provider": "aws", "aws": own}]
    with installed(tmp_path / "home", INGLE_REGIONS=json.dumps(regions), INGLE_REPLICA_TLS="true") as installation:
        yield installation
    cloud.proxy.machines.boots = True


def test_an_endpoint_on_an_instance_answers_and_leaves_nothing(home_on_aws: Installation, cloud: Cloud) -> None:
    s3, bucket = cloud.aws.client("s3"), cloud.outputs["Bucket"]
    s3.put_object(Bucket=bucket, Key="weights/fast/model.gguf", Body=b"weights")
    home_on_aws.up()
    with home_on_aws.admin() as admin:
        regions = {region.name: region for region in admin.regions()}
        assert (regions["de-1"].provider, regions["de-1"].reachable) == ("aws", True)
        assert regions["de-1"].accelerators == {"cpu": 1, "L4": 1}
        url = create(admin, "far", region="de-1", min_replicas=1)
        key = admin.create_key({"name": "k"}).secret
        with home_on_aws.tenant(url, key) as tenant:
            reply = tenant.post("/chat/completions", json=chat(model="far"))
        assert reply.json()["choices"][0]["message"]["content"] == "echo hello"
        (replica,) = admin.endpoint("far").replicas
        (instance,) = cloud.instances(replica=replica.id)
        assert replica.address == f"{instance['PrivateIpAddress']}:8100"
        until(
            lambda: any("starting" in line for logs in admin.logs("far") for line in logs.lines),
            "what it logged is told",
        )
        evidence = [json.loads(line)["content"] for line in admin.evidence("far")]
        (told,) = [one for one in evidence if one["kind"] == "replica"]
        assert told["weights"] == {"from": f"s3://{bucket}/weights/fast", "region": cloud.aws.region}
        assert {(kept["what"], kept["region"]) for kept in told["provider_says"]["keeps"]} == {
            ("marks and logs", "de-1"),
            ("secrets", "de-1"),
        }
        assert "disagreement" not in {one["kind"] for one in evidence}
        admin.delete_endpoint("far")
        until(lambda: "far" not in {one.name for one in admin.endpoints()}, "it is deleted")
    s3.delete_object(Bucket=bucket, Key="weights/fast/model.gguf")
    assert not marked(MACHINE, instance["InstanceId"])
    assert [one["State"]["Name"] for one in cloud.instances(replica=replica.id)] == ["terminated"]
    assert not [name for name in cloud.secrets() if replica.id in name]


@pytest.mark.parametrize("home_on_aws", [{"spot": True}], indirect=True)
def test_a_spot_instance_that_is_taken_back_is_drained_and_replaced(home_on_aws: Installation, cloud: Cloud) -> None:
    home_on_aws.up()
    with home_on_aws.admin() as admin:
        url = create(admin, "far", region="de-1", min_replicas=1)
        (first,) = admin.endpoint("far").replicas
        (instance,) = cloud.instances(replica=first.id)
        notice = '{"action": "terminate", "time": "2026-12-01T08:22:00Z"}'
        cloud.proxy.machines.notices[instance["InstanceId"]] = notice
        until(lambda: _ready(admin) not in ([], [first.id]) and _live(cloud) == _ready(admin), "another serves instead")
        told = [(one.state, one.code) for one in admin.events("far") if one.replica == first.id]
        assert ("draining", "spot_interrupted") in told
        assert told[-1][0] == "terminated"
        key = admin.create_key({"name": "k"}).secret
        with home_on_aws.tenant(url, key) as tenant:
            assert tenant.post("/chat/completions", json=chat(model="far")).status_code == 200
        admin.delete_endpoint("far")
        until(lambda: "far" not in {one.name for one in admin.endpoints()}, "it is deleted")
    assert _live(cloud) == []


def _ready(admin: AdminClient) -> list[str]:
    return [replica.id for replica in admin.endpoint("far").replicas if replica.state == "ready"]


def _live(cloud: Cloud) -> list[str]:
    """Replicas whose instances aren't terminated."""
    return [
        tag["Value"]
        for instance in cloud.instances(endpoint="far")
        for tag in instance["Tags"]
        if tag["Key"] == "ingle:replica" and instance["State"]["Name"] != "terminated"
    ]


def test_one_that_is_never_reachable_is_ended_with_its_endpoint(home_on_aws: Installation, cloud: Cloud) -> None:
    """As with a server like AWS alone, whose instances run nothing; the controller dies meanwhile, too."""
    cloud.proxy.machines.boots = False
    program = home_on_aws.up()
    with home_on_aws.admin() as admin:
        admin.create_endpoint({"name": "dark", "region": "de-1", "model": "fast", "min_replicas": 1})
        (instance,) = until(lambda: cloud.instances(endpoint="dark") or None, "an instance is there")
    program.kill()
    home_on_aws.up()
    with home_on_aws.admin() as admin:
        found = admin.endpoint("dark")
        assert found.state in ("provisioning", "loading")
        (replica,) = found.replicas
        tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
        assert (tags["ingle:replica"], tags["ingle:region"]) == (replica.id, "de-1")
        assert [name for name in cloud.secrets() if replica.id in name]
        admin.delete_endpoint("dark")
        until(lambda: "dark" not in {one.name for one in admin.endpoints()}, "it is deleted")
    assert [one["State"]["Name"] for one in cloud.instances(endpoint="dark")] == ["terminated"]
    assert not [name for name in cloud.secrets() if replica.id in name]


def test_a_quota_is_told_with_its_reason(home_on_aws: Installation, cloud: Cloud) -> None:
    cloud.proxy.fail(Fault("RunInstances", "VcpuLimitExceeded", times=1000))
    home_on_aws.up()
    with home_on_aws.admin() as admin:
        admin.create_endpoint({"name": "many", "region": "de-1", "model": "fast", "min_replicas": 1})
        until(lambda: admin.endpoint("many").reason.code == "quota_exceeded", "the quota is told")
        admin.delete_endpoint("many")
        until(lambda: "many" not in {one.name for one in admin.endpoints()}, "it is deleted")
    cloud.proxy.forgive()
    assert cloud.instances(endpoint="many") == []


@pytest.mark.parametrize("home_on_aws", [{"bucket": BUCKET_ELSEWHERE}], indirect=True)
def test_a_bucket_elsewhere_is_told_and_nothing_is_launched(home_on_aws: Installation, cloud: Cloud) -> None:
    home_on_aws.up()
    with home_on_aws.admin() as admin:
        (region,) = [region for region in admin.regions() if region.name == "de-1"]
        assert (region.reachable, region.trouble) == (
            False,
            "bucket weights-far-away is in us-west-2, not in eu-central-1",
        )
        admin.create_endpoint({"name": "astray", "region": "de-1", "model": "fast", "min_replicas": 1})
        until(lambda: admin.endpoint("astray").state == "failed", "it is given up")
        assert admin.endpoint("astray").reason.code == "residency_mismatch"
    assert cloud.instances(endpoint="astray") == []
