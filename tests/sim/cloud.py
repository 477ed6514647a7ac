"""A cloud that fails as clouds do: it is slow, refuses, times out after it created something, and loses machines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from control_plane.domain import Address, Description, Offer, Phase, ReplicaSpec, Rung
from control_plane.errors import ProviderError, ProviderRefused
from control_plane.reconciler.probe import Health
from tests.sim.clock import CURRENT


@dataclass
class Machine:
    """`gone_at`: when what ends is gone; until then it costs money."""

    replica_id: str
    endpoint: str
    region: str
    address: Address
    created_at: float
    ready_at: float
    gone_at: float | None = None
    lost: bool = False
    hung: bool = False
    draining: bool = False
    busy: int = 0
    rungs: list[tuple[float, Rung]] = field(default_factory=list)
    """Since when it was how warm."""
    model: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rung(self) -> Rung:
        return self.rungs[-1][1]


@dataclass
class Faults:
    """Chances of each kind of failure; 0 after the trouble is over."""

    refuse: float = 0.0
    time_out: float = 0.0
    created_then_lost: float = 0.0
    slow: float = 0.0
    slow_create: float = 0.0


class Cloud:
    """All regions' machines, and every creation that ever was."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.faults = Faults()
        self.machines: dict[str, Machine] = {}
        self.creations: dict[str, int] = {}
        self.under_way = 0
        """Creations that were asked for and haven't happened yet."""
        self.start_seconds = (0.5, 20.0)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def exists(self, replica_id: str) -> bool:
        machine = self.machines.get(replica_id)
        return machine is not None and not (machine.gone_at is not None and self.now() >= machine.gone_at)

    def standing(self) -> list[Machine]:
        return [machine for name, machine in self.machines.items() if self.exists(name)]

    def lose(self, machine: Machine) -> None:
        """It dies on its own."""
        machine.lost = True
        machine.ended.set()

    async def serve(self, replica_id: str, seconds: float) -> bool:
        """A request at a machine: whether it was answered."""
        machine = self.machines.get(replica_id)
        if machine is None or not self._works(machine):
            return False
        machine.busy += 1
        try:
            async with asyncio.timeout(seconds):
                await machine.ended.wait()
            return False
        except TimeoutError:
            return self._works(machine) or (self.exists(replica_id) and not machine.lost and not machine.hung)
        finally:
            machine.busy -= 1

    def _works(self, machine: Machine) -> bool:
        return (
            self.exists(machine.replica_id) and not machine.lost and not machine.hung and self.now() >= machine.ready_at
        )


