"""Settings of what replicas run on: a Ray cluster, an account of AWS, a Kubernetes cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from control_plane.section import HostPort, Name, Seconds, Section, arn_region

_LABEL = r"^[A-Za-z0-9]([A-Za-z0-9_./-]{0,250}[A-Za-z0-9])?$"
_LABEL_VALUE = r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"


class RaySettings(Section):
    """The Ray cluster that a region's replicas run in, and which of its nodes are the region's.

    The control plane's machine must be a node of the cluster, if only one without resources.
    """

    address: HostPort
    """Of the cluster's head."""
    token_file: Path
    """Holds the cluster's authentication token: its nodes were started with RAY_AUTH_MODE=token."""
    label: str = Field("region", pattern=_LABEL)
    value: str | None = Field(None, pattern=_LABEL_VALUE)
    """Of the label of the region's nodes; the region's name where nothing is said."""
    cpus: float = Field(1.0, gt=0, le=1024)
    """What a replica takes of its node's CPUs."""
    queue_seconds: Seconds = 60.0
    """How long a replica may wait in the cluster's queue before that counts as no capacity."""
    node_home: str | None = None
    """A folder of each node, for its replicas' logs; `~/.ingle/node` where nothing is said."""


class AwsMachine(Section):
    """A type of instance that replicas may run on."""

    type: str = Field(pattern=r"^[a-z0-9-]{1,30}\.[a-z0-9-]{1,30}$")
    accelerator: str = Field("cpu", pattern=_LABEL_VALUE)
    """What `--gpu` names it by, such as L4; "cpu" for a type without."""
    count: int = Field(1, ge=1, le=64)
    """How many accelerators it has."""
    price_per_hour: float = Field(0.0, ge=0, le=10_000)


class AwsSettings(Section):
    """Where in AWS a region's replicas run: what the stack of `infra/aws/region.yaml` made there."""

    aws_region: str = Field(pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9]{1,2}$")
    bucket: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")
    launch_template: str = Field(pattern=r"^lt-[0-9a-f]{8,32}$")
    subnets: tuple[Annotated[str, Field(pattern=r"^subnet-[0-9a-f]{8,32}$")], ...] = Field(min_length=1, max_length=16)
    """One of each zone, the preferred first."""
    machines: tuple[AwsMachine, ...] = Field(min_length=1, max_length=32)
    """The cheapest that has what a replica asks is tried first."""
    kms_key: str | None = None
    """Seals the replicas' secrets; AWS's own key for the account where nothing is said."""
    spot: bool = False
    """Whether instances are spot ones, which AWS may take back with two minutes' notice."""
    address: Literal["private", "public"] = "private"
    """Which of an instance's addresses gateways and controllers reach it at."""
    port: int = Field(8100, ge=1, le=65535)
    python: str = Field("/opt/ingle/bin/python", pattern=r"^/[A-Za-z0-9._/-]{1,200}$")
    """The image's interpreter that has `ingle[engine,aws]`."""
    node_home: str = Field("/var/lib/ingle", pattern=r"^/[A-Za-z0-9._/-]{1,200}$")
    """A folder of the instance, for the replica's logs and weights."""
    deadman_minutes: int = Field(60, ge=1, le=10_080)
    """How long an instance lives on without a word from a controller; then it powers off, and so is terminated."""
    cool_down: Seconds = 120.0
    """How long a type isn't asked for in a zone that had no capacity for it."""
    settle_seconds: Seconds = 60.0
    """How long a new instance may be unknown to those who ask AWS for it."""
    reap_grace: float = Field(60.0, ge=0, le=3600)
    """How old an instance is, in seconds, before it may count as nobody's."""
    endpoint_url: str | None = None
    """Another place than AWS's own, to try things out."""

    @field_validator("kms_key")
    @classmethod
    def _key_is_here(cls, key: str | None, info: ValidationInfo) -> str | None:
        """An id or an alias is one of the region that is asked; an ARN names its own."""
        here = info.data.get("aws_region")
        if here and key and key.startswith("arn:") and arn_region(key) != here:
            raise ValueError(f"must be a KMS key in {here}, where aws_region is")
        return key


class KubernetesAccelerator(Section):
    """A kind of accelerator that nodes have: what `--gpu` names."""

    resource: str = Field("nvidia.com/gpu", pattern=_LABEL)
    node_selector: dict[str, str] = Field(default_factory=dict, max_length=10)
    """Labels of the nodes that have this kind."""


class KubernetesSettings(Section):
    """The cluster and namespace that a region's replicas run in as pods, and on which nodes."""

    kubeconfig: Path | None = None
    """The cluster that the control plane itself runs in, where nothing is said."""
    context: str | None = None
    namespace: Name = "ingle"
    image: str = Field(min_length=1, max_length=512)
    """Has `ingle[engine]`."""
    command: tuple[str, ...] = Field(("python", "-m", "data_plane", "serve"), min_length=1, max_length=32)
    node_selector: dict[str, str] = Field(default_factory=dict, max_length=10)
    """Labels of the region's nodes; `topology.kubernetes.io/region` with the region's name where nothing is said."""
    accelerators: dict[str, KubernetesAccelerator] = Field(default_factory=dict, max_length=50)
    cpu: str = Field("1", pattern=r"^[0-9]+(\.[0-9]+|m)?$")
    """What a replica asks of its node, and its bound of memory."""
    memory: str = Field("2Gi", pattern=r"^[0-9]+(Ki|Mi|Gi|Ti)?$")
    cache_claim: Name | None = None
    """A claim on a volume for weights; without one each replica fetches its own."""
    user: int = Field(65_532, ge=1)
    port: int = Field(8100, ge=1024, le=65535)
    queue_seconds: Seconds = 60.0
    """How long a pod may wait for a node before that counts as no capacity."""
