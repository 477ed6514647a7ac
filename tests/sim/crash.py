"""A controller that fails at one point of its work: a commit or a provider's call, before it, after it, or in it.

One endpoint is created, changed, paused and resumed; whoever dies is followed by another. An interval after the last
step the cloud must hold what the database says, no more and no less.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from control_plane.domain import Description, ReplicaSpec
from control_plane.errors import ProviderError, StoreUnavailable
from control_plane.store import endpoints, tenants
from control_plane.store.database import Store
from tests.sim.clock import CURRENT, Died
from tests.sim.cloud import Faults, Provider
from tests.sim.report import Broken, Report
from tests.sim.run import run_world
from tests.sim.world import REGIONS, World

Kind = Literal["die", "fail", "hang"]
WARMTHS = ("cold", "ember")
KINDS: tuple[Kind, ...] = ("die", "fail", "hang")
STEPS: tuple[dict[str, Any], ...] = (
    {"max_replicas": 2}, {"model": "m2"}, {"model": "bad"}, {"model": "m2"}, {"paused": True}, {"paused": False},
    {"model": "m3"},
)  # fmt: skip
STEP_SECONDS = 12.0
HANG_SECONDS = 20.0
_LOOKS = 25
"""Of that many `describe` and `list_owned` calls one is a point: they are all alike."""


@dataclass(frozen=True)
class Point:
    """The `number`th crossing, in order of time, and what happens there."""

    number: int
    kind: Kind


class CrashWorld(World):
    """`point` is where it happens; None for nowhere."""

    def __init__(self, folder: Path, point: Point | None, warmth: str) -> None:
        super().__init__(1, folder)
        self.point = point
        self.warmth = warmth
        self.crossed = 0
        self.skew = 0.0
        self._looks = 0

    async def run(self) -> Report:
        store = Store(self.url)
        self.cloud.faults = Faults()
        self.cloud.start_seconds = (0.5, 1.0)
        async with store.write() as session:
            tenant = await tenants.create_tenant(session, "acme", self._clock(0.0)())
            spec: dict[str, Any] = {
                "name": "chat", "region": REGIONS[0], "model": "m", "gpu": None, "gpus": 0, "engine_args": [],
                "min_replicas": 0, "max_replicas": 1, "idle_timeout": 6.0, "max_wait": 60.0, "warmth": self.warmth,
            }  # fmt: skip
            await endpoints.create_endpoint(session, tenant.id, spec, self._clock(0.0)())
        self._start_controller()
        self._calm = True
        watching = asyncio.create_task(self._watch())
        try:
            for changes in STEPS:
                await self._over([watching], STEP_SECONDS)
                await self._ask(store, changes)
            await self._over([watching], STEP_SECONDS + HANG_SECONDS + 30.0)
            await self._converged(store)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            for process in self._controllers:
                await process.kill()
            await store.close()
        self.report.machines = len(self.cloud.machines)
        self.report.requests = self.crossed
        return self.report

    async def _ask(self, store: Store, changes: dict[str, Any]) -> None:
        """As an operator does, who asks again where the database is held up."""
        for _ in range(5):
            with suppress(StoreUnavailable):
                async with store.write() as session:
                    await endpoints.update_endpoint(session, "chat", changes, self._clock(0.0)())
                return
        raise Broken("the database was held up for too long")

    def _start_controller(self) -> None:
        super()._start_controller()
        self._controllers[-1].crossing = self.cross

    def _provider(self, region: str) -> Provider:
        return _Crossed(self, region)

    async def cross(self, what: str) -> None:
        if "describe" in what or "list_owned" in what:
            self._looks += 1
            if self._looks % _LOOKS:
                return
        self.crossed += 1
        if self.point is None or self.crossed != self.point.number:
            return
        self.note(self.point, what)
        if self.point.kind == "hang":
            await asyncio.sleep(HANG_SECONDS)
        elif self.point.kind == "fail":
            raise (
                sqlite3.OperationalError("disk I/O error")
                if "commit" in what
                else ProviderError("no answer", code="timeout")
            )
        else:
            await self._die()

    async def _die(self) -> None:
        process = CURRENT.get()
        if process is None:
            return
        process.dead = True
        self._controllers.remove(process)
        self.report.kills += 1
        asyncio.get_running_loop().call_later(1.0, self._start_controller)
        self._dying = asyncio.get_running_loop().create_task(process.kill())
        raise Died


class _Crossed(Provider):
    """Each verb is crossed twice."""

    def __init__(self, world: CrashWorld, region: str) -> None:
        super().__init__(world.cloud, region)
        self._world = world

    async def ensure(self, spec: ReplicaSpec) -> None:
        await self._world.cross("before ensure")
        await super().ensure(spec)
        await self._world.cross("after ensure")

    async def describe(self, replica_id: str) -> Description:
        await self._world.cross("before describe")
        return await super().describe(replica_id)

    async def list_owned(self) -> Sequence[str]:
        await self._world.cross("before list_owned")
        return await super().list_owned()

    async def drain(self, replica_id: str) -> None:
        await self._world.cross("before drain")
        await super().drain(replica_id)
        await self._world.cross("after drain")

    async def terminate(self, replica_id: str) -> None:
        await self._world.cross("before terminate")
        await super().terminate(replica_id)
        await self._world.cross("after terminate")


def points(stride: int, first: int = 1) -> Iterator[tuple[Point, str]]:
    """Every `stride`th point of a run, with each kind of failure and for an endpoint of each warmth in turn."""
    for warmth in WARMTHS:
        count = run_point(None, warmth).requests
        for number in range(first, count + 1, stride):
            for kind in KINDS:
                yield Point(number, kind), warmth


def run_point(point: Point | None, warmth: str = "cold") -> Report:
    """Raises Broken. `requests` of the report is how many points there are."""
    return run_world(lambda folder: CrashWorld(folder, point, warmth), f"{point} {warmth}")
