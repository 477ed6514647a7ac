"""A part of a replica that several hosts share: an actor that supervises the stages of its node.

The replica's own actor makes one for each further host; Ray ends them with it. Their processes come to its engine and
end when that connection does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from control_plane.providers.processes import MARK, environment_of, marked
from control_plane.providers.ray_marks import PYTHON, end_processes, node_folder, stage_mark
from control_plane.security.files import private_folder, write_private
from control_plane.security.mesh import server_name

_KEPT_FOLDERS = 20
_WATCH_SECONDS = 30.0
_LAST_BYTES = 4096


class RayStage:
    """The actor. `order` is the replica's, as JSON; `number` counts hosts, the replica's own being 0.

    `address` is where its engine waits.
    """

    def __init__(self, order: str, number: int, address: str) -> None:
        asked: dict[str, Any] = json.loads(order)
        replica_id = asked["spec"]["replica_id"]
        self._name = stage_mark(replica_id, number)
        self._log_bytes = int(asked["log_bytes"])
        self._processes: list[subprocess.Popen[bytes]] = []
        self._fault = ""
        folders = private_folder(node_folder(asked) / "stages")
        _forget_old(folders)
        self._log = private_folder(folders / self._name) / "stderr.log"
        try:
            self._start(asked, replica_id, address)
        except (OSError, subprocess.SubprocessError) as error:
            self._fault = f"its stages can't be started: {error}"

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def trouble(self) -> str:
        """Why the replica can't have what it should have here; nothing where all is well."""
        if self._log.exists() and self._log.stat().st_size > self._log_bytes:
            os.truncate(self._log, 0)  # they append
        ended = [process.returncode for process in self._processes if process.poll() is not None]
        if ended and not self._fault:
            self._fault = f"a stage on another host ended with code {ended[0]}: {self._last_line()}"
        return self._fault

    def terminate(self) -> bool:
        """End what is left once the replica's engine is gone. Returns whether nothing is."""
        return end_processes(self._name)

    def _start(self, asked: dict[str, Any], replica_id: str, address: str) -> None:
        watch = [sys.executable, "-m", "control_plane.providers.deadman", str(os.getpid()), self._name]
        subprocess.run(watch, check=True, timeout=_WATCH_SECONDS, stdin=subprocess.DEVNULL)
        command = [sys.executable if word == PYTHON else word for word in asked["stage_command"]]
        command += ["--connect", address]
        if asked["pair"]:
            authority = self._log.with_name("authority.pem")
            write_private(authority, asked["authority"].encode())
            command += ["--tls-authority", str(authority), "--tls-name", server_name(replica_id)]
        environment = environment_of(os.environ, asked["token"], asked["spec"], asked["variables"])
        accelerators = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        for index in range(asked["stages_each"]):
            own = accelerators[index] if index < len(accelerators) else ""
            with self._log.open("ab") as log:
                process = subprocess.Popen(
                    command,
                    env={**environment, MARK: self._name, "CUDA_VISIBLE_DEVICES": own},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._processes.append(process)

    def _last_line(self) -> str:
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _LAST_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return "".join(char for char in (lines or [""])[-1] if char.isprintable())[:300]


def _forget_old(folders: Path) -> None:
    there = sorted(folders.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in there[_KEPT_FOLDERS:]:
        if not marked(MARK, path.name):
            shutil.rmtree(path, ignore_errors=True)
