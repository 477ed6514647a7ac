"""What is Ray's own: placement, lost nodes and supervisors, accelerators, authentication, a driver that dies."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from control_plane.domain import ELSEWHERE, Address, Offer, Phase, ReplicaSpec
from control_plane.errors import ProviderError, ProviderRefused
from control_plane.providers.processes import MARK, marked, start_time
from control_plane.providers.ray import (
    Node,
    RayProvider,
    Spot,
    hosts_of,
    keeps_logs,
    lack_of,
    offers_of,
    region_of,
    regions_of,
    resources_of,
)
from control_plane.providers.ray_link import RayLink
from control_plane.security.certificates import CertificateAuthority
from control_plane.security.mesh import Mesh, server_name
from control_plane.security.secret import load_secret
from tests.contract.providers.clusters import Cluster
from tests.contract.providers.common import becomes, gone, spec
from tests.contract.providers.conftest import COMMAND, GRACE, LOG_BYTES

EU = Spot("region", "eu-1", 1.0, 30.0)
NODES = [
    Node({"region": "eu-1"}, {"CPU": 8.0}),
    Node({"region": "eu-1"}, {"CPU": 8.0, "GPU": 4.0, "accelerator_type:H100": 1.0}),
    Node({"region": "me-1"}, {"CPU": 0.5, "GPU": 8.0}),
    Node({}, {"CPU": 64.0, "GPU": 8.0, "accelerator_type:B200": 1.0}),
]
Make = Callable[..., RayProvider]


@pytest.fixture
async def make(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Make]:
    """Providers on one namespace, each with a driver of its own. `link` is the provider's."""
    links: list[RayLink] = []
    namespace = f"ingle-{secrets.token_hex(6)}"

    def made(
        spots: dict[str, Spot] | None = None,
        link: RayLink | None = None,
        mesh: Mesh | None = None,
        grace: float = GRACE,
    ) -> RayProvider:
        links.append(link or RayLink(cluster.address, namespace, cluster.token_file))
        return RayProvider(
            links[-1],
            load_secret(tmp_path),
            home=tmp_path,
            node_home=str(tmp_path),
            spots=spots or {"eu-1": EU, "me-1": Spot("region", "me-1", 1.0, 30.0)},
            command=COMMAND,
            terminate_grace=grace,
            log_bytes=LOG_BYTES,
            mesh=mesh,
        )

    yield made
    for link in links:
        await link.close()
    for path in tmp_path.rglob("replicas/*"):
        for pid in marked(MARK, path.name):
            os.kill(pid, signal.SIGKILL)


def gpu_spec(replica_id: str, gpu: str | None, gpus: int = 0) -> ReplicaSpec:
    return ReplicaSpec(replica_id, "chat", "eu-1", "fast", gpu=gpu, gpus=gpus)


@pytest.mark.parametrize(
    ("region", "value", "offered"),
    [
        ("eu-1", "eu-1", {"cpu": 1, "cuda": 4, "H100": 4}),
        ("me-1", "me-1", {}),  # its node has too little CPU for a replica
        ("moon-1", "moon-1", {}),
        ("renamed", "eu-1", {"cpu": 1, "cuda": 4, "H100": 4}),
    ],
)
def test_a_region_offers_what_its_own_nodes_have(region: str, value: str, offered: dict[str, int]) -> None:
    offers = offers_of(region, Spot("region", value, 1.0, 1.0), NODES)
    assert offers == [Offer(region, kind, most, 0.0) for kind, most in sorted(offered.items())]


@pytest.mark.parametrize(
    ("gpu", "gpus", "value", "lack"),
    [
        (None, 0, "eu-1", None),
        ("cpu", 0, "eu-1", None),
        ("cuda", 4, "eu-1", None),
        ("H100", 1, "eu-1", None),
        ("cuda", 5, "eu-1", "no node of region eu-1 has 1 CPU, 5 GPU, nor have several together"),
        ("B200", 1, "eu-1", "no node of region eu-1 has 1 CPU, 1 GPU, B200"),
        (None, 0, "moon-1", "no node of the cluster is labelled region=moon-1, as region eu-1 asks"),
    ],
)
def test_what_no_node_of_a_region_has_is_said(gpu: str | None, gpus: int, value: str, lack: str | None) -> None:
    spot = Spot("region", value, 1.0, 1.0)
    wanted = resources_of(gpu_spec("rep_a", gpu, gpus), spot)
    assert (lack_of("eu-1", spot, wanted, NODES) if hosts_of(spot, wanted, NODES) is None else None) == lack


