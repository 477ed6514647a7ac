"""What the driver of a Ray cluster and the actors on its nodes agree on: names of marks, processes and folders."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from control_plane.providers.processes import MARK, marked, send

PYTHON = "{python}"
"""In a command: the node's own interpreter."""
LIVE, STARTED, ENDED = "live/", "started/", "ended/"
_END_SECONDS = 2.0
_LOOK_SECONDS = 0.05


def stage_mark(replica_id: str, number: int) -> str:
    """What the processes of a replica carry on its host `number`, the first being 0."""
    return replica_id if number == 0 else f"{replica_id}.{number}"


def node_folder(asked: Mapping[str, Any]) -> Path:
    """Of one installation, on a node."""
    return Path(asked["home"] or Path.home() / ".ingle" / "node").expanduser() / str(asked["namespace"])


def end_processes(name: str) -> bool:
    """On a node whose supervisor is gone or hangs: end what it started. Returns whether nothing is left."""
    for pid in marked(MARK, name):
        send(pid, signal.SIGKILL)
    deadline = time.monotonic() + _END_SECONDS
    while marked(MARK, name):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True
