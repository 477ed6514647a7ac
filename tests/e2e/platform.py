"""A whole platform for a test: `ingle up` in a home of its own, as a process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.demo import free_port

INGLE = str(Path(sys.executable).with_name("ingle"))


@dataclass(frozen=True)
class Platform:
    admin: str
    token: str
    ca_file: str
    environment: dict[str, str]

    def ingle(self, *arguments: str) -> str:
        done = subprocess.run(
            [INGLE, *arguments], env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextlib.contextmanager
def running(home: Path, **more: str) -> Iterator[Platform]:
    environment = {**os.environ, "INGLE_HOME": str(home), "NO_COLOR": "1", **more}
    command = [
        INGLE,
        "up",
        "-o",
        "json",
        "--gateway",
        f"127.0.0.1:{free_port(2)}",
        "--admin",
        f"127.0.0.1:{free_port(1)}",
    ]
    with (home / "up.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        profile = tomllib.loads((home / "profile.toml").read_text())
        yield Platform(facts["admin"], profile["token"], facts["ca_file"], environment)
    finally:
        process.terminate()
        assert process.wait(30) == 0