class Provider:
    """One region of the cloud, as a process sees it: see `control_plane.providers.base`."""

    def __init__(self, cloud: Cloud, region: str) -> None:
        self._cloud = cloud
        self._region = region

    async def offers(self) -> Sequence[Offer]:
        return [Offer(self._region, "cpu", 1, 1.0)]

    async def ensure(self, spec: ReplicaSpec) -> None:
        cloud, chance = self._cloud, self._cloud.chance
        process = CURRENT.get()
        if process is not None:
            process.check()
        draw, seconds = chance.random(), self._seconds()
        if chance.random() < cloud.faults.slow_create:
            seconds = chance.uniform(10.0, 40.0)
        fails = cloud.faults.refuse + cloud.faults.time_out
        if draw >= fails:
            # on its way: it takes effect even if who asked is dead by then
            cloud.under_way += 1
            asyncio.get_running_loop().call_later(seconds, self._create, spec)
        await asyncio.sleep(seconds)
        if draw < cloud.faults.refuse:
            raise ProviderRefused("no capacity here", code="no_capacity")
        draw -= cloud.faults.refuse
        if draw < cloud.faults.time_out:
            raise ProviderError("the request timed out", code="timeout")
        draw -= cloud.faults.time_out
        if draw < cloud.faults.created_then_lost:
            raise ProviderError("the answer was lost", code="timeout")

    def _create(self, spec: ReplicaSpec) -> None:
        """An id is started once, however often it is asked for."""
        cloud, name = self._cloud, spec.replica_id
        cloud.under_way -= 1
        if name in cloud.machines:
            return
        cloud.creations[name] = cloud.creations.get(name, 0) + 1
        address = Address("10.0.0.1", len(cloud.machines) % 60_000 + 1)
        ready_at = cloud.now() + cloud.chance.uniform(*cloud.start_seconds)
        cloud.machines[name] = Machine(
            name, spec.endpoint_name, self._region, address, cloud.now(), ready_at,
            rungs=[(cloud.now(), Rung(spec.rung))], model=spec.model,
        )  # fmt: skip

    async def describe(self, replica_id: str) -> Description:
        await self._travel()
        cloud = self._cloud
        machine = cloud.machines.get(replica_id)
        if machine is None or not cloud.exists(replica_id):
            return Description(Phase.ABSENT)
        if machine.lost:
            return Description(Phase.FAILED, code="replica_lost", message="the machine died")
        if cloud.now() < machine.ready_at:
            return Description(Phase.STARTING)
        if machine.model == "bad":
            return Description(Phase.FAILED, code="model_not_found", message="no such model")
        return Description(Phase.RUNNING, machine.address)

    async def list_owned(self) -> Sequence[str]:
        await self._travel()
        return [machine.replica_id for machine in self._cloud.standing() if machine.region == self._region]

    async def drain(self, replica_id: str) -> None:
        await self._travel()
        if self._cloud.exists(replica_id):
            self._cloud.machines[replica_id].draining = True

    async def terminate(self, replica_id: str) -> None:
        await self._travel()
        cloud = self._cloud
        if cloud.chance.random() < cloud.faults.time_out:
            raise ProviderError("the request timed out", code="timeout")
        machine = cloud.machines.get(replica_id)
        if machine is not None and machine.gone_at is None:
            machine.gone_at = cloud.now() + cloud.chance.uniform(0.0, 5.0)
            asyncio.get_running_loop().call_at(machine.gone_at, machine.ended.set)

    def _seconds(self) -> float:
        chance = self._cloud.chance
        slow = chance.random() < self._cloud.faults.slow
        return chance.uniform(1.0, 40.0) if slow else chance.uniform(0.001, 0.05)

    async def _travel(self) -> None:
        """A call takes time, sometimes much, and is over if its process died meanwhile."""
        process = CURRENT.get()
        if process is not None:
            process.check()
        await asyncio.sleep(self._seconds())
        if process is not None:
            process.check()


class Prober:
    """Asks machines how they are: see `control_plane.reconciler.probe`."""

    cloud: Cloud

    def __init__(self, timeout: float, *_: Any) -> None:
        self._timeout = timeout

    async def ask(self, replica_id: str, address: Address) -> Health:
        machine = self.cloud.machines.get(replica_id)
        if machine is None or machine.hung or machine.lost or not self.cloud.exists(replica_id):
            await asyncio.sleep(self._timeout if machine is not None and machine.hung else 0.002)
            return Health(False, None)
        await asyncio.sleep(0.002)
        return Health(True, machine.busy, machine.rung)

    async def prove(self, replica_id: str, address: Address, model: str) -> str:
        return "" if await self.cloud.serve(replica_id, 0.05) else "/v1/completions: no answer"

    async def rest(self, replica_id: str, address: Address, rung: Rung) -> None:
        self._warm(replica_id, rung)

    async def wake(self, replica_id: str, address: Address) -> None:
        await asyncio.sleep(self.cloud.chance.uniform(0.05, 1.0))
        self._warm(replica_id, Rung.HOT)

    def _warm(self, replica_id: str, rung: Rung) -> None:
        machine = self.cloud.machines.get(replica_id)
        if machine is None or machine.hung or machine.lost or not self.cloud.exists(replica_id):
            raise ProviderError("no answer", code="warmth_failed")
        if rung is not Rung.HOT and machine.busy:
            raise ProviderError("it has work", code="warmth_failed")
        if machine.rung is not rung:
            machine.rungs.append((self.cloud.now(), rung))

    async def close(self) -> None:
        pass
