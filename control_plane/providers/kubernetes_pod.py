"""What of a replica stands in a Kubernetes cluster: a pod, its secret, and a budget for its endpoint. Pure.

The secret comes first and stays until it is old: it says whether its replica may still be started. A pod is named as
its replica is, so that one is started once however often it is asked for.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from control_plane.domain import Address, Description, Phase, ReplicaSpec, Rung
from control_plane.provider_settings import KubernetesSettings
from control_plane.providers.base import stage_flags

OWNER = "ingle.dev/installation"
REPLICA = "ingle.dev/replica"
ENDPOINT = "ingle.dev/endpoint"
REGION = "ingle.dev/region"
STATE = "ingle.dev/state"
"""Of a secret: `starting` before its pod, `ended` once nobody may start one."""
SECRETS_AT = "/var/run/ingle"
CACHE_AT = "/var/cache/ingle"
_PRE_STOP_SECONDS = 3
_BROKEN_IMAGES = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
_BROKEN_CONTAINERS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


def object_name(replica_id: str) -> str:
    """A DNS label."""
    return replica_id.replace("_", "-").lower()


def labels(installation: str, spec: ReplicaSpec) -> dict[str, str]:
    return {
        "app.kubernetes.io/managed-by": "ingle",
        OWNER: installation,
        REPLICA: spec.replica_id,
        ENDPOINT: spec.endpoint_name,
        REGION: spec.region,
    }


def secret(installation: str, spec: ReplicaSpec, data: Mapping[str, bytes]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": object_name(spec.replica_id),
            "labels": labels(installation, spec),
            "annotations": {STATE: "starting"},
        },
        "type": "Opaque",
        "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
    }


def tombstone(installation: str, replica_id: str) -> dict[str, Any]:
    """For one that is ended before it began."""
    nothing = ReplicaSpec(replica_id, "none", "none", "")
    made = secret(installation, nothing, {})
    made["metadata"]["annotations"][STATE] = "ended"
    return made


def budget_name(installation: str, endpoint: str) -> str:
    return f"{installation}-{endpoint}"


def budget(installation: str, endpoint: str) -> dict[str, Any]:
    """One replica of an endpoint outlives whatever is moved on purpose; one that is broken holds nobody up."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": budget_name(installation, endpoint),
            "labels": {"app.kubernetes.io/managed-by": "ingle", OWNER: installation},
        },
        "spec": {
            "minAvailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": {OWNER: installation, ENDPOINT: endpoint}},
        },
    }


def pod(
    installation: str,
    spec: ReplicaSpec,
    region: str,
    own: KubernetesSettings,
    *,
    tls: bool,
    grace: float,
    variables: Mapping[str, str],
) -> dict[str, Any]:
    """Its container is the engine as it would run anywhere; what it may not do, it doesn't need."""
    name = object_name(spec.replica_id)
    kind = own.accelerators[spec.gpu] if spec.gpu is not None and spec.gpu != "cpu" else None
    resources = {"cpu": own.cpu, "memory": own.memory}
    limits = {"memory": own.memory} | ({kind.resource: str(max(1, spec.gpus))} if kind else {})
    cache = {"persistentVolumeClaim": {"claimName": own.cache_claim}} if own.cache_claim else {"emptyDir": {}}
    probe = {"tcpSocket": {"port": own.port}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels(installation, spec)},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": round(grace) + _PRE_STOP_SECONDS,
            "nodeSelector": _nodes(region, own) | (kind.node_selector if kind else {}),
            "tolerations": [{"key": kind.resource, "operator": "Exists", "effect": "NoSchedule"}] if kind else [],
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": own.user,
                "fsGroup": own.user,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "replica",
                    "image": own.image,
                    "command": [own.command[0]],
                    "args": [*own.command[1:], *_arguments(spec, own, tls=tls)],
                    "env": [
                        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                        {"name": "INGLE_REPLICA_TOKEN", "valueFrom": {"secretKeyRef": {"name": name, "key": "token"}}},
                        {"name": "INGLE_REGION", "value": spec.region},
                        {"name": "INGLE_ENDPOINT", "value": spec.endpoint_name},
                        {"name": "INGLE_REPLICA", "value": spec.replica_id},
                        {"name": "INGLE_CACHE", "value": CACHE_AT},
                        *({"name": name, "value": value} for name, value in sorted(variables.items())),
                    ],
                    "ports": [{"name": "replica", "containerPort": own.port}],
                    "resources": {"requests": resources | limits, "limits": limits},
                    "startupProbe": {**probe, "periodSeconds": 1, "failureThreshold": 900},
                    "readinessProbe": {**probe, "periodSeconds": 2},
                    # whether its steps make progress is the controller's to judge; this is for a listener that is gone
                    "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
                    # gateways see that it ends before it does; SIGTERM then lets it finish what it has
                    "lifecycle": {"preStop": {"sleep": {"seconds": _PRE_STOP_SECONDS}}},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": [
                        {"name": "secrets", "mountPath": SECRETS_AT, "readOnly": True},
                        {"name": "cache", "mountPath": CACHE_AT},
                        {"name": "scratch", "mountPath": "/tmp"},  # noqa: S108 - the container's own
                    ],
                }
            ],
            "volumes": [
                {"name": "secrets", "secret": {"secretName": name, "defaultMode": 0o440}},
                {"name": "cache", **cache},
                {"name": "scratch", "emptyDir": {}},
            ],
        },
    }


