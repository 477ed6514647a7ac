"""A Ray cluster of several nodes on this machine: each has its own loopback address, and `ray start` started it."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from control_plane.providers.processes import marked
from tests.control_plane.harness import free_port, until

_NODE = "INGLE_TEST_NODE"
_START_SECONDS = 90
_STORE_BYTES = 80_000_000


@dataclass
class Node:
    """`mark` is in the environment of all that the node starts; `cache` is its own folder for weights."""

    ip: str
    mark: str
    cache: Path
    arguments: tuple[str, ...]

    def pids(self) -> list[int]:
        """By either of two variables: some of Ray's processes write their title over a part of their environment."""
        return [*{*marked(_NODE, self.mark), *marked("INGLE_CACHE", str(self.cache))}]

    def raylet(self) -> int:
        return next(pid for pid in self.pids() if _program(pid) == "raylet")

    def lose(self) -> None:
        """End its raylet without warning, as the cluster sees a node that goes."""
        os.kill(self.raylet(), signal.SIGKILL)

    def end(self) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@dataclass
class Cluster:
    folder: Path
    network: str
    port: int
    nodes: list[Node] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{self.network}.1:{self.port}"

    @property
    def token_file(self) -> Path:
        return self.folder / "token"

    def node(self, region: str) -> Node:
        """The first node of a region."""
        return next(node for node in self.nodes if f"region={region}" in node.arguments)

    def add(self, *arguments: str) -> Node:
        """Start a node, with further arguments of `ray start`; the first one is the head."""
        number = len(self.nodes) + 1
        node = Node(f"{self.network}.{number}", secrets.token_hex(8), self.folder / f"cache-{number}", arguments)
        first = [
            "--head",
            "--port",
            str(self.port),
            "--include-dashboard=false",
            "--temp-dir",
            str(self.folder / "ray"),
        ]
        first += ["--ray-client-server-port", str(free_port())]
        command = [str(Path(sys.executable).with_name("ray")), "start", "--node-ip-address", node.ip]
        command += first if not self.nodes else ["--address", self.address]
        command += ["--object-store-memory", str(_STORE_BYTES), "--include-log-monitor=false", "--disable-usage-stats"]
        self.nodes.append(node)
        started = subprocess.run(
            [*command, *arguments],
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "INGLE_"))},
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(self.token_file),
                _NODE: node.mark,
                "INGLE_CACHE": str(node.cache),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_START_SECONDS,
        )
        assert started.returncode == 0, started.stdout
        return node

    def end(self) -> None:
        for node in reversed(self.nodes):
            node.end()
        until(lambda: not any(node.pids() for node in self.nodes), "the cluster's processes end")


@contextmanager
def ray_cluster() -> Iterator[Cluster]:
    """A head without room for replicas. Its sockets' paths must be short, so that it isn't in pytest's folder."""
    folder = Path(tempfile.mkdtemp(prefix="ingle-", dir="/tmp"))
    cluster = Cluster(folder, f"127.{random.randint(1, 250)}.{random.randint(1, 250)}", free_port())
    descriptor = os.open(cluster.token_file, os.O_WRONLY | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    try:
        cluster.add("--num-cpus", "0")
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


def _program(pid: int) -> str:
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name
    except OSError:
        return ""
