"""The kubernetes provider before a fake of the API, with real processes in its pods. No real cluster was at hand."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from aiohttp import web

from control_plane.domain import Phase, ReplicaSpec
from control_plane.errors import ProviderError, ProviderRefused
from control_plane.provider_settings import KubernetesAccelerator, KubernetesSettings
from control_plane.providers import kubernetes_pod
from control_plane.providers.base import Provider
from control_plane.providers.kubernetes import KubernetesProvider
from control_plane.providers.processes import MARK, marked
from control_plane.security.secret import load_secret
from tests.contract.providers.common import becomes, gone, spec
from tests.contract.providers.conftest import COMMAND, GRACE, NONE, Ground, Variables
from tests.contract.providers.kube_api import VERSION, Cluster
from tests.contract.providers.test_contract import (  # noqa: F401 - they run here, on this file's ground
    test_a_call_whose_answer_was_lost_is_repeated_without_harm,
    test_a_control_plane_that_starts_anew_finds_replicas_again,
    test_a_failed_start_says_why,
    test_a_replica_starts_answers_drains_and_goes,
    test_ensure_starts_one_however_often_and_by_whomever,
    test_it_names_the_region_it_runs_in_and_since_when,
    test_it_offers_what_it_can_start,
    test_one_that_never_was_is_absent_and_may_be_drained_and_terminated,
    test_one_that_runs_elsewhere_is_said_to_whatever_is_on_record,
    test_secrets_of_the_control_plane_do_not_reach_a_replica,
    test_what_a_region_sets_for_its_replicas_reaches_them,
    test_what_cannot_be_started_is_refused_with_its_code,
)

INSTALLATION = "ingle-test"


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster(command=COMMAND[:1])
    made.node("eu-a", {"topology.kubernetes.io/region": "eu-1"})
    made.node("eu-b", {"topology.kubernetes.io/region": "eu-1", "gpu": "h100"}, gpus=4)
    made.node("me-a", {"topology.kubernetes.io/region": "me-1"})
    yield made
    await made.stop()


@pytest.fixture
async def kubeconfig(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Path]:
    runner = web.AppRunner(cluster.app(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    path = tmp_path / "kubeconfig"
    server = f"http://127.0.0.1:{runner.addresses[0][1]}"
    path.write_text(
        yaml.safe_dump(
            {
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": server}}],
                "users": [{"name": "u", "user": {"token": cluster.token}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            }
        )
    )
    yield path
    await runner.cleanup()


@pytest.fixture
async def ground(cluster: Cluster, kubeconfig: Path, tmp_path: Path) -> AsyncIterator[Ground]:
    providers: list[KubernetesProvider] = []

    def make(
        command: Sequence[str] = COMMAND, grace: float = GRACE, elsewhere: bool = False, variables: Variables = NONE
    ) -> Provider:
        cluster.command = (command[0],)
        nodes = {"topology.kubernetes.io/region": "me-1"} if elsewhere else {}
        own = settings(kubeconfig, command=("unused", *command[1:]), node_selector=nodes)
        providers.append(
            KubernetesProvider(
                {"eu-1": own},
                load_secret(tmp_path),
                installation=INSTALLATION,
                grace=grace,
                variables={"eu-1": variables},
            )
        )
        return providers[-1]

    made = Ground(tmp_path, make, set())
    yield made
    for provider in providers:
        await provider.close()
    for replica_id in made.started:
        for pid in marked(MARK, replica_id):
            os.kill(pid, signal.SIGKILL)


def settings(kubeconfig: Path, **changes: Any) -> KubernetesSettings:
    accelerators = {"H100": KubernetesAccelerator(node_selector={"gpu": "h100"})}
    values = {"kubeconfig": kubeconfig, "image": "ingle/engine:1", "accelerators": accelerators, "queue_seconds": 0.5}
    return KubernetesSettings.model_validate(values | changes)


async def test_its_accelerators_and_nodes(ground: Ground) -> None:
    offers = {(offer.accelerator, offer.max_per_replica) for offer in await ground.make().offers()}
    assert offers == {("cpu", 1), ("H100", 4)}


async def test_a_node_that_comes_to_be_another_regions_is_seen(
    kubeconfig: Path, cluster: Cluster, tmp_path: Path, one: str
) -> None:
    now = [time.time()]
    own = dict.fromkeys(("eu-1", "me-1"), settings(kubeconfig, command=("unused", *COMMAND[1:])))
    secret = load_secret(tmp_path)
    provider = KubernetesProvider(own, secret, installation=INSTALLATION, grace=GRACE, clock=lambda: now[0])
    cluster.remove("nodes", "eu-b")
    await provider.ensure(spec(one))
    assert (await becomes(provider, one, Phase.RUNNING)).region == "eu-1"
    cluster.node("eu-a", {"topology.kubernetes.io/region": "me-1"})
    now[0] += 61
    assert (await provider.describe(one)).region == "me-1"
    cluster.node("late", {"topology.kubernetes.io/region": "eu-1"})
    cluster.objects["pods", kubernetes_pod.object_name(one)]["spec"]["nodeName"] = "late"
    assert (await provider.describe(one)).region == "eu-1", "a node that is new isn't taken for another region's"
    await gone(provider, one)
    await provider.close()


async def test_a_pod_that_no_node_takes_has_no_capacity(ground: Ground, cluster: Cluster, one: str) -> None:
    provider = ground.make()
    for name in ("eu-a", "eu-b"):
        cluster.remove("nodes", name)
    await provider.ensure(spec(one))
    failed = await becomes(provider, one, Phase.FAILED)
    assert failed.code == "no_capacity"
    assert "nodes are available" in failed.message
    await gone(provider, one)


async def test_it_runs_in_its_region_alone_and_keeps_its_budget(ground: Ground, cluster: Cluster, one: str) -> None:
    provider = ground.make()
    await provider.ensure(spec(one, gpu="H100"))
    await becomes(provider, one, Phase.RUNNING)
    pod = cluster.objects["pods", kubernetes_pod.object_name(one)]
    assert pod["spec"]["nodeSelector"] == {"topology.kubernetes.io/region": "eu-1", "gpu": "h100"}
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    budget = cluster.objects["poddisruptionbudgets", kubernetes_pod.budget_name(INSTALLATION, "chat")]
    assert budget["spec"]["selector"]["matchLabels"][kubernetes_pod.ENDPOINT] == "chat"
    await gone(provider, one)
    await provider.terminate(one)
    assert not [name for kind, name in cluster.objects if kind == "poddisruptionbudgets"]


@pytest.mark.parametrize(
    ("fault", "code", "permanent"),
    [
        ((403, "exceeded quota: gpus, requested: 1, used: 8, limited: 8"), "quota_exceeded", False),
        ((403, "pods is forbidden: user u cannot create resource"), "not_allowed", True),
        ((422, "Pod is invalid: spec.containers[0].image: Required value"), "invalid_spec", True),
    ],
)
async def test_what_the_cluster_refuses(
    ground: Ground, cluster: Cluster, one: str, fault: tuple[int, str], code: str, permanent: bool
) -> None:
    cluster.faults["POST pods"] = [fault]
    with pytest.raises(ProviderRefused) as refused:
        await ground.make().ensure(spec(one))
    assert (refused.value.code, refused.value.permanent) == (code, permanent)
    assert fault[1][:20] in refused.value.message


@pytest.mark.parametrize("fault", [(429, "too many requests"), (500, "etcdserver: timeout"), (504, "")])
async def test_trouble_that_passes_is_no_refusal(
    ground: Ground, cluster: Cluster, one: str, fault: tuple[int, str]
) -> None:
    provider = ground.make()
    cluster.faults["POST pods"] = [fault]
    with pytest.raises(ProviderError) as error:
        await provider.ensure(spec(one))
    assert not isinstance(error.value, ProviderRefused)
    await provider.ensure(spec(one))
    await becomes(provider, one, Phase.RUNNING)
    assert len(ground.processes(one)) == 1


@pytest.mark.parametrize("what", ["POST secrets", "POST pods", "PATCH poddisruptionbudgets"])
async def test_an_answer_that_is_lost_after_it_took_effect(
    ground: Ground, cluster: Cluster, one: str, what: str
) -> None:
    provider = ground.make()
    cluster.dropped.add(what)
    with pytest.raises(ProviderError):
        await provider.ensure(spec(one))
    await provider.ensure(spec(one))
    await becomes(provider, one, Phase.RUNNING)
    assert len(ground.processes(one)) == 1
    await gone(provider, one)


async def test_a_pod_is_deleted_by_its_uid(ground: Ground, cluster: Cluster, one: str) -> None:
    """Another pod that came to have the name, of other hands, is not ours to end."""
    name = kubernetes_pod.object_name(one)
    provider = ground.make()
    await provider.ensure(spec(one))
    await becomes(provider, one, Phase.RUNNING)
    cluster.objects["pods", name]["metadata"]["labels"][kubernetes_pod.OWNER] = "another"
    with pytest.raises(ProviderError, match="another installation's"):
        await provider.terminate(one)
    assert await provider.list_owned() == []
    cluster.objects["pods", name]["metadata"]["labels"][kubernetes_pod.OWNER] = INSTALLATION
    await gone(provider, one)


async def test_a_container_that_is_killed(ground: Ground, one: str) -> None:
    provider = ground.make()
    await provider.ensure(spec(one))
    await becomes(provider, one, Phase.RUNNING)
    (pid,) = ground.processes(one)
    os.kill(pid, signal.SIGKILL)
    exited = await becomes(provider, one, Phase.EXITED)
    assert (exited.code, "signal 9" in exited.message) == ("replica_exited", True)
    await gone(provider, one)


async def test_one_that_ignores_sigterm_is_killed_after_its_grace(ground: Ground, one: str) -> None:
    stubborn = (
        "import signal, socket, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "server = socket.create_server((sys.argv[3], int(sys.argv[5]))); time.sleep(600)"
    )
    provider = ground.make((sys.executable, "-c", stubborn), grace=0.0)
    await provider.ensure(spec(one))
    await becomes(provider, one, Phase.RUNNING)
    await provider.terminate(one)
    await gone(provider, one)
    assert ground.processes(one) == []


async def test_lists_come_in_pages(ground: Ground, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.providers.kubernetes._PAGE", 2)
    provider = ground.make()
    ids = sorted(f"rep_{number}{os.getpid()}" for number in range(5))
    ground.started.update(ids)
    await asyncio.gather(*(provider.ensure(spec(replica_id)) for replica_id in ids))
    assert sorted(await provider.list_owned()) == ids
    for replica_id in ids:
        await gone(provider, replica_id)


async def test_secrets_are_in_secrets_only(ground: Ground, cluster: Cluster, one: str) -> None:
    provider = ground.make()
    await provider.ensure(spec(one))
    await becomes(provider, one, Phase.RUNNING)
    token = ground.token(one)
    held = cluster.objects["secrets", kubernetes_pod.object_name(one)]["data"]
    assert base64.b64decode(held["token"]).decode() == token
    assert token not in str(cluster.objects["pods", kubernetes_pod.object_name(one)])
    await gone(provider, one)
    kept = cluster.objects["secrets", kubernetes_pod.object_name(one)]
    assert "data" not in kept, "only that it ended is kept"


async def test_what_it_printed(ground: Ground, one: str) -> None:
    chatty = "import json, sys, time\nfor n in range(5): print(f'line {n}', flush=True)\ntime.sleep(600)"
    provider = ground.make((sys.executable, "-c", chatty))
    assert isinstance(provider, KubernetesProvider)
    await provider.ensure(spec(one))
    async with asyncio.timeout(20):
        while len((await provider.logs(one, 100, None))[0]) < 5:
            await asyncio.sleep(0.05)
    lines, after = await provider.logs(one, 2, None)
    assert lines == ["line 3", "line 4"]
    assert await provider.logs(one, 100, after) == ([], after)
    await gone(provider, one)


@pytest.mark.parametrize("gpu", [None, "H100"])
@pytest.mark.parametrize("tls", [False, True])
def test_manifests_are_as_the_published_schemas_say(gpu: str | None, tls: bool) -> None:
    own = settings(Path("none"), cache_claim="weights")
    asked = ReplicaSpec("rep_1", "chat", "eu-1", "m", gpu=gpu, gpus=2, engine_args=("--a=$(POD_IP)",))
    pod = kubernetes_pod.pod(INSTALLATION, asked, "eu-1", own, tls=tls, grace=60.0, variables={"OTEL_X": ""})
    for manifest in (
        pod,
        kubernetes_pod.secret(INSTALLATION, asked, {"token": b"t"}),
        kubernetes_pod.budget(INSTALLATION, "chat"),
    ):
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    arguments = pod["spec"]["containers"][0]["args"]
    assert "--a=$$(POD_IP)" in arguments, "what an operator writes is no variable of the cluster's"
    assert ("--tls-pair" in arguments) is tls
    assert {"name": "OTEL_X", "value": ""} in pod["spec"]["containers"][0]["env"]
