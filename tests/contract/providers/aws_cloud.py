"""An AWS of this machine: a server that behaves like it, a proxy that adds faults and machines, and our own stack."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from control_plane.provider_settings import AwsSettings
from control_plane.providers.aws import AwsProvider
from tests.contract.providers.aws_machines import Machines
from tests.contract.providers.aws_proxy import AwsProxy
from tests.control_plane.harness import Aws

MakeAws = Callable[..., AwsProvider]
ELSEWHERE, BUCKET_ELSEWHERE = "us-west-2", "weights-far-away"
TEMPLATE = Path(__file__).parents[3] / "infra" / "aws" / "region.yaml"
# Instances have addresses of the loopback interface, so that what they listen at can be reached.
PARAMETERS = {
    "VpcCidr": "127.77.0.0/16",
    "SubnetCidrs": "127.77.0.0/20,127.77.16.0/20",
    "CallerCidr": "127.0.0.0/8",
    "ImageId": "ami-0123456789abcdef0",
}
MACHINES = (
    {"type": "c7i.large", "accelerator": "cpu", "price_per_hour": 0.1},
    {"type": "c7i.xlarge", "accelerator": "cpu", "price_per_hour": 0.2},
    {"type": "g6.xlarge", "accelerator": "L4", "price_per_hour": 0.8},
)


@dataclass
class Cloud:
    """`outputs` are the stack's. What goes to `proxy` is seen and may fail, what goes to `aws` isn't and doesn't."""

    aws: Aws
    proxy: AwsProxy
    outputs: Mapping[str, str]

    def values(self, **more: Any) -> dict[str, Any]:
        """Settings of a region there, as a file has them."""
        return {
            "aws_region": self.aws.region,
            "bucket": self.outputs["Bucket"],
            "launch_template": self.outputs["LaunchTemplate"],
            "subnets": self.outputs["Subnets"].split(","),
            "kms_key": self.outputs["KmsKey"],
            "machines": MACHINES,
            "python": sys.executable,
            "endpoint_url": self.proxy.url,
            "reap_grace": 0,
            "settle_seconds": 3,
            **more,
        }

    def settings(self, **more: Any) -> AwsSettings:
        return AwsSettings.model_validate(self.values(**more))

    def instances(self, **tags: str) -> list[dict[str, Any]]:
        """With these tags of ours."""
        filters = [{"Name": f"tag:ingle:{name}", "Values": [value]} for name, value in tags.items()]
        answer = self.aws.client("ec2").describe_instances(Filters=filters)
        return [instance for one in answer["Reservations"] for instance in one["Instances"]]

    def secrets(self) -> list[str]:
        return [one["Name"] for one in self.aws.client("secretsmanager").list_secrets()["SecretList"]]


@contextmanager
def cloud_of(aws: Aws, folder: Path) -> Iterator[Cloud]:
    proxy = AwsProxy(aws.url, Machines(folder / "programs", aws.environment, minute=1.0))
    ec2 = aws.client("ec2")
    proxy.machines.terminate = lambda instance: ec2_end(proxy, ec2, instance)
    elsewhere = replace(aws, region=ELSEWHERE).client("s3")
    elsewhere.create_bucket(Bucket=BUCKET_ELSEWHERE, CreateBucketConfiguration={"LocationConstraint": ELSEWHERE})
    with proxy.running():
        yield Cloud(aws, proxy, deployed(aws))


def ec2_end(proxy: AwsProxy, ec2: Any, instance: str) -> None:
    """A machine that powered off is terminated, since its launch template says so."""
    proxy.machines.end(instance)
    ec2.terminate_instances(InstanceIds=[instance])


def deployed(aws: Aws) -> dict[str, str]:
    """The outputs of a new stack."""
    formation = aws.client("cloudformation")
    parameters = [{"ParameterKey": key, "ParameterValue": value} for key, value in PARAMETERS.items()]
    # that server takes zones without a region for those of a region of its own choice
    template = TEMPLATE.read_text().replace('!GetAZs ""', f"!GetAZs {aws.region}")
    formation.create_stack(
        StackName="ingle", TemplateBody=template, Parameters=parameters, Capabilities=["CAPABILITY_IAM"]
    )
    formation.get_waiter("stack_create_complete").wait(StackName="ingle", WaiterConfig={"Delay": 1, "MaxAttempts": 20})
    (stack,) = formation.describe_stacks(StackName="ingle")["Stacks"]
    return {output["OutputKey"]: output["OutputValue"] for output in stack["Outputs"]}
