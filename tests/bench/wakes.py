"""`make bench-wakes`: from a request to its first token, from each rung of warmth, through the gateway.

A real `ingle up` on this machine with the demo model: put to sleep, wait until it rests, ask, take the time, again. The
request is a tenant's: HTTPS, a key, a stream, on a connection that is open already.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from control_plane.bench.report import percentile
from control_plane.client import AdminClient
from control_plane.config import Timing
from tests.control_plane.harness import QUICK, Installation, create, installed, until

MODEL = "smollm2-135m-instruct"
RUNGS = ("cold", "ember", "asleep", "hot")
BODY = {
    "model": "wakes", "stream": True, "max_tokens": 4, "temperature": 0,
    "messages": [{"role": "user", "content": "Say hello in five words."}],
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.wakes", description=__doc__)
    parser.add_argument("--wakes", type=int, default=200)
    parser.add_argument("--rungs", default=",".join(RUNGS))
    parser.add_argument("--json", type=Path, help="also write all times there, in milliseconds")
    options = parser.parse_args()
    measured: dict[str, list[float]] = {}
    # the drain's settling is the time between two wakes, and no part of one
    with (
        tempfile.TemporaryDirectory(prefix="ingle-wakes-") as folder,
        installed(Path(folder) / "home", INGLE_TIMING__DRAIN_SETTLE="0.1", **_defaults()) as platform,
    ):
        key = platform.up().facts["key"]
        with platform.admin() as admin:
            for rung in options.rungs.split(","):
                measured[rung] = _rung(platform, admin, key, rung, options.wakes)
                print(_line(rung, measured[rung]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(measured))
    return 0


def _rung(platform: Installation, admin: AdminClient, key: str, rung: str, count: int) -> list[float]:
    name = f"wakes-{rung}"
    url = create(admin, name, MODEL, warmth=rung, idle_timeout=3600, min_replicas=int(rung == "hot"))
    times = []
    with platform.tenant(url, key) as tenant:
        for _ in range(count):
            if rung != "hot":
                admin.sleep_endpoint(name)
                until(lambda: _rests(admin, name, rung), f"{name} is {rung}")
                assert tenant.get("/models").status_code == 200  # the connection is open, and was used
            times.append(_first_token(tenant, {**BODY, "model": name}))
    if rung != "hot":
        found = next(item for item in admin.rungs(name) if item.rung == rung)
        print(f"  {rung} by phase (mean ms): {found.phases}", flush=True)
    admin.delete_endpoint(name)
    return times


def _rests(admin: AdminClient, name: str, rung: str) -> bool:
    endpoint = admin.endpoint(name)
    there = [(replica.state, replica.rung) for replica in endpoint.replicas]
    return endpoint.state == "zero" and there == ([] if rung == "cold" else [("resting", rung)])


def _first_token(tenant: httpx.Client, body: dict[str, object]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    with tenant.stream("POST", "/chat/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        took = 0.0
        for line in answer.iter_lines():
            if not took and '"content":"' in line and '"content":""' not in line:
                took = (time.perf_counter() - began) * 1000
    return took


def _line(rung: str, times: Sequence[float]) -> str:
    p50, p95 = (percentile(sorted(times), share) for share in (0.5, 0.95))
    return f"{rung}: {len(times)} wakes, first token p50 {p50:.0f} ms, p95 {p95:.0f} ms, most {max(times):.0f} ms"


def _defaults() -> dict[str, str]:
    """The platform's own intervals, where the tests have quicker ones."""
    timing = Timing()
    fields = [name.removeprefix("INGLE_TIMING__") for name in QUICK if name.startswith("INGLE_TIMING__")]
    kept = {f"INGLE_TIMING__{name}": str(getattr(timing, name.lower())) for name in fields if name != "DRAIN_SETTLE"}
    command = json.dumps([sys.executable, "-m", "data_plane", "serve"])
    return {**kept, "INGLE_REPLICA_COMMAND": command}


if __name__ == "__main__":
    raise SystemExit(main())
