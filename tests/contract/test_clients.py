"""The official client, over HTTPS, through a gateway of a platform of its own; `make clients` runs the others'."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.clients.__main__ import CLIENTS, HERE, RUN_S, Client, prepare
from tests.e2e.platform import running


def test_the_official_client_over_https(tmp_path: Path) -> None:
    with running(tmp_path) as platform:
        environment = prepare(platform)
        assert environment["OPENAI_BASE_URL"].startswith("https://")
        done = subprocess.run(
            [sys.executable, "openai_client.py"],
            cwd=HERE,
            env=environment,
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("chat, stream, tools, structured output, responses")


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_client_is_pinned(client: Client) -> None:
    for package in client.packages:
        _, _, pinned = package.rpartition("@") if client.is_node else package.rpartition("==")
        assert pinned.count(".") >= 1, package
        assert package != pinned
