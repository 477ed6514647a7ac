"""Endpoints in a Ray cluster, as their users see them: through the gateway, whatever nodes and control planes do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from control_plane.api import schemas
from control_plane.client import AdminClient
from control_plane.providers.processes import MARK, marked, start_time
from tests.contract.providers.clusters import Cluster, Node
from tests.control_plane.harness import Installation, chat, create, free_port, ingle, installed, until


@pytest.fixture
def home_on_ray(cluster: Cluster, tmp_path: Path) -> Iterator[Installation]:
    """An installation on this machine and three regions of the cluster, of which `moon-1` has no node."""

    def region(name: str, **more: Any) -> dict[str, Any]:
        ray = {"address": cluster.address, "token_file": str(cluster.token_file), "node_home": str(tmp_path / "node")}
        return {"name": name, "provider": "ray", "ray": ray, **more}

    regions = [{"name": "local-eu"}, region("fr-1", jurisdiction="FR"), region("me-1"), region("moon-1")]
    with installed(tmp_path / "home", INGLE_REGIONS=json.dumps(regions), INGLE_REPLICA_TLS="true") as installation:
        yield installation


def ready(admin: AdminClient, name: str, *, not_: str = "") -> schemas.Replica:
    """The replica of an endpoint that serves, another one than `not_`."""

    def look() -> schemas.Replica | None:
        found = [one for one in admin.endpoint(name).replicas if one.state == "ready" and one.id != not_]
        return found[0] if found else None

    return until(look, f"{name} has a replica that is ready")


def node_of(nodes: list[Node], replica: schemas.Replica) -> Node:
    assert replica.address is not None
    return next(node for node in nodes if node.ip == replica.address.rpartition(":")[0])


def answers(tenant: httpx.Client, name: str) -> bool:
    return tenant.post("/chat/completions", json=chat(model=name)).status_code == 200


def test_an_endpoint_moves_to_a_cluster_by_its_region_alone(home_on_ray: Installation) -> None:
    program = home_on_ray.up()
    with home_on_ray.admin() as admin:
        spec: dict[str, Any] = {"name": "moved", "model": "fast", "min_replicas": 1}
        for region, host in (("local-eu", "127.0.0.1"), ("me-1", None)):
            url = create(admin, **spec, region=region)
            key = admin.create_key({"name": f"in-{region}"}).secret
            with home_on_ray.tenant(url, key) as tenant:
                reply = tenant.post("/chat/completions", json=chat(model="moved"))
            assert reply.json()["choices"][0]["message"]["content"] == "echo hello"
            replica = ready(admin, "moved")
            (pid,) = marked(MARK, replica.id)
            assert f"INGLE_REGION={region}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert host in (None, (replica.address or "").rpartition(":")[0])
            assert any("starting" in line for logs in admin.logs("moved") for line in logs.lines)
            if host is None:
                admin.update_endpoint("moved", {"min_replicas": 0})
                admin.sleep_endpoint("moved")
                until(lambda: admin.endpoint("moved").state == "zero", "it sleeps")
                until(lambda: any("starting" in line for logs in admin.logs("moved") for line in logs.lines),
                      "what it logged is kept")  # fmt: skip
            else:
                admin.delete_endpoint("moved")
                until(lambda: "moved" not in {one.name for one in admin.endpoints()}, "it is deleted")
    assert program.stop() == 0
    until(lambda: not marked(MARK, replica.id), "its replica in the cluster ends with it")


def test_a_region_without_nodes_waits_with_its_reason_and_nothing_starts_elsewhere(home_on_ray: Installation) -> None:
    home_on_ray.up()
    with home_on_ray.admin() as admin:
        regions = {region.name: region for region in admin.regions()}
        assert [one.reachable for one in regions.values()] == [True] * 4
        assert regions["me-1"].accelerators == {"cpu": 1}
        assert (regions["fr-1"].jurisdiction, regions["fr-1"].provider) == ("FR", "ray")
        assert regions["moon-1"].accelerators == {}
        assert regions["moon-1"].trouble is not None
        told = ingle(home_on_ray.home, "region", "show", "fr-1", "-o", "json")
        assert json.loads(told.stdout) == regions["fr-1"].model_dump(mode="json")
        admin.create_endpoint({"name": "lost", "region": "moon-1", "model": "fast", "min_replicas": 1})

        def waits() -> schemas.Endpoint | None:
            found = admin.endpoint("lost")
            return found if found.reason.code == "no_capacity" else None

        found = until(waits, "it has no capacity")
        assert found.state == "provisioning"
        assert "region=moon-1" in found.reason.message
        assert all(one.state in ("intended", "terminating", "terminated") for one in found.replicas)
        assert not any(marked(MARK, one.id) for one in found.replicas)


def test_a_cluster_that_cannot_be_reached_is_told_and_holds_up_nobody_else(cluster: Cluster, tmp_path: Path) -> None:
    ray = {"address": f"127.0.0.1:{free_port()}", "token_file": str(cluster.token_file)}
    regions = [{"name": "local-eu"}, {"name": "fr-1", "provider": "ray", "ray": ray}]
    with installed(tmp_path / "home", INGLE_REGIONS=json.dumps(regions), INGLE_REPLICA_TLS="true") as installation:
        installation.up()
        with installation.admin() as admin:
            admin.create_endpoint({"name": "far", "region": "fr-1", "model": "fast", "min_replicas": 1})
            until(lambda: admin.endpoint("far").state == "provisioning", "it is worked on")
            create(admin, "near", "fast", region="local-eu", min_replicas=1)
            found = admin.region("fr-1")
            assert not found.reachable
            assert found.trouble is not None
            assert "can't be reached" in found.trouble
            assert admin.endpoint("far").state == "provisioning"


def test_replicas_outlive_the_control_plane_and_come_back_when_a_node_is_lost(
    home_on_ray: Installation, cluster: Cluster
) -> None:
    nodes = [cluster.add("--num-cpus", "2", "--labels", "region=fr-1") for _ in range(2)]
    program = home_on_ray.up()
    with home_on_ray.admin() as admin:
        create(admin, "kept", "child", region="fr-1", min_replicas=1)
        key = admin.create_key({"name": "k"}).secret
        first = ready(admin, "kept")
    processes = marked(MARK, first.id)
    program.kill()
    assert marked(MARK, first.id) == processes

    home_on_ray.up()
    with home_on_ray.admin() as admin, home_on_ray.tenant(admin.endpoint("kept").url, key) as tenant:
        assert until(lambda: answers(tenant, "kept"), "it answers")
        assert ready(admin, "kept").id == first.id
        assert marked(MARK, first.id) == processes
        lost = node_of(nodes, first)
        lost.lose()
        second = ready(admin, "kept", not_=first.id)
        assert node_of(nodes, second) is not lost
        assert until(lambda: answers(tenant, "kept"), "it answers again")
        until(lambda: all(start_time(pid) is None for pid in processes), "nothing runs on the lost node")
        until(lambda: all(one.id != first.id or one.state == "terminated" for one in admin.endpoint("kept").replicas),
              "the lost one is known to be gone")  # fmt: skip
    for node in nodes:
        node.end()
