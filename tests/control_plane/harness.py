"""Runs the platform as its users do: as processes, reached over TLS."""

from __future__ import annotations

import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from control_plane.client import AdminClient, trust
from control_plane.profile import read_profile
from control_plane.security.aws import aws_client

REPLICA = Path(__file__).with_name("replica_process.py")
COMMAND = [sys.executable, "-m", "control_plane"]
PATIENCE = 40.0
QUICK = {
    "INGLE_REPLICA_COMMAND": json.dumps([sys.executable, str(REPLICA)]),
    "INGLE_TIMING__TICK": "0.1",
    "INGLE_TIMING__STARTING_TICK": "0.05",
    "INGLE_TIMING__DRAIN_SETTLE": "0.3",
    "INGLE_TIMING__SNAPSHOT_POLL": "0.1",
    "INGLE_TIMING__DEMAND_REPORT": "0.2",
    "INGLE_TIMING__USAGE_FLUSH": "0.1",
    "INGLE_TIMING__TERMINATE_GRACE": "2",
    "INGLE_TIMING__LEASE": "3",
    "INGLE_TIMING__SWEEP": "1",
    "INGLE_TIMING__BACKOFF_BASE": "0.2",
    "INGLE_TIMING__STOP_GRACE": "3",
    "INGLE_TIMING__CERTIFICATE_CHECK": "0.2",
}
Value = TypeVar("Value")


def until(look: Callable[[], Value | None], what: str, patience: float = PATIENCE) -> Value:
    """The first thing that `look` returns that is neither None nor False."""
    deadline = time.monotonic() + patience
    while True:
        value = look()
        if value is not None and value is not False:
            return value
        assert time.monotonic() < deadline, f"waited {patience:g} s in vain: {what}"
        time.sleep(0.02)


def environment(home: Path, **more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("INGLE_")}
    return {**clean, **QUICK, "INGLE_HOME": str(home), "NO_COLOR": "1", **more}


def ingle(home: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*COMMAND, *arguments], env=environment(home, **more), capture_output=True, text=True, timeout=60
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Program:
    """A role that runs. `facts` is its ready line."""

    process: subprocess.Popen[str]
    facts: dict[str, Any]
    errors: Path

    def log(self) -> str:
        return self.errors.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@dataclass
class Installation:
    """A home, and the programs that run on it."""

    home: Path
    more: Mapping[str, str] = field(default_factory=dict)
    programs: list[Program] = field(default_factory=list)

    def start(self, *arguments: str) -> Program:
        errors = self.home.parent / f"{self.home.name}-{len(self.programs)}.log"
        with errors.open("w") as file:
            process = subprocess.Popen(
                [*COMMAND, *arguments],
                env=environment(self.home, **self.more),
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"{arguments} ended: {errors.read_text()}"
        program = Program(process, json.loads(line), errors)
        self.programs.append(program)
        return program

    def up(self, *arguments: str) -> Program:
        return self.start("up", "-o", "json", "--gateway", "127.0.0.1:0", "--admin", "127.0.0.1:0", *arguments)

    def admin(self) -> AdminClient:
        return AdminClient(read_profile(self.home / "profile.toml"))

    @property
    def ca_file(self) -> str:
        return str(self.home / "certs" / "ca.pem")

    def tenant(self, base_url: str, key: str, timeout: float = 60.0) -> httpx.Client:
        """A client with a key, as a tenant has it."""
        return httpx.Client(
            base_url=base_url,
            headers={"Authorization": f"Bearer {key}"},
            verify=trust(self.ca_file),
            timeout=timeout,
            trust_env=False,
        )

    def end(self) -> None:
        """Stop everything, replicas too, however the test ended."""
        for program in self.programs:
            if program.process.poll() is None:
                program.process.send_signal(signal.SIGTERM)
        for program in self.programs:
            try:
                program.process.wait(15)
            except subprocess.TimeoutExpired:
                program.kill()
            if program.process.stdout:
                program.process.stdout.close()
        for path in self.home.glob("replicas/*/process.json"):
            pid = json.loads(path.read_text())["pid"]
            if f"INGLE_REPLICA={path.parent.name}".encode() in _environ(pid):
                os.killpg(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Aws:
    """A server that behaves like AWS, at `url`."""

    url: str
    region: str = "eu-central-1"
    environment: Mapping[str, str] = field(
        default_factory=lambda: {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "CANARY-aws-secret"}
    )

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/moto-api/", trust_env=False).status_code < 500
        except httpx.HTTPError:
            return False

    def client(self, service: str) -> Any:
        return aws_client(service, self.region, self.url)


@contextmanager
def installed(home: Path, **more: str) -> Iterator[Installation]:
    installation = Installation(home, more)
    try:
        yield installation
    finally:
        installation.end()


def replica_pids(installation: Installation) -> dict[str, int]:
    """Pids of the replicas that live, by replica id."""
    pids = {}
    for path in installation.home.glob("replicas/*/process.json"):
        pid = json.loads(path.read_text())["pid"]
        if f"INGLE_REPLICA={path.parent.name}".encode() in _environ(pid) and not _zombie(pid):
            pids[path.parent.name] = pid
    return pids


def starts(installation: Installation) -> int:
    """How many replicas were ever started on this home."""
    return len(list(installation.home.glob("replicas/*/process.json")))


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def state_of(client: AdminClient, name: str) -> str:
    return client.endpoint(name).state


def create(client: AdminClient, name: str, model: str = "fast", *, region: str = "local-eu", **spec: Any) -> str:
    """Create an endpoint and wait until it serves. Returns its URL."""
    client.create_endpoint({"name": name, "region": region, "model": model, **spec})
    until(lambda: state_of(client, name) == "ready", f"{name} ready")
    return client.endpoint(name).url


@contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[None]:
    """Let it answer, in a thread, for as long as this lasts."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


def chat(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}
