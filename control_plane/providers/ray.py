"""The Ray provider: a replica is a detached named actor of a Ray cluster, on a node that is labelled as its region."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from control_plane.domain import ELSEWHERE, Address, Description, Offer, Phase, ReplicaSpec
from control_plane.errors import ProviderRefused
from control_plane.providers.base import stage_flags
from control_plane.providers.draining import ask_to_drain
from control_plane.providers.last_logs import LastLogs
from control_plane.providers.local import Tokens
from control_plane.providers.ray_link import RayLink
from control_plane.providers.ray_marks import PYTHON
from control_plane.security.files import private_folder
from control_plane.security.mesh import PLAIN, Mesh, server_name

_TYPE = "accelerator_type:"
_TYPE_SHARE = 0.001
"""Ray's own convention: of a node's one unit of an accelerator type, enough for a thousand actors."""
_MOST_HOSTS = 16
_ANSWER_MARGIN = 4.0
"""Seconds that a supervisor has, beyond a replica's grace, before it counts as hung."""


@dataclass(frozen=True, slots=True)
class Spot:
    """What a region is in a cluster: nodes with `label` = `value`. A replica takes `cpus` of its node's.

    One that waits in the cluster's queue for more than `queue_seconds` is given up as without capacity. With
    `keeps_logs` what replicas logged last comes to the control plane when they end; their nodes have it anyway.
    """

    label: str
    value: str
    cpus: float
    queue_seconds: float
    keeps_logs: bool = True

    @property
    def selector(self) -> dict[str, str]:
        return {self.label: self.value}


@dataclass(frozen=True, slots=True)
class Node:
    labels: Mapping[str, str]
    resources: Mapping[str, float]


