"""A replica over several hosts of a Ray cluster: the real engine, in stages, on nodes with an accelerator each.

The accelerators are only Ray's to count here; the stages compute on the CPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from control_plane.domain import Description, Phase, ReplicaSpec
from control_plane.errors import ProviderError, ProviderRefused
from control_plane.providers.processes import MARK, marked
from control_plane.providers.ray import RayProvider, Spot
from control_plane.providers.ray_link import RayLink
from control_plane.security.certificates import CertificateAuthority
from control_plane.security.mesh import Mesh
from control_plane.security.secret import load_secret
from tests.contract.providers.clusters import Cluster, Node
from tests.contract.providers.common import becomes, gone
from tests.contract.providers.conftest import GRACE, LOG_BYTES
from tests.contract.providers.test_ray import parent_of
from tests.control_plane.harness import installed, state_of, until
from tests.data_plane import tiny
from tests.data_plane.text.tokenizers_made import byte_level_fields

ENGINE = (sys.executable, "-m", "data_plane", "serve")
PROMPT = tiny.tokens_for(3, 20)


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[list[Node]]:
    """Three in region two-1, of which a replica of two accelerators needs two."""
    label = ("--labels", "region=two-1")
    made = [cluster.add("--num-cpus", "4", "--num-gpus", "1", *label) for _ in range(3)]
    yield made
    for node in made:
        node.end()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write_gguf(tiny.make("llama", num_hidden_layers=4), path, **byte_level_fields(tiny.VOCABULARY))
    return path


@pytest.fixture
def mesh(tmp_path: Path) -> Mesh:
    return Mesh(CertificateAuthority(tmp_path / "ca", 90), 3600.0)


@pytest.fixture
async def provider(cluster: Cluster, nodes: list[Node], mesh: Mesh, tmp_path: Path) -> AsyncIterator[RayProvider]:
    link = RayLink(cluster.address, f"ingle-{secrets.token_hex(6)}", cluster.token_file)
    made = RayProvider(
        link,
        load_secret(tmp_path),
        home=tmp_path,
        node_home=str(tmp_path),
        spots={"two-1": Spot("region", "two-1", 1.0, 30.0)},
        command=ENGINE,
        terminate_grace=GRACE,
        log_bytes=LOG_BYTES,
        mesh=mesh,
    )
    async with asyncio.timeout(60):  # nodes have just come, and the driver's first connection takes its time
        while True:
            with suppress(ProviderError):
                await made.offers()
                break
            await asyncio.sleep(0.2)
    yield made
    await link.close()


def spread(one: str, model: Path, gpus: int = 2) -> ReplicaSpec:
    flags = ("--device", "cpu", "--precision", "float32", "--threads", "1", "--kv-cache-tokens", "512")
    return ReplicaSpec(one, "chat", "two-1", str(model), gpu="cuda", gpus=gpus, engine_args=flags)


async def completion(mesh: Mesh, one: str, found: Description, tmp_path: Path) -> str:
    assert found.address is not None
    headers = {"Authorization": f"Bearer {load_secret(tmp_path).replica_token(one)}"}
    body = {"model": "chat", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    url = mesh.link.url(found.address, "/v1/completions")
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body, headers=headers, **mesh.link.options(one)) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return str((await answer.json())["choices"][0]["text"])


async def nothing_left(one: str) -> None:
    async with asyncio.timeout(20):
        while marked(MARK, one) or marked(MARK, f"{one}.1"):
            await asyncio.sleep(0.05)


async def test_its_stages_run_on_several_hosts_and_it_says_what_one_says(
    provider: RayProvider, mesh: Mesh, model: Path, one: str, tmp_path: Path
) -> None:
    said = []
    for name, gpus in ((one, 2), (f"{one}b", 1), (f"{one}c", 2)):  # the third gets what the first gave back
        await provider.ensure(spread(name, model, gpus))
        found = await becomes(provider, name, Phase.RUNNING)
        assert found.region == "two-1"
        said.append(await completion(mesh, name, found, tmp_path))
        stages = marked(MARK, f"{name}.1")
        assert len(stages) == gpus - 1
        for pid in stages:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            assert "--tls-authority" in command
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert not [entry for entry in environment if entry.startswith(b"RAY_")]
            assert command[command.index("--connect") + 1].rpartition(":")[0] == str(found.address).rpartition(":")[0]
        await gone(provider, name)
        await nothing_left(name)
    assert len(set(said)) == 1


async def test_a_host_that_is_lost_ends_it_and_nothing_is_left(
    provider: RayProvider, cluster: Cluster, nodes: list[Node], model: Path, one: str
) -> None:
    await provider.ensure(spread(one, model))
    await becomes(provider, one, Phase.RUNNING)
    (stage,) = marked(MARK, f"{one}.1")
    host = next(node for node in nodes if stage in node.pids())
    host.lose()
    async with asyncio.timeout(60):
        while (await provider.describe(one)).phase not in (Phase.EXITED, Phase.FAILED):
            await asyncio.sleep(0.1)
    await gone(provider, one)
    assert await provider.list_owned() == []
    await nothing_left(one)
    host.end()
    nodes[nodes.index(host)] = cluster.add(*host.arguments)


async def test_a_supervisor_that_dies_takes_all_its_hosts_with_it(provider: RayProvider, model: Path, one: str) -> None:
    await provider.ensure(spread(one, model))
    await becomes(provider, one, Phase.RUNNING)
    (leader,) = [pid for pid in marked(MARK, one) if parent_of(pid) not in marked(MARK, one)]
    os.kill(parent_of(leader), signal.SIGKILL)
    await becomes(provider, one, Phase.EXITED)
    await nothing_left(one)
    await gone(provider, one)


async def test_a_stage_that_cannot_start_is_said(provider: RayProvider, model: Path, one: str) -> None:
    await provider.ensure(spread(one, model))
    async with asyncio.timeout(40):
        while not (stages := marked(MARK, f"{one}.1")):
            await asyncio.sleep(0.02)
    os.kill(stages[0], signal.SIGKILL)  # before it came to the engine, or just after
    failed = await becomes(provider, one, Phase.FAILED)
    assert failed.code == "stage_lost"
    await gone(provider, one)
    await nothing_left(one)


async def test_another_engine_is_not_spread(
    cluster: Cluster, nodes: list[Node], tmp_path: Path, model: Path, one: str
) -> None:
    link = RayLink(cluster.address, f"ingle-{secrets.token_hex(6)}", cluster.token_file)
    spots = {"two-1": Spot("region", "two-1", 1.0, 30.0)}
    other = RayProvider(
        link,
        load_secret(tmp_path),
        home=tmp_path,
        node_home=str(tmp_path),
        spots=spots,
        command=("other-engine",),
        terminate_grace=GRACE,
        log_bytes=LOG_BYTES,
    )
    with pytest.raises(ProviderRefused, match="takes 2 hosts, and replica_command isn't the engine's"):
        await other.ensure(spread(one, model))
    await link.close()


def test_an_endpoint_over_two_hosts_serves_its_tenants(
    cluster: Cluster, nodes: list[Node], model: Path, tmp_path: Path
) -> None:
    ray = {"address": cluster.address, "token_file": str(cluster.token_file), "node_home": str(tmp_path / "node")}
    regions = [{"name": "two-1", "jurisdiction": "FR", "provider": "ray", "ray": ray}]
    settings = {
        "INGLE_REGIONS": json.dumps(regions),
        "INGLE_REPLICA_TLS": "true",
        "INGLE_REPLICA_COMMAND": json.dumps(ENGINE),
        "INGLE_TIMING__START_TIMEOUT": "60",
    }
    with installed(tmp_path / "home", **settings) as installation:
        installation.up()
        with installation.admin() as admin:
            (two,) = until(lambda: [one for one in admin.regions() if one.reachable], "the region answers")
            assert two.accelerators["cuda"] == len(nodes)
            flags = list(spread("", model).engine_args)
            spec = {"name": "big", "region": "two-1", "model": str(model), "gpu": "cuda", "gpus": 2, "min_replicas": 1}
            admin.create_endpoint({**spec, "engine_args": flags})
            until(lambda: state_of(admin, "big") == "ready", "big is ready", patience=120)
            url = admin.endpoint("big").url
            key = admin.create_key({"name": "k"}).secret
            with installation.tenant(url, key) as tenant:
                reply = tenant.post("/completions", json={"model": "big", "prompt": PROMPT, "max_tokens": 6})
            assert reply.json()["usage"]["completion_tokens"] == 6, reply.text
            (replica,) = admin.endpoint("big").replicas
            assert len(marked(MARK, f"{replica.id}.1")) == 1
            admin.delete_endpoint("big")
            until(lambda: not marked(MARK, replica.id) and not marked(MARK, f"{replica.id}.1"), "all of it ends")
