"""A replica in a Ray cluster: an actor that supervises the engine's processes on its node, as the local provider does.

Marks in the cluster's key-value store say how far a replica is, and outlive its actor, whose name is free again once
it died: `live/ID` from before it is asked for until it is gone, `started/ID` once a process may run, `ended/ID` for
good. Only whoever makes `started/ID` starts anything, so that an id is started at most once.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from control_plane.domain import Phase, ReplicaSpec
from control_plane.errors import ProviderError
from control_plane.providers.delivered import Delivered, OneToken
from control_plane.providers.local import LocalProvider
from control_plane.providers.processes import MARK, marked
from control_plane.providers.ray_marks import ENDED, PYTHON, STARTED, node_folder
from control_plane.providers.ray_stage import RayStage
from control_plane.security.files import private_folder, write_private

_STALE_SECONDS = 3600.0
_WATCH_SECONDS = 30.0
_STAGE_SECONDS = 2.0
Ending = Literal["ending", "gone", "unsure"]
"""`unsure` where a supervisor of a further host is lost or hangs: what it had must be looked for."""


class RayReplica:
    """The actor. `order` is JSON, as the provider makes it; `grace` in it is in seconds."""

    def __init__(self, order: str) -> None:
        asked: dict[str, Any] = json.loads(order)
        spec = ReplicaSpec(**asked["spec"] | {"engine_args": tuple(asked["spec"]["engine_args"])})
        self._id = spec.replica_id
        self._began_at = time.time()
        self._loop = asyncio.new_event_loop()
        self._fault: ProviderError | None = None
        self._mesh: Delivered | None = None
        self._local: LocalProvider | None = None
        self._stages: list[Any] = []
        """Actors of its further hosts."""
        self._told_nodes = False
        self._namespace, self._hosts = str(asked["namespace"]), int(asked["hosts"])
        try:
            if not self._claim():
                raise ProviderError("the replica was started before, or has ended", code="replica_lost")
            self._local = self._supervisor(asked, spec.region)
            watch = [sys.executable, "-m", "control_plane.providers.deadman", str(os.getpid()), self._id]
            subprocess.run(watch, check=True, timeout=_WATCH_SECONDS, stdin=subprocess.DEVNULL)
            if self._hosts > 1:
                spec = self._spread(order, asked, spec)
            self._loop.run_until_complete(self._local.ensure(spec))
        except ProviderError as error:
            self._fault = error
        except (OSError, subprocess.SubprocessError) as error:
            self._fault = ProviderError(f"its node can't supervise it: {error}", code="spawn_failed")

    def describe(self) -> dict[str, Any]:
        """`Description` as plain values. It isn't absent while this actor is there, and holds its place."""
        if self._local is None or self._fault is not None:
            fault = self._fault
            return {"phase": Phase.FAILED, "code": fault and fault.code, "message": fault.message if fault else ""}
        said = asdict(self._loop.run_until_complete(self._local.describe(self._id)))
        if said["phase"] is Phase.ABSENT:
            return said | {"phase": Phase.EXITED, "code": "replica_exited", "message": "its processes have ended"}
        trouble = self._trouble() if said["phase"] in (Phase.STARTING, Phase.RUNNING) else ""
        return said | {"phase": Phase.FAILED, "code": "stage_lost", "message": trouble} if trouble else said

    def terminate(self) -> Ending:
        """Begin or go on to end it, the stages of its further hosts last: what is in flight needs them."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        if self._local is not None:
            self._loop.run_until_complete(self._local.terminate(self._id))
        if marked(MARK, self._id):
            return "ending"
        try:
            ended = ray.get([stage.terminate.remote() for stage in self._stages], timeout=_STAGE_SECONDS)
        except (RayActorError, GetTimeoutError):
            return "unsure"
        return "gone" if all(ended) else "ending"

    def equip(self, pair: str, authority: str) -> None:
        """Take up a renewed certificate or authority; `describe` hands them to the replica."""
        if self._mesh is not None:
            self._mesh.take(pair, authority)

    def logs(self, lines: int, after: int | None) -> tuple[list[str], int]:
        return self._local.logs(self._id, lines, after) if self._local is not None else ([], 0)

    def _claim(self) -> bool:
        """Whether this actor is the one that may start it. The order matters: `terminate` marks its end, then looks."""
        from ray.experimental.internal_kv import _internal_kv_exists

        return not self._mark(None, overwrite=False) and not _internal_kv_exists(
            ENDED + self._id, namespace=self._namespace
        )

    def _mark(self, beside: list[str] | None, *, overwrite: bool) -> bool:
        """Write where it is, `beside` being its further hosts' nodes once they are known. Whether it was there."""
        import ray
        from ray.experimental.internal_kv import _internal_kv_put

        node = ray.get_runtime_context().get_node_id()
        mark = json.dumps({"at": self._began_at, "node": node, "hosts": self._hosts, "beside": beside})
        return bool(_internal_kv_put(STARTED + self._id, mark, overwrite=overwrite, namespace=self._namespace))

    def _spread(self, order: str, asked: dict[str, Any], spec: ReplicaSpec) -> ReplicaSpec:
        """Have its other hosts start their stages. Returns what the engine here is told: to wait for them."""
        import ray
        from ray.util.placement_group import get_current_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        host, group = ray.util.get_node_ip_address(), get_current_placement_group()
        with socket.create_server((host, 0)) as free:
            address = f"{host}:{free.getsockname()[1]}"
        for number in range(1, self._hosts):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            needs = {"num_cpus": group.bundle_specs[number].get("CPU", 0), "num_gpus": asked["stages_each"]}
            stage = ray.remote(RayStage).options(**needs, max_restarts=0, scheduling_strategy=place)
            self._stages.append(stage.remote(order, number, address))
        elsewhere = asked["stages_each"] * (self._hosts - 1)
        told = ("--stages-elsewhere", str(elsewhere), "--stage-listen", address)
        return replace(spec, engine_args=(*told, *spec.engine_args))

    def _trouble(self) -> str:
        """What its further hosts say is wrong; nothing where all is well, or one is only slow to answer."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        try:
            if self._stages and not self._told_nodes:
                beside = ray.get([stage.node.remote() for stage in self._stages], timeout=_STAGE_SECONDS)
                self._told_nodes = self._mark(beside, overwrite=True)
            said = ray.get([stage.trouble.remote() for stage in self._stages], timeout=_STAGE_SECONDS)
        except GetTimeoutError:
            return ""
        except RayActorError:
            return "one of its hosts is gone, or has no ingle that could run a stage"
        return next((trouble for trouble in said if trouble), "")

    def _supervisor(self, asked: dict[str, Any], region: str) -> LocalProvider:
        import ray

        home = node_folder(asked)
        folder = private_folder(home / "replicas" / self._id)
        _forget_lost(home / "replicas")
        if asked["pair"]:
            self._mesh = Delivered(folder, asked["pair"], asked["authority"])
        return LocalProvider(
            home,
            OneToken(asked["token"]),
            regions=[region],
            command=[sys.executable if word == PYTHON else word for word in asked["command"]],
            terminate_grace=asked["grace"],
            log_bytes=asked["log_bytes"],
            mesh=self._mesh,
            variables={region: asked["variables"]},
            host=ray.util.get_node_ip_address(),
        )


def _forget_lost(folders: Path) -> None:
    """Mark as ended what actors that were killed left long ago, so that their folders go in turn."""
    for folder in folders.iterdir():
        lost = time.time() - folder.stat().st_mtime > _STALE_SECONDS and not (folder / "ended").exists()
        if lost and not marked(MARK, folder.name):
            write_private(folder / "ended", b"")
