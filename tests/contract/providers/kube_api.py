"""A Kubernetes API over real HTTP, as far as the provider needs one, and a kubelet that runs pods as processes.

It keeps what a real server keeps: names are taken once, writes with an old resourceVersion conflict, deletes may be
bound to a uid and take their grace, apply makes or changes, lists come in pages by label, a watch tells what happens
after a version, manifests are held against the published schemas. Pods get a loopback address each, so that their fixed
port is free.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import itertools
import json
import os
import secrets
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from aiohttp import web

VERSION = "1.33"
_KINDS = {"pods": "Pod", "secrets": "Secret", "poddisruptionbudgets": "PodDisruptionBudget", "nodes": "Node"}
Object = dict[str, Any]
_addresses = itertools.count(2)


@dataclass
class Cluster:
    """`faults` are answered by the next calls to a verb and kind, such as `POST pods`: a status and a message each."""

    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    changes: list[tuple[str, Object]] = field(default_factory=list)
    faults: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    """Verbs and kinds whose next answer is lost after it took effect."""
    version: int = 0
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ingle-kubelet-")))
    command: tuple[str, ...] = ()
    """What runs in the place of the image's command."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16))

    def node(self, name: str, labels: Mapping[str, str], gpus: int = 0) -> None:
        allocatable = {"cpu": "8", "memory": "32Gi"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
        self.put("nodes", {"metadata": {"name": name, "labels": dict(labels)}, "status": {"allocatable": allocatable}})

    def put(self, kind: str, item: Object) -> Object:
        new = (kind, item["metadata"]["name"]) not in self.objects
        self.version += 1
        meta = item["metadata"]
        meta["resourceVersion"] = str(self.version)
        meta.setdefault("uid", secrets.token_hex(16))
        meta.setdefault("creationTimestamp", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
        item.setdefault("apiVersion", "policy/v1" if kind == "poddisruptionbudgets" else "v1")
        item.setdefault("kind", _KINDS[kind])
        self.objects[kind, meta["name"]] = item
        self.changes.append(("ADDED" if new else "MODIFIED", copy.deepcopy(item)))
        return item

    def remove(self, kind: str, name: str) -> None:
        item = self.objects.pop((kind, name), None)
        if item is not None:
            self.version += 1
            item["metadata"]["resourceVersion"] = str(self.version)
            self.changes.append(("DELETED", item))

    # ---- the API

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        for base, kinds in (("/api/v1", ("pods", "secrets")), ("/apis/policy/v1", ("poddisruptionbudgets",))):
            for kind in kinds:
                path = f"{base}/namespaces/{{namespace}}/{kind}"
                app.router.add_get(path, self._list)
                app.router.add_post(path, self._create)
                app.router.add_get(f"{path}/{{name}}", self._get)
                app.router.add_patch(f"{path}/{{name}}", self._patch)
                app.router.add_delete(f"{path}/{{name}}", self._delete)
        app.router.add_get("/api/v1/nodes", self._list)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods/{name}/log", self._log)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        what = f"{request.method} {_kind(request)}"
        if self.faults.get(what):
            return _status(*self.faults[what].pop(0))
        answer: web.StreamResponse = await handler(request)
        if what in self.dropped:
            self.dropped.discard(what)
            assert request.transport is not None
            request.transport.abort()
        return answer

    async def _create(self, request: web.Request) -> web.Response:
        kind, item = _kind(request), await request.json()
        try:
            kubernetes_validate.validate(item, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            return _status(422, f"{item['kind']} is invalid: {error.message}")
        if (kind, item["metadata"]["name"]) in self.objects:
            return _status(409, f'{kind} "{item["metadata"]["name"]}" already exists')
        made = self.put(kind, item)
        if kind == "pods":
            made["status"] = {"phase": "Pending"}
            self._spawn(self._run(made["metadata"]["name"]))
        return web.json_response(made, status=201)

    async def _get(self, request: web.Request) -> web.Response:
        found = self.objects.get((_kind(request), request.match_info["name"]))
        return web.json_response(found) if found else _status(404, "not found")

    async def _list(self, request: web.Request) -> web.StreamResponse:
        kind, query = _kind(request), request.query
        if query.get("watch", "").lower() == "true":
            return await self._watch(request, kind, int(query.get("resourceVersion", "0")))
        wanted = dict(part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part)
        items = [item for (of, _), item in sorted(self.objects.items()) if of == kind and _labelled(item, wanted)]
        start, limit = int(query.get("continue", "0")), int(query.get("limit", "1000"))
        rest = {"continue": str(start + limit)} if start + limit < len(items) else {}
        page = items[start : start + limit]
        return web.json_response(
            {"kind": "List", "metadata": {"resourceVersion": str(self.version), **rest}, "items": page}
        )

    async def _watch(self, request: web.Request, kind: str, after: int) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        told = 0
        while True:
            for verb, item in self.changes[told:]:
                if item["kind"] == _KINDS[kind] and int(item["metadata"]["resourceVersion"]) > after:
                    await response.write(json.dumps({"type": verb, "object": item}).encode() + b"\n")
            told = len(self.changes)
            await asyncio.sleep(0.02)

    async def _patch(self, request: web.Request) -> web.Response:
        kind, name = _kind(request), request.match_info["name"]
        apply = request.content_type == "application/apply-patch+yaml"
        change = yaml.safe_load(await request.text()) if apply else await request.json()
        found = self.objects.get((kind, name))
        if found is None:
            if not apply:
                return _status(404, "not found")
            kubernetes_validate.validate(change, VERSION, strict=True)
            return web.json_response(self.put(kind, change), status=201)
        asked = (change.get("metadata") or {}).get("resourceVersion")
        if asked is not None and asked != found["metadata"]["resourceVersion"]:
            return _status(409, "the object has been modified; please apply your changes to the latest version")
        return web.json_response(self.put(kind, _merged(found, change)))

    async def _delete(self, request: web.Request) -> web.Response:
        kind, name = _kind(request), request.match_info["name"]
        found = self.objects.get((kind, name))
        if found is None:
            return _status(404, "not found")
        body = json.loads(await request.text() or "{}")
        uid = (body.get("preconditions") or {}).get("uid")
        if uid is not None and uid != found["metadata"]["uid"]:
            return _status(409, "the UID in the precondition does not match")
        if kind != "pods":
            self.remove(kind, name)
        elif not found["metadata"].get("deletionTimestamp"):
            found["metadata"]["deletionTimestamp"] = datetime.now(UTC).isoformat()
            self.put(kind, found)
            self._spawn(self._end(name, float(found["spec"]["terminationGracePeriodSeconds"])))
        return web.json_response(found)

    async def _log(self, request: web.Request) -> web.Response:
        name, query = request.match_info["name"], request.query
        path = self.folder / f"{name}.log"
        if ("pods", name) not in self.objects or not path.exists():
            return _status(400, "the container is not running")
        lines = path.read_bytes()[: int(query.get("limitBytes", str(1 << 20)))].decode().splitlines()
        if query.get("timestamps", "").lower() == "true":
            began = datetime.fromtimestamp(path.stat().st_ctime, UTC)
            lines = [f"{began:%Y-%m-%dT%H:%M:%S}.{number:09}Z {line}" for number, line in enumerate(lines)]
        lines = lines[-int(query.get("tailLines", "1000000")) :]
        return web.Response(text="\n".join(lines))

    # ---- the kubelet

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _run(self, name: str) -> None:
        pod = self.objects["pods", name]
        wanted = pod["spec"].get("nodeSelector") or {}
        gpus = int(pod["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", "0"))
        while ("pods", name) in self.objects and not pod["metadata"].get("deletionTimestamp"):
            nodes = [item for (kind, _), item in self.objects.items() if kind == "nodes" and _labelled(item, wanted)]
            roomy = [node for node in nodes if int(node["status"]["allocatable"].get("nvidia.com/gpu", "0")) >= gpus]
            if roomy:
                pod["spec"]["nodeName"] = roomy[0]["metadata"]["name"]
                break
            message = f"0/{len(nodes)} nodes are available"
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            if pod["status"].get("conditions") != [condition]:
                pod["status"]["conditions"] = [condition]
                self.put("pods", pod)
            await asyncio.sleep(0.05)
        else:
            return
        number = next(_addresses)
        address = f"127.{80 + os.getpid() % 80}.{number // 250}.{number % 250 + 1}"
        process = self.processes[name] = await self._start(name, pod["spec"], address)
        pod["status"] = {"phase": "Running", "podIP": address, "containerStatuses": [_container({"running": {}})]}
        pod["status"]["startTime"] = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        self.put("pods", pod)
        port = pod["spec"]["containers"][0]["readinessProbe"]["tcpSocket"]["port"]
        while process.returncode is None:
            if "conditions" not in pod["status"] and await _listens(address, port):
                pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
                self.put("pods", pod)
            await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=0.05)
        code = process.returncode
        _kill(process.pid)
        pod["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
        ended = {"exitCode": code if code >= 0 else 128 - code}
        pod["status"] |= {"conditions": [], "containerStatuses": [_container({"terminated": ended})]}
        if ("pods", name) in self.objects:
            self.put("pods", pod)

    async def _start(self, name: str, spec: Object, address: str) -> asyncio.subprocess.Process:
        container = spec["containers"][0]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        places = {}
        for volume in spec["volumes"]:
            place = self.folder / name / volume["name"]
            place.mkdir(parents=True)
            if volume["name"] != "scratch":  # /tmp is everybody's here
                places[mounts[volume["name"]]] = str(place)
            if "secret" in volume:
                for key, value in self.objects["secrets", volume["secret"]["secretName"]]["data"].items():
                    (place / key).write_bytes(base64.b64decode(value))
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder)}
        for entry in container["env"]:
            source = entry.get("valueFrom", {})
            if "fieldRef" in source:
                environment[entry["name"]] = address
            elif "secretKeyRef" in source:
                held = self.objects["secrets", source["secretKeyRef"]["name"]]["data"]
                environment[entry["name"]] = base64.b64decode(held[source["secretKeyRef"]["key"]]).decode()
            else:
                environment[entry["name"]] = entry["value"]
        arguments = [argument.replace("$(POD_IP)", address).replace("$$(", "$(") for argument in container["args"]]
        arguments = [_outside(argument, places) for argument in arguments]
        with (self.folder / f"{name}.log").open("wb") as log:
            return await asyncio.create_subprocess_exec(
                *self.command, *arguments, env=environment, stdin=asyncio.subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    async def _end(self, name: str, grace: float) -> None:
        process = self.processes.get(name)
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=grace)
            _kill(process.pid)
            await process.wait()
        self.remove("pods", name)

    async def stop(self) -> None:
        for process in self.processes.values():
            _kill(process.pid)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(
            *self.tasks, *(process.wait() for process in self.processes.values()), return_exceptions=True
        )


def _container(state: Object) -> Object:
    return {"name": "replica", "image": "i", "imageID": "i", "ready": False, "restartCount": 0, "state": state}


def _kind(request: web.Request) -> str:
    parts = request.path.strip("/").split("/")
    return next(part for part in parts if part in _KINDS)


def _labelled(item: Object, wanted: Mapping[str, str]) -> bool:
    labels = item["metadata"].get("labels") or {}
    return all(labels.get(key) == value for key, value in wanted.items())


def _merged(before: Object, change: Object) -> Object:
    """RFC 7386."""
    after = dict(before)
    for name, value in change.items():
        if value is None:
            after.pop(name, None)
        elif isinstance(value, dict) and isinstance(after.get(name), dict):
            after[name] = _merged(after[name], value)
        else:
            after[name] = value
    return after


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "code": code, "message": message}, status=code)


def _outside(argument: str, places: Mapping[str, str]) -> str:
    """A path in the container as this machine has it."""
    for inside, outside in places.items():
        if argument.startswith(f"{inside}/"):
            return outside + argument.removeprefix(inside)
    return argument


async def _listens(address: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(address, port)
    except OSError:
        return False
    writer.close()
    return True


def _kill(leader: int) -> None:
    """The container's whole process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
