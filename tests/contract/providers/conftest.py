"""The grounds that providers are tried on: each has region `eu-1`, where the test replica can be started."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from control_plane.providers.aws import AwsProvider
from control_plane.providers.base import Provider
from control_plane.providers.local import LocalProvider
from control_plane.providers.processes import MARK, marked
from control_plane.providers.ray import RayProvider, Spot
from control_plane.providers.ray_link import RayLink
from control_plane.security.secret import load_secret
from tests.contract.providers.aws_cloud import Cloud, MakeAws, cloud_of
from tests.contract.providers.aws_machines import Machines
from tests.contract.providers.aws_proxy import Fault
from tests.contract.providers.clusters import Cluster, ray_cluster
from tests.control_plane.conftest import aws  # noqa: F401  # a fixture
from tests.control_plane.harness import REPLICA, Aws

COMMAND = (sys.executable, str(REPLICA))
GRACE = 3.0
LOG_BYTES = 8192
Variables = Mapping[str, str]
NONE: Variables = MappingProxyType({})


@dataclass
class Ground:
    """`make` gives another provider on the same state, as a control plane that starts anew has it.

    With `elsewhere` that one's region eu-1 is another place than where replicas of before were started; `variables` are
    those of eu-1's replicas.
    """

    home: Path
    make: Callable[..., Provider]
    started: set[str]

    def token(self, replica_id: str) -> str:
        return load_secret(self.home).replica_token(replica_id)

    def processes(self, replica_id: str) -> list[int]:
        self.started.add(replica_id)
        return marked(MARK, replica_id)

    def log_sizes(self) -> list[int]:
        return [path.stat().st_size for path in self.home.rglob("*.log*")]


@pytest.fixture
def one() -> str:
    """A replica's id, of this test alone: what watches over another one of this id would end this one's processes."""
    return f"rep_{secrets.token_hex(5)}"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes in eu-1, one of them with two accelerators, and one in me-1."""
    with ray_cluster() as made:
        made.add("--num-cpus", "8", "--labels", "region=eu-1")
        accelerators = ["--num-gpus", "2", "--resources", '{"accelerator_type:H100": 1}']
        made.add("--num-cpus", "8", "--labels", "region=eu-1", *accelerators)
        made.add("--num-cpus", "8", "--labels", "region=me-1")
        yield made


@pytest.fixture(scope="session")
def cloud(aws: Aws, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:  # noqa: F811
    with cloud_of(aws, tmp_path_factory.mktemp("cloud")) as made:
        yield made


@pytest.fixture(params=["local", "ray", "aws"])
async def ground(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ground]:
    secret = load_secret(tmp_path)
    links: list[RayLink] = []
    instances: list[AwsProvider] = []

    def local(
        command: Sequence[str] = COMMAND, grace: float = GRACE, elsewhere: bool = False, variables: Variables = NONE
    ) -> LocalProvider:
        regions = ["me-1" if elsewhere else "eu-1"]
        return LocalProvider(
            tmp_path,
            secret,
            regions=regions,
            command=command,
            terminate_grace=grace,
            log_bytes=LOG_BYTES,
            variables={"eu-1": variables},
        )

    def on_ray(
        command: Sequence[str] = COMMAND, grace: float = GRACE, elsewhere: bool = False, variables: Variables = NONE
    ) -> RayProvider:
        found: Cluster = request.getfixturevalue("cluster")
        namespace = f"ingle-{tmp_path.parent.name}-{tmp_path.name}"
        links.append(RayLink(found.address, namespace, found.token_file))
        return RayProvider(
            links[-1],
            secret,
            home=tmp_path,
            node_home=str(tmp_path),
            spots={
                "eu-1": Spot("region", "me-1" if elsewhere else "eu-1", 1.0, 30.0),
                "nowhere": Spot("region", "nowhere", 1.0, 30.0),
            },
            command=command,
            terminate_grace=grace,
            log_bytes=LOG_BYTES,
            variables={"eu-1": variables},
        )

    def on_aws(
        command: Sequence[str] = COMMAND, grace: float = GRACE, elsewhere: bool = False, variables: Variables = NONE
    ) -> AwsProvider:
        found: Cloud = request.getfixturevalue("cloud")
        found.proxy.forgive()
        if elsewhere:
            found.proxy.fail(Fault("DescribeInstances", times=10**6, rewrite=(found.aws.region, "us-gov-east-1")))
        instances.append(
            AwsProvider(
                "eu-1",
                found.settings(node_home=str(tmp_path)),
                secret,
                installation=f"ingle-{tmp_path.parent.name}-{tmp_path.name}",
                home=tmp_path,
                command=command,
                terminate_grace=grace,
                log_bytes=LOG_BYTES,
                variables=variables,
                fresh=0.15,
                beat=0.2,
                word=0.2,
            )
        )
        return instances[-1]

    makers: dict[str, Callable[..., Provider]] = {"local": local, "ray": on_ray, "aws": on_aws}
    made = Ground(tmp_path, makers[request.param], set())
    yield made
    for link in links:
        await link.close()
    for provider in instances:
        await provider.close()
    for path in tmp_path.rglob("replicas/*"):
        made.started.add(path.name)
    for replica_id in made.started:
        for pid in marked(MARK, replica_id):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def installation() -> str:
    return f"ingle-{secrets.token_hex(8)}"


@pytest.fixture
def machines(cloud: Cloud) -> Machines:
    """For tests whose instances run what they are told; those of other tests are never reachable."""
    return cloud.proxy.machines


@pytest.fixture
async def make(
    request: pytest.FixtureRequest, cloud: Cloud, tmp_path: Path, installation: str
) -> AsyncIterator[MakeAws]:
    """Providers of one installation, or of another by name; `cloud` forgets its faults and calls."""
    made: list[AwsProvider] = []
    cloud.proxy.forgive()
    cloud.proxy.machines.boots = "machines" in request.fixturenames

    def provider(*, name: str = installation, fresh: float = 0.15, beat: float = 0.2, **more: Any) -> AwsProvider:
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
                fresh=fresh,
                beat=beat,
                word=0.2,
                pause=0.01,
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
