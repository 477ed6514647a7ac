"""The local provider: a replica is a session of processes on this machine.

All that is known of a replica is in `HOME/replicas/<id>/`, so that a control plane which starts anew finds it again:
`spec.json`, `process.json` (pid and start time), `accelerators.json` (which of this machine's it has), `stdout.log`,
`stderr.log`, `terminating` (since when) and `ended`; `tls.pem` where replicas are reached by mutual TLS.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from control_plane.domain import ELSEWHERE, Address, Description, Offer, Phase, ReplicaSpec, Rung, lack_of_accelerators
from control_plane.errors import ProviderError, ProviderRefused
from control_plane.providers.base import stage_flags
from control_plane.providers.draining import ask_to_drain
from control_plane.providers.processes import MARK, began_at, environment_of, marked, send, start_time
from control_plane.security.files import private_folder, write_private
from control_plane.security.mesh import PLAIN, Link

_HOST = "127.0.0.1"
_PAIR = "tls.pem"
_KEPT_FOLDERS = 20
_FIRST_OUTPUT = 64 * 1024


class Tokens(Protocol):
    def replica_token(self, replica_id: str) -> str:
        """The bearer token that the replica asks of its callers."""


class Equipment(Protocol):
    """Certificates of replicas, as `Mesh` has them."""

    @property
    def link(self) -> Link: ...

    @property
    def ca_file(self) -> Path: ...

    def equip(self, replica_id: str, host: str, path: Path) -> None: ...

    def forget(self, path: Path) -> None: ...


class LocalProvider:
    """Implements `Provider` with processes of this machine.

    `terminate_grace` is in seconds, `log_bytes` bounds each of two log files, `host` is where replicas listen.
    `variables` are set for replicas of a region, by region.
    """

    def __init__(
        self,
        home: Path,
        secret: Tokens,
        *,
        regions: Sequence[str],
        command: Sequence[str],
        terminate_grace: float,
        log_bytes: int,
        mesh: Equipment | None = None,
        variables: Mapping[str, Mapping[str, str]] | None = None,
        host: str = _HOST,
        accelerators: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root = private_folder(home / "replicas")
        self._secret = secret
        self._regions = tuple(regions)
        self._command = tuple(command)
        self._grace = terminate_grace
        self._log_bytes = log_bytes
        self._mesh = mesh
        self._variables = dict(variables or {})
        self._host = host
        self._link = mesh.link if mesh else PLAIN
        self._clock = clock
        self._accelerators = len(list(Path("/dev").glob("nvidia[0-9]*"))) if accelerators is None else accelerators
        self._assigning = threading.Lock()
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    async def offers(self) -> Sequence[Offer]:
        there = {"cpu": 1} | ({"cuda": self._accelerators} if self._accelerators else {})
        return [
            Offer(region, kind, count, 0.0, fixed=True) for region in self._regions for kind, count in there.items()
        ]

    async def ensure(self, spec: ReplicaSpec) -> None:
        if spec.region not in self._regions:
            raise ProviderRefused(f"this machine isn't in region {spec.region}", code="unknown_region", permanent=True)
        offered = {
            offer.accelerator: offer.max_per_replica for offer in await self.offers() if offer.region == spec.region
        }
        lack = lack_of_accelerators(spec.region, offered, spec.gpu, spec.gpus)
        if lack is not None:
            raise ProviderRefused(lack, code="accelerator_not_offered", permanent=True)
        try:
            await asyncio.to_thread(self._start, spec)
        except OSError as error:
            raise ProviderError(f"can't start {self._command[0]}: {error.strerror}", code="spawn_failed") from error

    async def describe(self, replica_id: str) -> Description:
        return await asyncio.to_thread(self._describe, replica_id)

    async def list_owned(self) -> Sequence[str]:
        def owned() -> list[str]:
            names = [path.name for path in self._root.iterdir() if path.is_dir() and not (path / "ended").exists()]
            return [name for name in names if self._describe(name).phase is not Phase.ABSENT]

        return await asyncio.to_thread(owned)

    async def drain(self, replica_id: str) -> None:
        description = await self.describe(replica_id)
        if description.phase is not Phase.RUNNING or description.address is None:
            return
        await ask_to_drain(self._link, replica_id, description.address, self._secret.replica_token(replica_id))

    async def terminate(self, replica_id: str) -> None:
        await asyncio.to_thread(self._terminate, replica_id)

    def logs(self, replica_id: str, lines: int, after: int | None = None) -> tuple[list[str], int]:
        """What the replica logged, and the position to go on `after`: the last `lines` lines, or those that came since.

        Only whole lines are given; nothing where nothing is kept.
        """
        path = self._root / replica_id / "stderr.log"
        older = path.with_name("stderr.log.1")
        text = path.read_bytes() if path.exists() else b""
        end = text.rfind(b"\n") + 1
        if after is None:
            text = (older.read_bytes() if older.exists() else b"") + text[:end]
        elif after <= len(text):
            text = text[after:end]
        else:  # the file was emptied meanwhile, and what was in it kept as the older one
            text = (older.read_bytes()[after:] if older.exists() else b"") + text[:end]
        return text.decode("utf-8", "replace").splitlines()[-lines:], end

    def _start(self, spec: ReplicaSpec) -> None:
        folder = private_folder(self._root / spec.replica_id)
        with _locked(folder):
            if (folder / "ended").exists() or (folder / "process.json").exists():
                return
            survivors = marked(MARK, spec.replica_id)
            if survivors:  # an earlier control plane died between starting it and writing that down
                self._write_process(folder, min(survivors))
                return
            write_private(folder / "spec.json", json.dumps(asdict(spec)).encode())
            self._equip(spec.replica_id)
            assigned = self._assign(spec, folder)
            with open(folder / "stdout.log", "ab") as out, open(folder / "stderr.log", "ab") as err:
                child = subprocess.Popen(
                    self._arguments(spec),
                    env=self._environment(spec) | assigned,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            self._children[spec.replica_id] = child
            self._write_process(folder, child.pid)

    def _assign(self, spec: ReplicaSpec, folder: Path) -> dict[str, str]:
        """Accelerators that the fewest other replicas have, and how the replica is told of them."""
        if spec.gpu in (None, "cpu"):
            return {}
        with self._assigning:
            users = [0] * self._accelerators
            for other in self._root.iterdir():
                if not (other / "ended").exists():
                    taken = (_read_json(other / "accelerators.json") or {}).get("indexes", [])
                    users = [count + (index in taken) for index, count in enumerate(users)]
            order = sorted(range(self._accelerators), key=lambda index: (users[index], index))
            own = sorted(order[: max(1, spec.gpus)])
            write_private(folder / "accelerators.json", json.dumps({"indexes": own}).encode())
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}

    def _equip(self, replica_id: str) -> None:
        if self._mesh is not None:
            self._mesh.equip(replica_id, self._host, self._root / replica_id / _PAIR)

    def _arguments(self, spec: ReplicaSpec) -> list[str]:
        device = ["--device", spec.gpu] if spec.gpu else []
        where = ["--host", self._host, "--port", "0", "--name", spec.endpoint_name]
        tls = []
        if self._mesh is not None:
            tls = ["--tls-pair", str(self._root / spec.replica_id / _PAIR), "--tls-authority", str(self._mesh.ca_file)]
        rung = [] if spec.rung == Rung.HOT else ["--rung", spec.rung]
        return [*self._command, spec.model, *where, *tls, *device, *stage_flags(spec), *rung, *spec.engine_args]

    def _environment(self, spec: ReplicaSpec) -> dict[str, str]:
        token = self._secret.replica_token(spec.replica_id)
        return environment_of(os.environ, token, asdict(spec), self._variables.get(spec.region, {}))

    def _write_process(self, folder: Path, pid: int) -> None:
        process = {"pid": pid, "start_time": start_time(pid), "began_at": began_at(pid) or self._clock()}
        write_private(folder / "process.json", json.dumps(process).encode())

    def _describe(self, replica_id: str) -> Description:
        folder = self._root / replica_id
        if not folder.is_dir() or (folder / "ended").exists():
            return Description(Phase.ABSENT)
        process = _read_json(folder / "process.json")
        if process is None:
            return Description(Phase.STARTING if marked(MARK, replica_id) else Phase.ABSENT)
        child = self._children.get(replica_id)
        exit_code = child.poll() if child else None
        said = self._said(folder)
        if said.get("event") == "failed":
            return Description(
                Phase.FAILED, code=_text(said, "code", 64), message=_text(said, "message", 1000) or "failed"
            )
        if start_time(process["pid"]) != process["start_time"] or process["start_time"] is None:
            how = (
                "" if exit_code is None else f" with code {exit_code}" if exit_code >= 0 else f" by signal {-exit_code}"
            )
            return Description(Phase.EXITED, code="replica_exited", message=f"the replica's process ended{how}")
        region = _text(_read_json(folder / "spec.json") or {}, "region", 63)
        where = region if region in self._regions else ELSEWHERE
        if said.get("event") != "ready":
            return Description(Phase.STARTING, region=where, began_at=process.get("began_at"))
        self._bound_logs(folder)
        self._equip(replica_id)
        phases = said.get("phases")
        return Description(
            Phase.RUNNING,
            address=Address(str(said["host"]), int(said["port"])),
            startup_ms=float(said.get("startup_ms") or 0.0),
            phases={str(k): float(v) for k, v in phases.items()} if isinstance(phases, dict) else {},
            region=where,
            began_at=process.get("began_at"),
        )

    def _said(self, folder: Path) -> Mapping[str, Any]:
        """The event by which the replica said that it is ready or that it failed, kept once it was seen."""
        kept = _read_json(folder / "said.json")
        if kept is not None:
            return kept
        try:
            with open(folder / "stdout.log", "rb") as file:
                output = file.read(_FIRST_OUTPUT)
        except FileNotFoundError:  # it was started from another folder, which is no more
            return {}
        for line in output.splitlines(keepends=True):
            if line.endswith(b"\n") and line.startswith(b"{"):
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                if entry.get("event") in ("ready", "failed"):
                    write_private(folder / "said.json", json.dumps(entry).encode())
                    return dict(entry)
        return {}

    def _bound_logs(self, folder: Path) -> None:
        for name in ("stdout.log", "stderr.log"):
            path = folder / name
            if path.stat().st_size > self._log_bytes // 2:
                # The replica appends, so that it writes on at the start of the emptied file.
                shutil.copyfile(path, folder / f"{name}.1")
                os.truncate(path, 0)

    def _terminate(self, replica_id: str) -> None:
        # A folder for one that never was, too: a call to start it that comes late finds that it has ended.
        folder = private_folder(self._root / replica_id)
        with _locked(folder):
            if not (folder / "ended").exists():
                self._end(replica_id, folder)

    def _end(self, replica_id: str, folder: Path) -> None:
        process = _read_json(folder / "process.json")
        since = _read_json(folder / "terminating")
        child = self._children.get(replica_id)
        if child:
            child.poll()
        alive = marked(MARK, replica_id)
        if not alive:
            write_private(folder / "ended", b"")
            self._children.pop(replica_id, None)
            if self._mesh is not None:
                self._mesh.forget(folder / _PAIR)
            self._forget_old()
            return
        leader_lives = process is not None and process["pid"] in alive
        if since is None:
            write_private(folder / "terminating", json.dumps({"at": self._clock()}).encode())
        if leader_lives and since is None and process is not None:
            send(process["pid"], signal.SIGTERM)
        elif not leader_lives or (since is not None and self._clock() - since["at"] > self._grace):
            for pid in alive:
                send(pid, signal.SIGKILL)

    def _forget_old(self) -> None:
        ended = [path for path in self._root.iterdir() if (path / "ended").exists()]
        ended.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in ended[_KEPT_FOLDERS:]:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Against other control planes' hands on the same replica."""
    with open(folder / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _text(entry: Mapping[str, Any], name: str, most: int) -> str | None:
    """What a replica said, cut to what may be stored and shown."""
    value = entry.get(name)
    return "".join(char for char in value if char.isprintable())[:most] if isinstance(value, str) else None