@pytest.mark.parametrize(
    ("gpu", "gpus", "has", "hosts"),
    [
        (None, 0, [0, 0], 1),
        ("cuda", 2, [1, 2], 1),
        ("cuda", 2, [1, 1], 2),
        ("cuda", 3, [2, 2], None),  # not as many on each
        ("cuda", 6, [2, 1, 2, 2], 3),
        ("cuda", 8, [4, 4, 2, 2], 2),
        ("cuda", 8, [4, 2, 2, 2, 2], 4),
        ("H100", 2, [1, 1], 2),
        ("cuda", 17, [1] * 17, None),  # more hosts than it may have
    ],
)
def test_it_is_spread_over_the_fewest_hosts_that_can_hold_it(
    gpu: str | None, gpus: int, has: list[int], hosts: int | None
) -> None:
    nodes = [Node({"region": "eu-1"}, {"CPU": 8.0, "GPU": float(count), "accelerator_type:H100": 1.0}) for count in has]
    assert hosts_of(EU, resources_of(gpu_spec("rep_a", gpu, gpus), EU), nodes) == hosts


def test_a_region_offers_what_several_of_its_nodes_have_together() -> None:
    nodes = [Node({"region": "eu-1"}, {"CPU": 8.0, "GPU": count}) for count in (4.0, 3.0, 1.0)]
    assert Offer("eu-1", "cuda", 6, 0.0) in offers_of("eu-1", EU, nodes)


def test_a_replica_is_where_all_of_its_hosts_are() -> None:
    spots = {"eu-1": EU, "me-1": Spot("region", "me-1", 1.0, 1.0)}
    eu, me = {"region": "eu-1"}, {"region": "me-1"}
    assert regions_of(eu, [eu, eu], spots, "eu-1") == "eu-1"
    assert regions_of(eu, [eu, me], spots, "eu-1") == "me-1"
    assert regions_of(eu, [{}], spots, "eu-1") == ELSEWHERE


@pytest.mark.parametrize(
    ("labels", "recorded", "region"),
    [
        ({"region": "eu-1"}, "eu-1", "eu-1"),
        ({"region": "me-1", "zone": "a"}, "eu-1", "me-1"),
        ({"region": "eu-1"}, "same", "same"),
        ({"region": "eu-1"}, "gone", "eu-1"),
        ({"region": "moon-1"}, "eu-1", ELSEWHERE),
        ({}, "eu-1", ELSEWHERE),
    ],
)
def test_whose_a_node_is_follows_from_its_labels(labels: dict[str, str], recorded: str, region: str) -> None:
    spots = {"eu-1": EU, "same": EU, "me-1": Spot("region", "me-1", 1.0, 1.0)}
    assert region_of(labels, spots, recorded) == region


async def test_replicas_run_on_nodes_of_their_region_and_use_their_caches(
    make: Make, cluster: Cluster, one: str
) -> None:
    provider = make()
    node = cluster.node("me-1")
    for name in (one, f"{one}b", f"{one}c"):
        await provider.ensure(spec(name, region="me-1"))
        running = await becomes(provider, name, Phase.RUNNING)
        assert running.address is not None
        assert (running.address.host, running.region) == (node.ip, "me-1")
        (pid,) = marked(MARK, name)
        assert f"INGLE_CACHE={node.cache}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        await gone(provider, name)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"region": "eu-1"}, True),
        ({"region": "fr-1"}, False),
        ({"region": "moon-1"}, False),
        ({}, False),
        (None, False),
    ],
)
def test_where_last_logs_may_leave_their_node(labels: dict[str, str] | None, expected: bool) -> None:
    france = Spot("region", "fr-1", 1.0, 1.0, keeps_logs=False)
    assert keeps_logs(labels, [EU, france]) is expected
    assert keeps_logs({"region": "fr-1"}, [Spot("region", "fr-1", 1.0, 1.0), france]) is False, "each must say so"


@pytest.mark.parametrize("keeps", [True, False])
async def test_last_logs_leave_the_node_only_where_they_may(make: Make, one: str, keeps: bool) -> None:
    provider = make({"eu-1": replace(EU, keeps_logs=keeps), "me-1": Spot("region", "me-1", 1.0, 30.0)})
    await provider.ensure(spec(one))
    await becomes(provider, one, Phase.RUNNING)
    there, _ = await provider.logs(one, 10)
    await gone(provider, one)
    kept, _ = await provider.logs(one, 10)
    assert there
    assert kept[: len(there)] == (there if keeps else [])


async def test_a_region_without_nodes_is_refused_until_it_has_one(make: Make, cluster: Cluster, one: str) -> None:
    provider = make({"later-1": Spot("region", "later-1", 1.0, 30.0)})
    assert await provider.offers() == []
    with pytest.raises(ProviderRefused, match="region=later-1") as refused:
        await provider.ensure(spec(one, region="later-1"))
    assert (refused.value.code, refused.value.permanent) == ("no_capacity", False)
    assert await provider.list_owned() == []
    node = cluster.add("--num-cpus", "1", "--labels", "region=later-1")
    async with asyncio.timeout(30):
        while not await provider.offers():
            await asyncio.sleep(0.1)
    await provider.ensure(spec(one, region="later-1"))
    running = await becomes(provider, one, Phase.RUNNING)
    assert running.address is not None
    assert running.address.host == node.ip
    # The region's only CPU is taken: the next one waits in the cluster's queue, and not for ever.
    impatient = make({"later-1": Spot("region", "later-1", 1.0, 0.2)})
    await impatient.ensure(spec(f"{one}b", region="later-1"))
    queued = await becomes(impatient, f"{one}b", Phase.FAILED)
    assert queued.code == "no_capacity"
    assert "queue" in queued.message
    await gone(impatient, f"{one}b")
    await gone(provider, one)
    node.end()


