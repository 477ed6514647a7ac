"""The kubernetes provider: a replica is a pod. See `kubernetes_pod` for what stands in the cluster, and why."""

from __future__ import annotations

import asyncio
import base64
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from control_plane.domain import ELSEWHERE, Description, Offer, Phase, ReplicaSpec
from control_plane.errors import ProviderError, ProviderRefused
from control_plane.provider_settings import KubernetesSettings
from control_plane.providers import kubernetes_pod as made
from control_plane.providers.local import Tokens
from control_plane.security.mesh import PLAIN, Mesh

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

_SECONDS = 10.0
_PAGE = 200
_MOST_PAGES = 500
_FIRST_OUTPUT = 64 * 1024
_MOST_LOG = 1024 * 1024
_KNOWN = 10_000
_NODES_SECONDS = 60.0
"""How long the labels of nodes are believed."""
_FORGET_SECONDS = 86_400.0
"""How long the secret of an ended replica stays, so that a late call can't start it again."""
_MERGE = "application/merge-patch+json"
_APPLY = "application/apply-patch+yaml"


class KubernetesProvider:
    """Implements `Provider` for the regions of one cluster and namespace, by region name.

    `grace` is in seconds; `variables` are set for replicas of a region, by region. Pods and secrets carry
    `installation`; nothing else is ever touched.
    """

    def __init__(
        self,
        regions: Mapping[str, KubernetesSettings],
        secret: Tokens,
        *,
        installation: str,
        grace: float,
        mesh: Mesh | None = None,
        variables: Mapping[str, Mapping[str, str]] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._regions = dict(regions)
        self._cluster = next(iter(regions.values()))
        self._secret = secret
        self._installation = installation
        self._grace = grace
        self._mesh = mesh
        self._variables = dict(variables or {})
        self._link = mesh.link if mesh else PLAIN
        self._clock = clock
        self._client: ApiClient | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="ingle-kubernetes-")
        self._nodes: dict[str, set[str]] = {}
        """Regions by the names of their nodes, as of `_nodes_at`."""
        self._nodes_at = float("-inf")
        self._told: dict[str, str] = {}
        """The beginning of what containers printed, by replica id, once they said that they were ready."""

    async def offers(self) -> Sequence[Offer]:
        found: list[Offer] = []
        for region, own in self._regions.items():
            nodes = await self._list("list_node", label_selector=made.node_selector(region, own), namespaced=False)
            if nodes:
                found.append(Offer(region, "cpu", 1, 0.0))
            for name, kind in own.accelerators.items():
                most = max((_allocatable(node, kind.resource, kind.node_selector) for node in nodes), default=0)
                if most:
                    found.append(Offer(region, name, most, 0.0))
        return found

    async def ensure(self, spec: ReplicaSpec) -> None:
        own = self._regions.get(spec.region)
        if own is None:
            raise ProviderRefused(
                f"this cluster has {', '.join(sorted(self._regions))}, not {spec.region}",
                code="unknown_region",
                permanent=True,
            )
        if spec.gpu not in (None, "cpu") and spec.gpu not in own.accelerators:
            offered = ", ".join(["cpu", *sorted(own.accelerators)])
            raise ProviderRefused(
                f"region {spec.region} offers {offered}, not {spec.gpu}", code="accelerator_not_offered", permanent=True
            )
        name = made.object_name(spec.replica_id)
        claim = made.secret(self._installation, spec, await asyncio.to_thread(self._data, spec.replica_id))
        if await self._create("secret", claim) is None:
            there = await self._read("secret", name)
            if there is None or there["metadata"].get("annotations", {}).get(made.STATE) != "starting":
                return  # an id is started once, ever
        await self._apply(made.budget(self._installation, spec.endpoint_name))
        tls = self._mesh is not None
        variables = self._variables.get(spec.region, {})
        pod = made.pod(self._installation, spec, spec.region, own, tls=tls, grace=self._grace, variables=variables)
        await self._create("pod", pod)

    async def describe(self, replica_id: str) -> Description:
        found = await self._read("pod", made.object_name(replica_id))
        if found is None:
            self._told.pop(replica_id, None)
            return Description(Phase.ABSENT)
        recorded = found["metadata"]["labels"].get(made.REGION, "")
        own = self._regions.get(recorded, self._cluster)
        created = _seconds(found["metadata"].get("creationTimestamp"))
        log = await self._beginning(replica_id, found)
        description = replace(
            made.describe(found, log, own, self._clock(), created),
            region=await self._region_of(found["spec"].get("nodeName"), recorded),
            began_at=_seconds((found.get("status") or {}).get("startTime")) or None,
        )
        if description.phase is Phase.RUNNING and self._mesh is not None:
            await self._renew(replica_id)
        return description

    async def list_owned(self) -> Sequence[str]:
        pods = await self._list("list_namespaced_pod", label_selector=f"{made.OWNER}={self._installation}")
        return [pod["metadata"]["labels"][made.REPLICA] for pod in pods]

    async def drain(self, replica_id: str) -> None:
        description = await self.describe(replica_id)
        if description.phase is not Phase.RUNNING or description.address is None:
            return
        headers = {"Authorization": f"Bearer {self._secret.replica_token(replica_id)}"}
        url, options = self._link.url(description.address, "/drain"), self._link.options(replica_id)
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SECONDS)) as session,
                session.post(url, headers=headers, **options) as response,
            ):
                if response.status >= 400:
                    raise ProviderError(f"drain was answered with {response.status}", code="drain_failed")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ProviderError(f"drain failed ({type(error).__name__})", code="drain_failed") from error

    async def terminate(self, replica_id: str) -> None:
        name = made.object_name(replica_id)
        ended = {"metadata": {"annotations": {made.STATE: "ended"}}, "data": None}
        if await self._patch("secret", name, ended) is None:
            await self._create("secret", made.tombstone(self._installation, replica_id))
        found = await self._read("pod", name)
        if found is None:
            await self._forget_old()
            await self._forget_budgets()
        elif found["metadata"]["labels"].get(made.OWNER) != self._installation:
            raise ProviderError(f"the pod {name} is another installation's", code="not_ours")
        elif not found["metadata"].get("deletionTimestamp"):
            # only this pod, and not another that came to have its name
            await self._delete("pod", name, found["metadata"]["uid"])

    async def logs(self, replica_id: str, lines: int, after: int | None) -> tuple[list[str], int]:
        """What the replica printed: the last `lines`, or those after `after`, and the next `after`, in nanoseconds."""
        since: dict[str, Any] = {"tail_lines": lines}
        if after is not None:
            since = {"since_seconds": max(1, int(self._clock() - after / 1e9) + 1)}
        try:
            text = await self._call(
                "read_namespaced_pod_log", made.object_name(replica_id), self._cluster.namespace,
                timestamps=True, limit_bytes=_MOST_LOG, **since,
            )  # fmt: skip
        except ProviderError:
            return [], after or 0
        stamped = [
            (_nanoseconds(line.partition(" ")[0]), line.partition(" ")[2]) for line in str(text or "").splitlines()
        ]
        new = [(at, line) for at, line in stamped if after is None or at > after]
        return [line for _, line in new][-lines:], max([at for at, _ in new], default=after or 0)

    async def close(self) -> None:
        """Let go of the cluster. Replicas stay."""
        if self._client is not None:
            await self._client.close()
        self._folder.cleanup()

    # ---- what a replica is given

    def _data(self, replica_id: str) -> dict[str, bytes]:
        data = {"token": self._secret.replica_token(replica_id).encode()}
        if self._mesh is not None:
            path = Path(self._folder.name) / f"{replica_id}.pem"
            self._mesh.equip(replica_id, "localhost", path)
            data |= {"pair.pem": path.read_bytes(), "ca.pem": self._mesh.ca_file.read_bytes()}
        return data

    async def _renew(self, replica_id: str) -> None:
        """A new certificate where the old one ends soon: what is mounted follows by itself."""
        path = Path(self._folder.name) / f"{replica_id}.pem"
        before = path.stat().st_mtime_ns if path.exists() else 0
        data = await asyncio.to_thread(self._data, replica_id)
        if path.stat().st_mtime_ns != before:
            encoded = {name: base64.b64encode(value).decode() for name, value in data.items()}
            await self._patch("secret", made.object_name(replica_id), {"data": encoded})

    async def _beginning(self, replica_id: str, found: Mapping[str, Any]) -> str | None:
        """Read once it has said what there is to say; a container that doesn't run yet has printed nothing."""
        if replica_id in self._told:
            return self._told[replica_id]
        if (found.get("status") or {}).get("phase") == "Pending":
            return None
        try:
            name = made.object_name(replica_id)
            text = str(
                await self._call("read_namespaced_pod_log", name, self._cluster.namespace, limit_bytes=_FIRST_OUTPUT)
                or ""
            )
        except ProviderError:
            return None
        if made.events(text):
            while len(self._told) >= _KNOWN:
                self._told.pop(next(iter(self._told)))
            self._told[replica_id] = text
        return text

    async def _region_of(self, node: str | None, recorded: str) -> str | None:
        """Whose node a pod is on: the recorded region's, where several regions are the same nodes. None before any."""
        if node is None:
            return None
        old = self._clock() - self._nodes_at > _NODES_SECONDS
        if old or recorded not in self._nodes.get(node, ()):  # another region's must be as the cluster says now
            fresh: dict[str, set[str]] = {}
            for region, own in self._regions.items():
                selector = made.node_selector(region, own)
                for item in await self._list("list_node", label_selector=selector, namespaced=False):
                    fresh.setdefault(item["metadata"]["name"], set()).add(region)
            self._nodes, self._nodes_at = fresh, self._clock()
        fits = self._nodes.get(node, set())
        return recorded if recorded in fits else min(fits, default=ELSEWHERE)

    async def _forget_old(self) -> None:
        """Delete the secrets of replicas that ended long ago."""
        selector = f"{made.OWNER}={self._installation}"
        for item in (await self._list("list_namespaced_secret", label_selector=selector))[:_PAGE]:
            annotations = item["metadata"].get("annotations") or {}
            old = self._clock() - _seconds(item["metadata"].get("creationTimestamp")) > _FORGET_SECONDS
            if annotations.get(made.STATE) == "ended" and old:
                await self._delete("secret", item["metadata"]["name"], item["metadata"]["uid"])

    async def _forget_budgets(self) -> None:
        """Delete those of endpoints that have no pod any more."""
        selector = f"{made.OWNER}={self._installation}"
        pods = await self._list("list_namespaced_pod", label_selector=selector)
        wanted = {made.budget_name(self._installation, pod["metadata"]["labels"][made.ENDPOINT]) for pod in pods}
        for item in await self._list("list_namespaced_pod_disruption_budget", label_selector=selector, policy=True):
            if item["metadata"]["name"] not in wanted:
                await self._delete(
                    "pod_disruption_budget", item["metadata"]["name"], item["metadata"]["uid"], policy=True
                )

    # ---- the cluster's API

    async def _read(self, kind: str, name: str) -> dict[str, Any] | None:
        return await self._object(f"read_namespaced_{kind}", name, self._cluster.namespace, missing=(404,))

    async def _create(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """None where it is there already."""
        return await self._object(f"create_namespaced_{kind}", self._cluster.namespace, body, missing=(409,))

    async def _patch(self, kind: str, name: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        return await self._object(
            f"patch_namespaced_{kind}", name, self._cluster.namespace, body, missing=(404,), _content_type=_MERGE
        )

    async def _apply(self, body: Mapping[str, Any]) -> None:
        await self._call(
            "patch_namespaced_pod_disruption_budget", body["metadata"]["name"], self._cluster.namespace, body,
            field_manager="ingle", force=True, _content_type=_APPLY, policy=True,
        )  # fmt: skip

    async def _delete(self, kind: str, name: str, uid: str, *, policy: bool = False) -> None:
        body = {"preconditions": {"uid": uid}}
        verb = f"delete_namespaced_{kind}"
        await self._object(verb, name, self._cluster.namespace, body=body, missing=(404, 409), policy=policy)

    async def _list(
        self, verb: str, *, label_selector: str, namespaced: bool = True, policy: bool = False
    ) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        token = None
        place = [self._cluster.namespace] if namespaced else []
        for _ in range(_MOST_PAGES):
            more: dict[str, Any] = {"_continue": token} if token else {}
            page = await self._object(verb, *place, label_selector=label_selector, limit=_PAGE, policy=policy, **more)
            found += (page or {}).get("items") or []
            token = ((page or {}).get("metadata") or {}).get("continue")
            if not token:
                break
        return found

    async def _object(
        self, verb: str, *arguments: Any, missing: Sequence[int] = (), **options: Any
    ) -> dict[str, Any] | None:
        try:
            answer = await self._call(verb, *arguments, **options)
        except _Answered as error:
            if error.answer in missing:
                return None
            raise
        client = await self._open()
        found: dict[str, Any] = client.sanitize_for_serialization(answer)
        return found

    async def _call(self, verb: str, *arguments: Any, policy: bool = False, **options: Any) -> Any:
        from kubernetes_asyncio import client as api
        from kubernetes_asyncio.client.exceptions import ApiException

        client = await self._open()
        door = api.PolicyV1Api(client) if policy else api.CoreV1Api(client)
        async with _translated():
            try:
                return await getattr(door, verb)(*arguments, **options, _request_timeout=_SECONDS)
            except ApiException as error:
                raise _answered(verb, error.status, str(error.body or "")) from error

    async def _open(self) -> ApiClient:
        from kubernetes_asyncio import client as api
        from kubernetes_asyncio import config
        from kubernetes_asyncio.config.config_exception import ConfigException

        if self._client is None:
            configuration = api.Configuration()
            # a server of another version may leave out, or add, what this client's models insist on
            configuration.client_side_validation = False
            try:
                if self._cluster.kubeconfig is None:
                    config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
                else:
                    await config.load_kube_config(
                        config_file=str(self._cluster.kubeconfig),
                        context=self._cluster.context,
                        client_configuration=configuration,
                        persist_config=False,
                    )
            except (ConfigException, OSError) as error:
                raise ProviderError(f"the cluster isn't known: {error}", code="unreachable") from None
            self._client = api.ApiClient(configuration)
        return self._client


class _Answered(ProviderError):
    """The API answered with an error; whether that is one is for the caller to say."""

    answer = 0


class _Refused(ProviderRefused, _Answered):
    """The same, and it is known that nothing was created."""


def _answered(verb: str, status: int, body: str) -> _Answered:
    message = _message(body)
    creates = verb.startswith("create")
    error: _Answered
    if creates and status == 403 and "exceeded quota" in message:
        error = _Refused(message, code="quota_exceeded")
    elif creates and status in (401, 403):
        error = _Refused(f"the cluster doesn't allow it: {message}", code="not_allowed", permanent=True)
    elif creates and status == 422:
        error = _Refused(f"the cluster doesn't accept it: {message}", code="invalid_spec", permanent=True)
    else:
        error = _Answered(f"{verb} was answered with {status}: {message}", code="cluster_error")
    error.answer = status
    return error


def _message(body: str) -> str:
    import json

    try:
        found = json.loads(body)
    except ValueError:
        return ""
    return "".join(char for char in str(found.get("message", "")) if char.isprintable())[:500]


@asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ProviderError(f"the cluster doesn't answer ({type(error).__name__})", code="unreachable") from error


def _allocatable(node: Mapping[str, Any], resource: str, selector: Mapping[str, str]) -> int:
    labels = node["metadata"].get("labels") or {}
    if any(labels.get(key) != value for key, value in selector.items()):
        return 0
    return int(((node.get("status") or {}).get("allocatable") or {}).get(resource, 0))


def _seconds(stamp: str | None) -> float:
    from datetime import datetime

    return datetime.fromisoformat(stamp).timestamp() if stamp else 0.0


def _nanoseconds(stamp: str) -> int:
    """`2026-12-01T01:02:03.123456789Z`, to the last digit: a line is told once. 0 for what is no such stamp."""
    whole, _, rest = stamp.rstrip("Z").partition(".")
    try:
        return int(_seconds(f"{whole}+00:00")) * 10**9 + int((rest or "0").ljust(9, "0")[:9])
    except ValueError:
        return 0