class RayProvider:
    """Implements `Provider` with actors of one cluster; `spots` are its regions by name.

    `home` is the control plane's, for certificates and last logs, `node_home` one of each node, `terminate_grace` is in
    seconds, and `log_bytes` bounds each of a replica's two log files. `variables` are set for replicas of a region, by
    region.
    """

    def __init__(
        self,
        link: RayLink,
        secret: Tokens,
        *,
        home: Path,
        node_home: str | None,
        spots: Mapping[str, Spot],
        command: Sequence[str],
        terminate_grace: float,
        log_bytes: int,
        mesh: Mesh | None = None,
        variables: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self._cluster = link
        self._secret = secret
        self._pairs = private_folder(home / "ray")
        self._last_logs = LastLogs(home / "ray" / "logs")
        self._node_home = node_home
        self._spots = dict(spots)
        self._command = [PYTHON if word == sys.executable else word for word in command]
        self._grace = terminate_grace
        self._log_bytes = log_bytes
        self._mesh = mesh
        self._variables = dict(variables or {})
        self._link = mesh.link if mesh else PLAIN
        self._sent: dict[str, tuple[str, str]] = {}

    async def offers(self) -> Sequence[Offer]:
        nodes = await self._nodes()
        return [offer for region, spot in self._spots.items() for offer in offers_of(region, spot, nodes)]

    async def ensure(self, spec: ReplicaSpec) -> None:
        spot = self._spots.get(spec.region)
        if spot is None:
            raise ProviderRefused(f"the cluster has no region {spec.region}", code="unknown_region", permanent=True)
        if await self._cluster.call("known", replica_id=spec.replica_id):
            return
        wanted = resources_of(spec, spot)
        nodes = await self._nodes()
        hosts = hosts_of(spot, wanted, nodes)
        if hosts is None:
            raise ProviderRefused(lack_of(spec.region, spot, wanted, nodes), code="no_capacity")
        if hosts > 1 and self._command[-1] != "serve":
            message = f"it takes {hosts} hosts, and replica_command isn't the engine's `serve`, which can use them"
            raise ProviderRefused(message, code="no_capacity")
        order = await asyncio.to_thread(self._order, spec, hosts)
        await self._cluster.call(
            "ensure",
            replica_id=spec.replica_id,
            order=order,
            resources=share_of(wanted, hosts),
            hosts=hosts,
            selector=spot.selector,
            queue_seconds=spot.queue_seconds,
        )

    async def describe(self, replica_id: str) -> Description:
        said = await self._cluster.call("describe", replica_id=replica_id)
        found = _description(said, self._spots)
        if found.phase is Phase.RUNNING and self._mesh is not None:
            await self._renew(replica_id)
        return found

    async def list_owned(self) -> Sequence[str]:
        return [str(name) for name in await self._cluster.call("list_owned")]

    async def drain(self, replica_id: str) -> None:
        found = await self.describe(replica_id)
        if found.phase is Phase.RUNNING and found.address is not None:
            await ask_to_drain(self._link, replica_id, found.address, self._secret.replica_token(replica_id))

    async def terminate(self, replica_id: str) -> None:
        last = await self._cluster.call("terminate", replica_id=replica_id, patience=self._grace + _ANSWER_MARGIN)
        if last is not None and keeps_logs(last["labels"], self._spots.values()):
            lines, position = last["lines"], last["position"]
            await asyncio.to_thread(self._last_logs.keep, replica_id, lines, position)
        self._sent.pop(replica_id, None)
        path = self._pair_file(replica_id)
        if self._mesh is not None:
            self._mesh.forget(path)
        await asyncio.to_thread(path.unlink, missing_ok=True)

    async def logs(self, replica_id: str, lines: int, after: int | None = None) -> tuple[list[str], int]:
        """What the replica logged and the position to go on `after`, as of a local one."""
        found = await self._cluster.call("logs", replica_id=replica_id, lines=lines, after=after)
        if found is None:
            return await asyncio.to_thread(self._last_logs.read, replica_id, lines, after)
        said, position = found
        return [str(line) for line in said], int(position)

    async def close(self) -> None:
        """Let go of the cluster. Replicas stay."""
        await self._cluster.close()

    async def _nodes(self) -> list[Node]:
        return [Node(found["labels"], found["resources"]) for found in await self._cluster.call("nodes")]

    def _order(self, spec: ReplicaSpec, hosts: int) -> str:
        """What the replica's supervisor is told. It learns this replica's token, and nothing of any other."""
        device = "cpu" if spec.gpu in (None, "cpu") else "cuda"
        flags = ("--device", device, *stage_flags(spec))
        local = replace(spec, gpu=None, gpus=0, engine_args=(*flags, *spec.engine_args))
        pair, authority = self._equipment(spec.replica_id)
        order = {
            "spec": asdict(local),
            "command": self._command,
            "hosts": hosts,
            "stages_each": max(1, spec.gpus) // hosts,
            "stage_command": [*self._command[:-1], "stage"],
            "token": self._secret.replica_token(spec.replica_id),
            "grace": self._grace,
            "log_bytes": self._log_bytes,
            "home": self._node_home,
            "namespace": self._cluster.namespace,
            "pair": pair,
            "authority": authority,
            "variables": dict(self._variables.get(spec.region, {})),
        }
        return json.dumps(order)

    def _equipment(self, replica_id: str) -> tuple[str, str]:
        """The replica's certificate with its key, and the authorities it is to trust; nothing without TLS."""
        if self._mesh is None:
            return "", ""
        path = self._pair_file(replica_id)
        # Callers ask for it by the replica's name: which node it comes to isn't known yet.
        self._mesh.equip(replica_id, server_name(replica_id), path)
        return path.read_text(), self._mesh.ca_file.read_text()

    async def _renew(self, replica_id: str) -> None:
        pair, authority = await asyncio.to_thread(self._equipment, replica_id)
        if self._sent.get(replica_id) != (pair, authority):
            await self._cluster.call("equip", replica_id=replica_id, pair=pair, authority=authority)
            self._sent[replica_id] = (pair, authority)

    def _pair_file(self, replica_id: str) -> Path:
        return self._pairs / f"{replica_id}.pem"


def resources_of(spec: ReplicaSpec, spot: Spot) -> dict[str, float]:
    """What a replica takes of its node, in Ray's words. `gpu` is a type, or "cuda" for any."""
    resources = {"CPU": spot.cpus}
    if spec.gpu not in (None, "cpu"):
        resources["GPU"] = float(max(1, spec.gpus))
        if spec.gpu != "cuda":
            resources[f"{_TYPE}{spec.gpu}"] = _TYPE_SHARE
    return resources


def share_of(wanted: Mapping[str, float], hosts: int) -> dict[str, float]:
    """What each host gives: of the accelerators its part, of all else as much as the only one would."""
    return {name: amount / hosts if name == "GPU" else amount for name, amount in wanted.items()}


def offers_of(region: str, spot: Spot, nodes: Iterable[Node]) -> list[Offer]:
    """What the region's nodes could start if they were idle: a replica may have accelerators of several, alike."""
    most: dict[str, int] = {}
    each: dict[str, list[int]] = {}
    for node in _in(spot, nodes):
        if node.resources.get("CPU", 0) >= spot.cpus:
            most["cpu"] = 1
            gpus = int(node.resources.get("GPU", 0))
            kinds = [name.removeprefix(_TYPE) for name in node.resources if name.startswith(_TYPE)]
            for kind in ("cuda", *kinds) if gpus else ():
                each.setdefault(kind, []).append(gpus)
    for kind, counts in each.items():
        most[kind] = max(gpus * (place + 1) for place, gpus in enumerate(sorted(counts, reverse=True)[:_MOST_HOSTS]))
    return [Offer(region, kind, count, 0.0) for kind, count in sorted(most.items())]


def hosts_of(spot: Spot, wanted: Mapping[str, float], nodes: Iterable[Node]) -> int | None:
    """The fewest nodes of the region that could start it, each with as many accelerators; None where none could."""
    own = list(_in(spot, nodes))
    for hosts in range(1, min(len(own), _MOST_HOSTS) + 1):
        share = share_of(wanted, hosts)
        alike = share.get("GPU", 0.0) % 1 == 0 and (hosts == 1 or "GPU" in share)
        able = [node for node in own if all(node.resources.get(name, 0) >= share[name] for name in share)]
        if alike and len(able) >= hosts:
            return hosts
    return None


def lack_of(region: str, spot: Spot, wanted: Mapping[str, float], nodes: Iterable[Node]) -> str:
    """What it is that keeps all nodes of the region from ever starting it."""
    if not list(_in(spot, nodes)):
        return f"no node of the cluster is labelled {spot.label}={spot.value}, as region {region} asks"
    amounts = ", ".join(
        name.removeprefix(_TYPE) if name.startswith(_TYPE) else f"{amount:g} {name}" for name, amount in wanted.items()
    )
    several = ", nor have several together" if wanted.get("GPU", 0) > 1 else ""
    return f"no node of region {region} has {amounts}{several}"


def region_of(labels: Mapping[str, str], spots: Mapping[str, Spot], recorded: str | None) -> str:
    """Whose node has these labels: the recorded region's, where several regions are the same nodes."""
    fits = [region for region, spot in spots.items() if labels.get(spot.label) == spot.value]
    return recorded if recorded in fits else next(iter(fits), ELSEWHERE)


def regions_of(
    labels: Mapping[str, str], beside: Iterable[Mapping[str, str]], spots: Mapping[str, Spot], recorded: str | None
) -> str:
    """Where a replica is whose further hosts have the labels `beside`: the recorded region only if all of it is."""
    found = [region_of(one, spots, recorded) for one in (labels, *beside)]
    return next((region for region in found if region != recorded), found[0])


def keeps_logs(labels: Mapping[str, str] | None, spots: Iterable[Spot]) -> bool:
    """Whether what was logged on a node with these labels may come here: each region that it is in must say so."""
    fits = [spot for spot in spots if labels is not None and labels.get(spot.label) == spot.value]
    return bool(fits) and all(spot.keeps_logs for spot in fits)


def _description(said: Mapping[str, Any], spots: Mapping[str, Spot]) -> Description:
    """A supervisor's word, as it came over the wire; where it runs is its node's to say."""
    address, labels = said.get("address"), said.get("labels")
    return Description(
        Phase(said["phase"]),
        address=Address(str(address["host"]), int(address["port"])) if address else None,
        startup_ms=said.get("startup_ms"),
        phases=said.get("phases") or {},
        code=said.get("code"),
        message=said.get("message") or "",
        region=None if labels is None else regions_of(labels, said.get("beside") or [], spots, said.get("region")),
        began_at=said.get("began_at"),
    )


def _in(spot: Spot, nodes: Iterable[Node]) -> Iterable[Node]:
    return (node for node in nodes if node.labels.get(spot.label) == spot.value)