async def test_several_accelerators_come_together_and_are_given_back(make: Make, one: str) -> None:
    provider = make()
    for name in (one, f"{one}b"):  # the second one only fits once the first one's are free again
        await provider.ensure(gpu_spec(name, "H100", 2))
        await becomes(provider, name, Phase.RUNNING)
        (pid,) = marked(MARK, name)
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=0,1" in environment
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert command[command.index(b"--device") + 1] == b"cuda"
        await gone(provider, name)


async def test_nothing_of_a_replica_outlives_its_supervisor(make: Make, one: str) -> None:
    provider = make()
    await provider.ensure(spec(one, "child"))
    await becomes(provider, one, Phase.RUNNING)
    processes = marked(MARK, one)
    assert len(processes) == 2
    supervisor = parent_of(min(processes))
    os.kill(supervisor, signal.SIGKILL)
    exited = await becomes(provider, one, Phase.EXITED)
    assert exited.code == "replica_lost"
    async with asyncio.timeout(20):
        while any(start_time(pid) is not None for pid in processes):
            await asyncio.sleep(0.02)
    assert await provider.list_owned() == [one]
    await provider.ensure(spec(one))  # started once, ever
    assert marked(MARK, one) == []
    await gone(provider, one)
    assert await provider.list_owned() == []


async def test_one_whose_supervisor_hangs_is_absent_only_once_it_is(make: Make, one: str) -> None:
    provider = make(grace=0.5)
    await provider.ensure(spec(one, "child"))
    await becomes(provider, one, Phase.RUNNING)
    processes = marked(MARK, one)
    supervisor = parent_of(min(processes))
    os.kill(supervisor, signal.SIGSTOP)
    async with asyncio.timeout(60):
        while await provider.list_owned():
            await provider.terminate(one)
    assert marked(MARK, one) == []
    assert (await provider.describe(one)).phase is Phase.ABSENT


@pytest.mark.parametrize("trouble", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_driver_that_dies_or_hangs_is_replaced(
    make: Make, cluster: Cluster, trouble: signal.Signals, one: str
) -> None:
    provider = make(link=RayLink(cluster.address, f"ingle-{trouble.name}", cluster.token_file, call_seconds=2.0))
    await provider.ensure(spec(one))
    before = await becomes(provider, one, Phase.RUNNING)
    (driver,) = children_of(os.getpid(), "control_plane.providers.ray_driver")
    os.kill(driver, trouble)
    async with asyncio.timeout(30):
        while True:
            with suppress(ProviderError):  # the calls on their way when it died
                assert await provider.describe(one) == before
                break
            await asyncio.sleep(0.05)
    await gone(provider, one)


async def test_another_token_opens_nothing_and_is_not_told(make: Make, cluster: Cluster, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(secrets.token_hex(32))
    wrong.chmod(0o600)
    provider = make(link=RayLink(cluster.address, "ingle-x", wrong))
    with pytest.raises(ProviderError) as refused:
        await provider.offers()
    assert refused.value.code == "cluster_unreachable"
    assert f"it refuses the token in {wrong}" in refused.value.message
    assert wrong.read_text() not in refused.value.message


async def test_a_replica_takes_up_renewed_certificates(make: Make, tmp_path: Path, one: str) -> None:
    authority = CertificateAuthority(tmp_path / "ca", 90)
    mesh = Mesh(authority, 3600.0)
    provider = make(mesh=mesh)
    await provider.ensure(spec(one))
    running = await becomes(provider, one, Phase.RUNNING)
    assert running.address is not None
    with pytest.raises(aiohttp.ClientError):
        await get(f"http://{running.address}/health")
    first = await shown(mesh, running.address, one)
    (pair,) = tmp_path.glob("ray/*.pem")
    mesh.forget(pair)
    pair.unlink()  # as if it were due
    async with asyncio.timeout(30):
        while await shown(mesh, running.address, one) == first:
            await becomes(provider, one, Phase.RUNNING)
    authority.roll_over(time.time())
    (kept,) = tmp_path.glob(f"*/replicas/{one}/authority.pem")
    async with asyncio.timeout(30):
        while kept.read_text() != authority.ca_file.read_text():
            await becomes(provider, one, Phase.RUNNING)
    await provider.drain(one)
    await gone(provider, one)


def test_ray_is_loaded_only_by_the_driver() -> None:
    code = "import sys, control_plane.app; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


async def get(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(url):
        pass


async def shown(mesh: Mesh, address: Address, one: str) -> bytes:
    """The certificate that replica `one` shows to a caller."""
    _, writer = await asyncio.open_connection(
        address.host, address.port, ssl=mesh.link.context, server_hostname=server_name(one)
    )
    certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return certificate


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(pid: int, word: str) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and parent_of(int(path.name)) == pid and word in (path / "cmdline").read_text():
                found.append(int(path.name))
        except OSError:
            continue
    return found
