"""The CloudFormation stack: right by its own schema, deployed on a server like AWS, and no wider than it must be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cfnlint.decode import decode

from tests.contract.providers.aws_cloud import TEMPLATE, Cloud


@pytest.fixture(scope="module")
def resources() -> dict[str, Any]:
    """As written, by name: the server makes all of them, but forgets some of what they say."""
    template, faults = decode(str(TEMPLATE))
    assert not faults
    return dict(template["Resources"])


def test_it_is_right_by_cloudformations_schema() -> None:
    program = Path(sys.executable).with_name("cfn-lint")
    done = subprocess.run([str(program), str(TEMPLATE)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_its_outputs_are_a_regions_settings(cloud: Cloud) -> None:
    settings = cloud.settings()
    assert settings.bucket == cloud.outputs["Bucket"]
    assert len(settings.subnets) == 2
    zones = cloud.aws.client("ec2").describe_subnets(SubnetIds=list(settings.subnets))["Subnets"]
    assert len({zone["AvailabilityZone"] for zone in zones}) == 2


def test_machines_are_sealed_end_by_powering_off_and_need_imdsv2(cloud: Cloud) -> None:
    answer = cloud.aws.client("ec2").describe_launch_template_versions(
        LaunchTemplateId=cloud.outputs["LaunchTemplate"], Versions=["$Latest"]
    )
    data = answer["LaunchTemplateVersions"][0]["LaunchTemplateData"]
    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert (data["MetadataOptions"]["HttpTokens"], data["MetadataOptions"]["HttpPutResponseHopLimit"]) == (
        "required",
        1,
    )
    (volume,) = data["BlockDeviceMappings"]
    assert volume["Ebs"]["Encrypted"]
    assert volume["Ebs"]["KmsKeyId"] == cloud.outputs["KmsKey"]


def test_the_bucket_is_sealed_versioned_private_and_by_tls_alone(cloud: Cloud, resources: dict[str, Any]) -> None:
    s3, bucket = cloud.aws.client("s3"), cloud.outputs["Bucket"]
    (rule,) = s3.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"]["Rules"]
    assert rule["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "aws:kms"
    assert resources["Bucket"]["Properties"]["VersioningConfiguration"] == {"Status": "Enabled"}
    assert set(resources["Bucket"]["Properties"]["PublicAccessBlockConfiguration"].values()) == {True}
    (statement,) = resources["BucketPolicy"]["Properties"]["PolicyDocument"]["Statement"]
    assert (statement["Effect"], statement["Condition"]) == ("Deny", {"Bool": {"aws:SecureTransport": "false"}})


def test_what_roles_may_do_is_pinned_to_the_region_and_to_what_is_ours(resources: dict[str, Any]) -> None:
    statements = list(resources["ControllerPolicy"]["Properties"]["PolicyDocument"]["Statement"])
    (replica,) = resources["ReplicaRole"]["Properties"]["Policies"]
    statements += replica["PolicyDocument"]["Statement"]
    for statement in statements:
        if statement["Effect"] == "Deny" or statement["Action"] == "iam:PassRole":
            continue
        assert statement["Condition"]["StringEquals"]["aws:RequestedRegion"] == {"Ref": "AWS::Region"}, statement["Sid"]
        actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        assert not any("*" in action for action in actions)
        assert statement["Resource"] != "*" or all(action.startswith("ec2:Describe") for action in actions)
    ends = next(one for one in statements if one["Action"] == "ec2:TerminateInstances")
    assert ends["Condition"]["StringLike"] == {"aws:ResourceTag/ingle:installation": "?*"}


def test_the_network_leads_to_aws_alone(resources: dict[str, Any]) -> None:
    kinds = {one["Type"] for one in resources.values()}
    assert not kinds & {"AWS::EC2::InternetGateway", "AWS::EC2::NatGateway", "AWS::EC2::Route"}
    subnets = [one["Properties"] for one in resources.values() if one["Type"] == "AWS::EC2::Subnet"]
    assert [subnet["MapPublicIpOnLaunch"] for subnet in subnets] == [False, False]
