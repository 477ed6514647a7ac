"""`python -m tests.bench.reconcile`: what a full pass of the reconciler costs, at 1,000 endpoints of three replicas.

The provider and the probes are simulated and answer at once; the database is a real one, SQLite's. CPU seconds of this
process, of passes in which nothing changes, which is nearly all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from control_plane.config import Timing
from control_plane.domain import Address, Description, Offer, Phase, ReplicaSpec, Rung
from control_plane.reconciler.loop import Reconciler
from control_plane.reconciler.probe import Health, Prober
from control_plane.store import endpoints, tenants
from control_plane.store.database import Store
from control_plane.store.schema import upgrade_schema

REGION = "local-eu"


class Cloud:
    """Implements `Provider`: what is asked for runs."""

    def __init__(self) -> None:
        self.running: set[str] = set()

    async def offers(self) -> Sequence[Offer]:
        return [Offer(REGION, "cpu", 1, 0.0)]

    async def ensure(self, spec: ReplicaSpec) -> None:
        self.running.add(spec.replica_id)

    async def describe(self, replica_id: str) -> Description:
        if replica_id in self.running:
            return Description(Phase.RUNNING, Address("10.0.0.1", 9000))
        return Description(Phase.ABSENT)

    async def list_owned(self) -> Sequence[str]:
        return list(self.running)

    async def drain(self, replica_id: str) -> None: ...

    async def terminate(self, replica_id: str) -> None:
        self.running.discard(replica_id)


class Probes(Prober):
    def __init__(self) -> None: ...

    async def ask(self, replica_id: str, address: Address) -> Health:
        return Health(True, 0, Rung.HOT)

    async def prove(self, replica_id: str, address: Address, model: str) -> str:
        return ""


async def measure(count: int, replicas: int, passes: int) -> tuple[list[float], list[float]]:
    """CPU and wall-clock seconds of each pass."""
    with tempfile.TemporaryDirectory(prefix="ingle-reconcile-") as folder:
        url = f"sqlite+aiosqlite:///{Path(folder) / 'db'}"
        upgrade_schema(url)
        store = Store(url)
        await _fill(store, count, replicas)
        reconciler = Reconciler(store, {REGION: Cloud()}, Timing(tick=3600.0), owner=f"bench:{0}:x")
        probes = Probes()
        for _ in range(4):  # until all are ready and settled
            await reconciler.tick(probes)
        cpu, wall = [], []
        for _ in range(passes):
            began, used = time.perf_counter(), time.process_time()
            await reconciler.tick(probes)
            cpu.append(time.process_time() - used)
            wall.append(time.perf_counter() - began)
        async with store.read() as session:
            states = {endpoint.state for endpoint in await endpoints.list_endpoints(session)}
        await store.close()
        if states != {"ready"}:
            raise SystemExit(f"not all are ready: {states}")
        return cpu, wall


async def _fill(store: Store, count: int, replicas: int) -> None:
    spec: dict[str, Any] = {
        "region": REGION, "model": "m", "gpu": None, "gpus": 0, "engine_args": [], "min_replicas": replicas,
        "max_replicas": replicas, "idle_timeout": 300.0, "max_wait": 60.0, "warmth": "cold",
    }  # fmt: skip
    async with store.write() as session:
        tenant = await tenants.create_tenant(session, "acme", time.time())
    for first in range(0, count, 100):
        async with store.write() as session:
            for number in range(first, min(count, first + 100)):
                await endpoints.create_endpoint(session, tenant.id, {**spec, "name": f"e{number}"}, time.time())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.reconcile", description=__doc__)
    parser.add_argument("--endpoints", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--passes", type=int, default=10)
    options = parser.parse_args()
    cpu, wall = asyncio.run(measure(options.endpoints, options.replicas, options.passes))
    print(
        f"{options.endpoints} endpoints x {options.replicas} replicas, {options.passes} passes: CPU s median "
        f"{sorted(cpu)[len(cpu) // 2]:.3f}, most {max(cpu):.3f}; wall s median {sorted(wall)[len(wall) // 2]:.3f}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