def node_selector(region: str, own: KubernetesSettings) -> str:
    """As the API takes it."""
    return ",".join(f"{key}={value}" for key, value in _nodes(region, own).items())


def describe(
    found: Mapping[str, Any], log: str | None, own: KubernetesSettings, now: float, created: float
) -> Description:
    """What a pod says of its replica, but for where it is.

    `log` is the beginning of what its container printed, if that was asked for.
    """
    status = found.get("status") or {}
    containers = status.get("containerStatuses") or [{}]
    state = containers[0].get("state") or {}
    said = events(log or "")
    if status.get("phase") in ("Failed", "Succeeded"):
        return _ended(state.get("terminated") or {}, status, said)
    waiting = (state.get("waiting") or {}).get("reason", "")
    if waiting in _BROKEN_IMAGES | _BROKEN_CONTAINERS:
        code = "image_unavailable" if waiting in _BROKEN_IMAGES else "container_not_created"
        return Description(
            Phase.FAILED, code=code, message=f"{waiting}: {(state['waiting'].get('message') or '')[:500]}"
        )
    if said.get("failed"):
        return _failed(said["failed"])
    ready = any(item["type"] == "Ready" and item["status"] == "True" for item in status.get("conditions") or ())
    if status.get("phase") == "Running" and ready and status.get("podIP"):
        line = said.get("ready", {})
        phases = line.get("phases")
        return Description(
            Phase.RUNNING,
            Address(status["podIP"], own.port),
            startup_ms=float(line.get("startup_ms") or 0.0),
            phases={str(key): float(value) for key, value in phases.items()} if isinstance(phases, dict) else {},
        )
    unscheduled = next(
        (
            item
            for item in status.get("conditions") or ()
            if item["type"] == "PodScheduled" and item["status"] == "False"
        ),
        None,
    )
    if unscheduled is not None and now - created > own.queue_seconds:
        return Description(
            Phase.FAILED, code="no_capacity", message=(unscheduled.get("message") or "no node has room")[:500]
        )
    return Description(
        Phase.STARTING, code="no_capacity" if unscheduled else None, message=(unscheduled or {}).get("message") or ""
    )


def events(log: str) -> dict[str, dict[str, Any]]:
    """The lines by which a replica says that it is ready, or that it failed."""
    found: dict[str, dict[str, Any]] = {}
    for line in log.splitlines():
        if line.startswith("{"):
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and entry.get("event") in ("ready", "failed"):
                found.setdefault(entry["event"], entry)
    return found


def _ended(terminated: Mapping[str, Any], status: Mapping[str, Any], said: Mapping[str, dict[str, Any]]) -> Description:
    if said.get("failed"):
        return _failed(said["failed"])
    code = terminated.get("exitCode")
    if terminated.get("reason") == "OOMKilled":
        return Description(Phase.EXITED, code="out_of_memory", message="the container was over its memory limit")
    if status.get("reason"):
        return Description(
            Phase.EXITED, code="replica_exited", message=f"{status['reason']}: {status.get('message') or ''}"
        )
    how = "" if code is None else f" by signal {code - 128}" if code > 128 else f" with code {code}"
    return Description(Phase.EXITED, code="replica_exited", message=f"the replica's process ended{how}")


def _failed(entry: Mapping[str, Any]) -> Description:
    code, message = str(entry.get("code") or "start_failed")[:64], str(entry.get("message") or "failed")[:1000]
    return Description(Phase.FAILED, code=code, message="".join(char for char in message if char.isprintable()))


def _nodes(region: str, own: KubernetesSettings) -> dict[str, str]:
    return dict(own.node_selector) or {"topology.kubernetes.io/region": region}


def _arguments(spec: ReplicaSpec, own: KubernetesSettings, *, tls: bool) -> Sequence[str]:
    where = ["--host", "$(POD_IP)", "--port", str(own.port), "--name", spec.endpoint_name]
    files = ["--tls-pair", f"{SECRETS_AT}/pair.pem", "--tls-authority", f"{SECRETS_AT}/ca.pem"] if tls else []
    device = ["--device", "cpu" if spec.gpu in (None, "cpu") else "cuda"]
    rung = [] if spec.rung == Rung.HOT else ["--rung", spec.rung]
    # a dollar sign is the cluster's own way to name a variable
    own_args = [argument.replace("$(", "$$(") for argument in (spec.model, *spec.engine_args)]
    return [own_args[0], *where, *files, *device, *stage_flags(spec), *rung, *own_args[1:]]
