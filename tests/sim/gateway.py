"""A gateway of the simulation: the real holding and routing, and requests that are numbers of seconds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from control_plane.errors import IngleError
from control_plane.gateway.activator import Activator
from control_plane.gateway.demand import DemandTracker
from control_plane.gateway.snapshot import Key, SnapshotKeeper
from tests.sim.clock import Process
from tests.sim.report import Broken

if TYPE_CHECKING:
    from tests.sim.world import World


@dataclass
class Gateway:
    """The real holding and routing of one region's gateway, with requests that are numbers of seconds."""

    world: World
    region: str
    process: Process
    keeper: SnapshotKeeper
    demand: DemandTracker
    activator: Activator

    async def request(self, name: str) -> None:
        world, loop = self.world, asyncio.get_running_loop()
        route = self.keeper.current.routes.get(name)
        if route is None:
            return
        world.report.requests += 1
        exchange: Any = _Exchange()
        key = Key(f"key{world.chance.randrange(3)}", "t", "", None)
        seconds, began = world.chance.choice((0.05, 0.5, 4.0)), loop.time()
        patience = world.chance.choice((None, None, None, 1.0))
        answer = "refused"
        try:
            async with asyncio.timeout(patience):
                with self.demand.in_flight(route, exchange):
                    answer = await self._answer(exchange, route, key, seconds)
        except TimeoutError:
            answer = "left"
        except IngleError as error:
            answer = error.code
        if loop.time() - began > route.max_wait + 2 * seconds + 5:
            raise Broken(f"a request to {name} took {loop.time() - began:.0f} s to be {answer}")
        world.report.answered += answer == "ok"
        world.report.refused += answer != "ok"
        world.note("request", name, answer)

    async def _answer(self, exchange: Any, route: Any, key: Key, seconds: float) -> str:
        tried: set[str] = set()
        held = 0.0
        while True:
            route = self.keeper.current.routes.get(route.name, route)
            target = self.activator.try_take(exchange, route, tried)
            if target is None:
                since = asyncio.get_running_loop().time()
                target = await self.activator.hold(exchange, route, key, tried, route.max_wait - held, 100)
                held += asyncio.get_running_loop().time() - since
            exchange.dispatched = True
            try:
                served = await self.world.cloud.serve(target.id, seconds)
                if served:
                    target.served()
                    return "ok"
                self.activator.failed(route, target)
            finally:
                self.activator.done(route, target, exchange.expected_tokens)
            if tried:
                return "upstream_lost"
            tried.add(target.id)
            if not self.activator.can_take(route, tried):
                return "upstream_lost"


class _Exchange:
    prefix: bytes | None = None
    expected_tokens = 100
    dispatched = False
