"""Facts about the processes of a replica, read from /proc.

A replica's processes are known by their environment, which carries its id: that survives a restart of the control
plane, a lost pid file and a leader that died before its children, and can't be confused by a reused pid.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARK = "INGLE_REPLICA"
"""Of a replica's processes: holds its id."""
_PROC = Path("/proc")
_OWN_VARIABLES = ("INGLE_DATABASE_URL", "INGLE_TOKEN", "INGLE_KEY", "INGLE_PROFILE")
_FOREIGN_PREFIX = "RAY_"
"""A cluster's token is in such variables of its nodes: nothing for a replica."""


def environment_of(
    around: Mapping[str, str], token: str, spec: Mapping[str, Any], variables: Mapping[str, str]
) -> dict[str, str]:
    """Of a replica's processes. `spec` is a `ReplicaSpec` as plain values; `variables` are its region's."""
    kept = {
        name: value
        for name, value in around.items()
        if name not in _OWN_VARIABLES and not name.startswith(_FOREIGN_PREFIX)
    }
    own = {
        "INGLE_REPLICA_TOKEN": token,
        "INGLE_REGION": str(spec["region"]),
        "INGLE_ENDPOINT": str(spec["endpoint_name"]),
        MARK: str(spec["replica_id"]),
    }
    return {**kept, **own, **variables}


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of `pid`; None where there is no such process, or only its zombie."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def began_at(pid: int) -> float | None:
    """When `pid` started, in seconds since the epoch; None where there is no such process."""
    ticks = start_time(pid)
    booted = next(line for line in (_PROC / "stat").read_text().splitlines() if line.startswith("btime "))
    return None if ticks is None else int(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


def marked(name: str, value: str) -> list[int]:
    """Pids of live processes that were started with environment variable `name` set to `value`."""
    mark = f"{name}={value}".encode()
    found = []
    for entry in os.listdir(_PROC):
        if not entry.isdigit():
            continue
        try:
            environment = (_PROC / entry / "environ").read_bytes()
        except OSError:
            continue
        if mark in environment.split(b"\0") and start_time(int(entry)) is not None:
            found.append(int(entry))
    return found


def send(pid: int, number: signal.Signals) -> None:
    """Signal `pid`, if it still is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
