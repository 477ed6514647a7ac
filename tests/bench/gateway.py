"""`make bench-gateway`: what the gateway adds, beside a bare proxy and LiteLLM's, before the same upstream, in one run.

Each proxy has a core of its own, pinned; the upstream and the load share another. The gateway is reached over TLS, with
a key, and meters into a database; the others are reached in plain HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvloop

from control_plane.bench.report import percentile
from tests.bench.gateway_load import Connection, Place, closed, connected, paced
from tests.bench.peers import ENVIRONMENTS
from tests.control_plane.harness import Installation, create, free_port, installed

UPSTREAM = Path(__file__).with_name("gateway_upstream.py")
BODY = {"model": "bench", "messages": [{"role": "user", "content": "Why is the sky blue? " * 4}], "max_tokens": 8}
STREAM = {**BODY, "stream": True}
HELD = {**STREAM, "max_tokens": 20, "pace_ms": 500}
PROXY_CORE, LOAD_CORE = 0, 1


@dataclass(frozen=True)
class Served:
    place: Place
    pid: int


def pin(pid: int, core: int) -> None:
    """Nothing where there is but one core."""
    if (os.cpu_count() or 1) > 1:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})


@contextlib.contextmanager
def gateway(home: Path, database: str) -> Iterator[tuple[Served, Served]]:
    """A gateway process, and the replica behind it."""
    more = {
        "INGLE_REPLICA_COMMAND": json.dumps([sys.executable, str(UPSTREAM), "replica"]),
        "INGLE_TIMING__SNAPSHOT_POLL": "0.5",
        "INGLE_TIMING__DEMAND_REPORT": "1",
        "INGLE_TIMING__USAGE_FLUSH": "0.5",
        "INGLE_TIMING__CERTIFICATE_CHECK": "5",
    } | ({"INGLE_DATABASE_URL": database} if database else {})
    with installed(home, **more) as installation:
        up = installation.up("--keep-replicas")
        with installation.admin() as admin:
            create(admin, "bench", "bench", min_replicas=1, max_replicas=1)
            (address,) = [one.address for one in admin.endpoint("bench").replicas if one.state == "ready"]
            key = admin.create_key({"name": "bench"}).secret
        up.stop()  # what the controller does beside must not be measured; the replica goes on
        replica = _replica_pid(installation)
        pin(replica, LOAD_CORE)
        served = installation.start("serve", "gateway", "-r", "local-eu", "--gateway", "127.0.0.1:0")
        pin(served.process.pid, PROXY_CORE)
        url = served.facts["gateways"]["local-eu"] + "/v1"
        try:
            yield (
                Served(Place(url, key, installation.ca_file), served.process.pid),
                Served(Place(f"http://{address}/v1"), replica),
            )
        finally:
            os.kill(replica, signal.SIGTERM)


def _replica_pid(installation: Installation) -> int:
    (path,) = installation.home.glob("replicas/*/process.json")
    pid: int = json.loads(path.read_text())["pid"]
    return pid


@contextlib.contextmanager
def program(command: Sequence[str], port: int, ready: str, environment: dict[str, str]) -> Iterator[Served]:
    with (ENVIRONMENTS / "gateway-peer.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}{ready}", timeout=5):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} didn't start; see {ENVIRONMENTS}/gateway-peer.log")
            time.sleep(0.05)
        pin(process.pid, PROXY_CORE)
        yield Served(Place(f"http://127.0.0.1:{port}/v1", "sk-bench"), process.pid)
    finally:
        process.terminate()
        process.wait(20)


def bare(upstream: Place) -> contextlib.AbstractContextManager[Served]:
    port = free_port()
    root = upstream.url.removesuffix("/v1")
    return program([sys.executable, str(UPSTREAM), "bare", root, str(port)], port, "/health", {})


def litellm(upstream: Place, folder: Path) -> contextlib.AbstractContextManager[Served] | None:
    found = ENVIRONMENTS / "litellm" / "bin" / "litellm"
    if not found.exists():
        return None
    port = free_port()
    model = {"model": "openai/bench", "api_base": upstream.url, "api_key": "none"}
    config = folder / "litellm.json"
    config.write_text(json.dumps({"model_list": [{"model_name": "bench", "litellm_params": model}]}))
    command = [str(found), "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    environment = {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION"}
    environment["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"
    return program(command, port, "/health/liveliness", environment)


def milliseconds(times: Sequence[float], share: float) -> float:
    return percentile(sorted(times), share) * 1000


async def rates(place: Place, seconds: float) -> dict[str, float]:
    return {
        "requests/s, 16 connections": await closed(place, BODY, 16, seconds),
        "streams of 8 frames/s, 16 connections": await closed(place, STREAM, 16, seconds),
    }


async def latencies(place: Place, upstream: Place, seconds: float) -> dict[str, float]:
    """What is added at 200 requests a second: the percentile through the proxy less that without it."""
    found = {}
    ways = [(place, await connected(place, 64, BODY)), (upstream, await connected(upstream, 64, BODY))]
    for name, body in (("", BODY), ("stream, ", STREAM)):
        through, direct = [
            [one.whole for one in (await paced(way.request(body), 200, seconds + 1, connections))[200:]]
            for way, connections in ways
        ]
        for share in (0.5, 0.99):
            added = milliseconds(through, share) - milliseconds(direct, share)
            found[f"added latency, {name}200/s, p{share * 100:.0f} (ms)"] = added
    for _, connections in ways:
        close(connections)
    return found


async def many(served: Served, upstream: Place) -> dict[str, float]:
    """Streams that begin while 1,000 others are open: those begin at 100 a second, and take 10 s and more."""
    direct = await connected(upstream, 200, BODY)
    alone = [one.first for one in await paced(upstream.request(HELD), 50, 2, direct)]
    request = served.place.request(HELD)
    before = resident(served.pid)
    connections = await connected(served.place, 1300, BODY)
    sides = asyncio.create_task(paced(request, 100, 10, connections))
    await asyncio.sleep(9.9)
    held = (resident(served.pid) - before) / 1300  # the connections that wait for their turn are among them
    beside = [one.first for one in await paced(request, 50, 2, connections)]
    await sides
    close(connections + direct)
    return {
        "TTFT p99 added beside 1,000 streams (ms)": milliseconds(beside, 0.99) - milliseconds(alone, 0.99),
        "memory a held stream (KiB)": held,
    }


async def idle(served: Served, count: int) -> dict[str, float]:
    before = resident(served.pid)
    connections = await connected(served.place, count, BODY)
    size = (resident(served.pid) - before) / count
    few = connections[-64:]
    times = [one.whole for one in await paced(served.place.request(BODY), 100, 2, few)]
    close(connections)
    return {
        f"memory an idle connection of {count:,} (KiB)": size,
        f"latency beside {count:,} idle connections, p99 (ms)": milliseconds(times, 0.99),
    }


def close(connections: Sequence[Connection]) -> None:
    for connection in connections:
        connection.close()


def resident(pid: int) -> float:
    """In KiB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith("Rss:")))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gateway", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--idle", type=int, default=10_000, help="idle connections")
    parser.add_argument("--only", default="", help="of rates, latency, streams, idle")
    parser.add_argument("--database", default="", help="a URL of PostgreSQL; SQLite where none is given")
    parser.add_argument("--alone", action="store_true", help="without the peers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else ["rates", "latency", "streams", "idle"]
    ENVIRONMENTS.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended then, too
    if (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {LOAD_CORE})
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        with gateway(home, options.database) as (ours, upstream):
            results["ingle"] = measure("ingle", ours, upstream.place, wanted, options)
            peers_wanted = {"bare proxy": wanted[:2], "LiteLLM": wanted[:1]}  # 200/s are more than LiteLLM can
            peers = {"bare proxy": bare(upstream.place), "LiteLLM": litellm(upstream.place, Path(folder))}
            for name, peer in peers.items():
                if peer is not None and not options.alone:
                    with peer as served:
                        results[name] = measure(name, served, upstream.place, peers_wanted[name], options)
    print_table(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


def measure(name: str, served: Served, upstream: Place, wanted: Sequence[str], options: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    work = {
        "rates": lambda: rates(served.place, options.seconds),
        "latency": lambda: latencies(served.place, upstream, options.seconds),
        "streams": lambda: many(served, upstream),
        "idle": lambda: idle(served, options.idle),
    }
    for kind in wanted:
        print(f"{name}: {kind} …", file=sys.stderr)
        found |= uvloop.run(work[kind]())
    return found


def print_table(results: dict[str, dict[str, float]]) -> None:
    print(f"\n{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print("| | " + " | ".join(results) + " |\n|---|" + "---|" * len(results))
    for quantity, ours in results["ingle"].items():
        cells = [f"{ours:.1f}" if ours < 1000 else f"{ours:,.0f}"]
        for name in list(results)[1:]:
            value = results[name].get(quantity)
            cells.append("" if value is None else f"{value:,.1f} ({ours / value:.2f}×)" if value else "0")
        print(f"| {quantity} | " + " | ".join(cells) + " |")
    print("\n(n×): ingle's figure over that one's")


if __name__ == "__main__":
    sys.exit(main())
