"""What EC2 would run: machines that boot their user data. Here they are processes of this machine."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from control_plane.providers.processes import marked, send

MACHINE = "INGLE_TEST_MACHINE"
_TOKEN_HEADER = "X-aws-ec2-metadata-token"


@dataclass
class Machine:
    address: str
    process: subprocess.Popen[bytes]
    off: threading.Timer | None = None
    shutdowns: list[str] = field(default_factory=list)


class Machines:
    """`minute` is how long one is here, in seconds. `terminate` tells the cloud that one powered off.

    With `boots` false they are never reachable, as those of the server behind the proxy.
    """

    PREFIX = "/machine/"

    def __init__(self, folder: Path, environment: Mapping[str, str], *, minute: float = 60.0) -> None:
        self._programs = _programs(folder)
        self._environment = dict(environment)
        self.minute = minute
        self.boots = True
        self.url = ""
        self.terminate: Callable[[str], None] = lambda _: None
        self.notices: dict[str, str] = {}
        self.by_id: dict[str, Machine] = {}
        self._token = secrets.token_hex(8)
        self._booting = threading.Lock()

    def boot(self, instance: str, address: str, script: str) -> None:
        if not self.boots:
            return
        root = f"{self.url}{self.PREFIX}{instance}"
        environment = {
            "PATH": f"{self._programs}:{os.environ['PATH']}",
            "INGLE_TEST_POWER": root,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": root,
            "AWS_ENDPOINT_URL": self.url,
            MACHINE: instance,
            **self._environment,
        }
        with self._booting:
            process = subprocess.Popen(
                ["bash", "-c", script], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
            self.by_id[instance] = Machine(address, process)

    def end(self, instance: str) -> None:
        """As by a power cut."""
        machine = self.by_id.get(instance)
        if machine is None:
            return
        if machine.off is not None:
            machine.off.cancel()
        deadline = time.monotonic() + 10
        while left := marked(MACHINE, instance):
            for pid in left:
                send(pid, signal.SIGKILL)
            assert time.monotonic() < deadline, f"processes of {instance} don't end"
            time.sleep(0.01)
        machine.process.wait(10)

    def end_all(self) -> None:
        for instance in list(self.by_id):
            self.end(instance)

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        """IMDSv2, and the power switch."""
        at = urllib.parse.urlsplit(path)
        instance, _, what = at.path.removeprefix(self.PREFIX).partition("/")
        with self._booting:
            machine = self.by_id[instance]
        if what == "shutdown":
            self._set_power_off(instance, machine, dict(urllib.parse.parse_qsl(at.query))["at"])
            return 200, ""
        if method == "PUT" and what == "latest/api/token":
            return 200, self._token
        if {name.lower(): value for name, value in headers.items()}.get(_TOKEN_HEADER.lower()) != self._token:
            return 401, "IMDSv2 alone"
        found = {"instance-id": instance, "local-ipv4": machine.address}
        found |= {"spot/instance-action": self.notices[instance]} if instance in self.notices else {}
        value = found.get(what.removeprefix("latest/meta-data/"))
        return (404, "") if value is None else (200, value)

    def _set_power_off(self, instance: str, machine: Machine, at: str) -> None:
        machine.shutdowns.append(at)
        if machine.off is not None:
            machine.off.cancel()
        seconds = 0.0 if at == "now" else int(at) * self.minute
        machine.off = threading.Timer(seconds, self.terminate, [instance])
        machine.off.daemon = True
        machine.off.start()


def _programs(folder: Path) -> Path:
    """With the `shutdown` that machines have."""
    folder.mkdir(parents=True)
    program = folder / "shutdown"
    program.write_text(
        f"#!{sys.executable} -SE\n"
        "import os, sys, urllib.request\n"
        "url = os.environ['INGLE_TEST_POWER'] + '/shutdown?at=' + sys.argv[2].lstrip('+')\n"
        "urllib.request.urlopen(urllib.request.Request(url, method='POST'), timeout=10)\n"
    )
    program.chmod(0o755)
    return folder
