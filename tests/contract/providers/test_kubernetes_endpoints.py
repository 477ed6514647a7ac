"""An endpoint on a region whose provider is kubernetes: the whole platform over a fake of the API, with mutual TLS."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import kubernetes_validate
import pytest
import yaml

from tests.contract.providers.conftest import COMMAND
from tests.contract.providers.kube_api import VERSION, Cluster
from tests.contract.providers.test_kubernetes import cluster, kubeconfig  # noqa: F401 - fixtures
from tests.control_plane.harness import Installation, chat, create, installed, state_of, until

ACCESS = Path(__file__).parents[3] / "infra" / "kubernetes" / "access.yaml"
Value = TypeVar("Value")


async def beside(work: Callable[[], Value]) -> Value:
    """The API answers in this thread meanwhile."""
    return await asyncio.to_thread(work)


async def test_an_endpoint_lives_in_pods(
    cluster: Cluster,  # noqa: F811
    kubeconfig: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    cluster.command = COMMAND
    home = tmp_path / "home"
    home.mkdir()
    (home / "ingle.toml").write_text(
        f"""
replica_tls = true
[timing]
drain_timeout = 2
[[regions]]
name = "eu-1"
provider = "kubernetes"
kubernetes = {{ kubeconfig = "{kubeconfig}", image = "ingle/engine:1", command = ["engine"] }}
"""
    )
    with installed(home) as installation:
        await beside(lambda: _story(installation, cluster))


def _story(installation: Installation, pods: Cluster) -> None:
    key = installation.up().facts["key"]
    with installation.admin() as admin:
        region = admin.region("eu-1")
        assert (region.provider, region.reachable, region.accelerators) == ("kubernetes", True, {"cpu": 1})
        url = create(admin, "chat", "fast", region="eu-1", idle_timeout=600, warmth="asleep")
        with installation.tenant(url, key) as tenant:
            assert tenant.post("/chat/completions", json=chat()).status_code == 200
            (first,) = (replica.id for replica in admin.endpoint("chat").replicas)
            # a pod that somebody deletes is followed by another
            name = first.replace("_", "-")
            pods.processes[name].kill()
            until(lambda: {replica.id for replica in admin.endpoint("chat").replicas} - {first}, "another stands")
            until(lambda: state_of(admin, "chat") == "ready", "it serves again")
            assert tenant.post("/chat/completions", json=chat()).status_code == 200
            admin.sleep_endpoint("chat")
            until(lambda: [replica.rung for replica in admin.endpoint("chat").replicas] == ["asleep"], "it rests")
            assert tenant.post("/chat/completions", json=chat()).status_code == 200
        assert any("starting" in line for found in admin.logs("chat") for line in found.lines)
        admin.delete_endpoint("chat")
        until(lambda: not admin.endpoints(), "it is gone")
    assert not [name for kind, name in pods.objects if kind == "pods"]


@pytest.mark.parametrize("manifest", list(yaml.safe_load_all(ACCESS.read_text())), ids=lambda item: str(item["kind"]))
def test_what_access_it_needs_is_as_the_published_schemas_say(manifest: dict[str, object]) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)
