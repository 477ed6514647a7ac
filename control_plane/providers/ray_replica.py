"""A replica in a Ray cluster: an actor that supervises the engine's processes on its node, as the local provider does.

Marks in the cluster's key-value store say how far a replica is, and outlive its actor, whose name is free again once
it died: `live/ID` from before it is asked for until it is gone, `started/ID` once a process may run, `ended/ID` for
good. Only whoever makes `started/ID` starts anything, so that an id is started at most once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from control_plane.domain import Phase, ReplicaSpec
from control_plane.errors import ProviderError
from control_plane.providers.delivered import Delivered, OneToken
from control_plane.providers.local import LocalProvider
from control_plane.providers.processes import MARK, marked, send
from control_plane.security.files import private_folder, write_private

PYTHON = "{python}"
"""In a command: the node's own interpreter."""
LIVE, STARTED, ENDED = "live/", "started/", "ended/"
_STALE_SECONDS = 3600.0
_WATCH_SECONDS = 30.0
_END_SECONDS = 2.0
_LOOK_SECONDS = 0.05


class RayReplica:
    """The actor. `order` is JSON, as the provider makes it; `grace` in it is in seconds."""

    def __init__(self, order: str) -> None:
        asked: dict[str, Any] = json.loads(order)
        spec = ReplicaSpec(**asked["spec"] | {"engine_args": tuple(asked["spec"]["engine_args"])})
        self._id = spec.replica_id
        self._loop = asyncio.new_event_loop()
        self._fault: ProviderError | None = None
        self._mesh: Delivered | None = None
        self._local: LocalProvider | None = None
        try:
            if not self._claim(asked["namespace"]):
                raise ProviderError("the replica was started before, or has ended", code="replica_lost")
            self._local = self._supervisor(asked, spec.region)
            watch = [sys.executable, "-m", "control_plane.providers.deadman", str(os.getpid()), self._id]
            subprocess.run(watch, check=True, timeout=_WATCH_SECONDS, stdin=subprocess.DEVNULL)
            self._loop.run_until_complete(self._local.ensure(spec))
        except ProviderError as error:
            self._fault = error
        except (OSError, subprocess.SubprocessError) as error:
            self._fault = ProviderError(f"its node can't supervise it: {error}", code="spawn_failed")

    def describe(self) -> dict[str, Any]:
        """`Description` as plain values."""
        if self._local is None or self._fault is not None:
            fault = self._fault
            return {"phase": Phase.FAILED, "code": fault and fault.code, "message": fault.message if fault else ""}
        return asdict(self._loop.run_until_complete(self._local.describe(self._id)))

    def terminate(self) -> bool:
        """Begin or go on to end it. Returns whether nothing of it is left."""
        if self._local is not None:
            self._loop.run_until_complete(self._local.terminate(self._id))
        return not marked(MARK, self._id)

    def equip(self, pair: str, authority: str) -> None:
        """Take up a renewed certificate or authority; `describe` hands them to the replica."""
        if self._mesh is not None:
            self._mesh.take(pair, authority)

    def logs(self, lines: int, after: int | None) -> tuple[list[str], int]:
        return self._local.logs(self._id, lines, after) if self._local is not None else ([], 0)

    def _claim(self, namespace: str) -> bool:
        """Whether this actor is the one that may start it. The order matters: `terminate` marks its end, then looks."""
        import ray
        from ray.experimental.internal_kv import _internal_kv_exists, _internal_kv_put

        mark = json.dumps({"at": time.time(), "node": ray.get_runtime_context().get_node_id()})
        existed = _internal_kv_put(STARTED + self._id, mark, overwrite=False, namespace=namespace)
        return not existed and not _internal_kv_exists(ENDED + self._id, namespace=namespace)

    def _supervisor(self, asked: dict[str, Any], region: str) -> LocalProvider:
        import ray

        home = Path(asked["home"] or Path.home() / ".ingle" / "node").expanduser() / asked["namespace"]
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


def end_processes(replica_id: str) -> bool:
    """On a node whose supervisor is gone or hangs: end what it started. Returns whether nothing is left."""
    for pid in marked(MARK, replica_id):
        send(pid, signal.SIGKILL)
    deadline = time.monotonic() + _END_SECONDS
    while marked(MARK, replica_id):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _forget_lost(folders: Path) -> None:
    """Mark as ended what actors that were killed left long ago, so that their folders go in turn."""
    for folder in folders.iterdir():
        lost = time.time() - folder.stat().st_mtime > _STALE_SECONDS and not (folder / "ended").exists()
        if lost and not marked(MARK, folder.name):
            write_private(folder / "ended", b"")
