"""The reconciler against a provider that fails in the ways that clouds fail, on a simulated clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from control_plane.config import Timing
from control_plane.domain import Address, Description, Endpoint, Offer, Phase, Replica, ReplicaSpec, ReplicaState
from control_plane.errors import ProviderError, ProviderRefused
from control_plane.metering.bill import bill
from control_plane.metering.prices import PriceBook
from control_plane.reconciler.loop import Reconciler
from control_plane.reconciler.probe import Prober
from control_plane.reconciler.stop import end_all
from control_plane.store import endpoints, replicas, spending
from control_plane.store.database import Store
from tests.control_plane.test_store import let_leases_end, make_endpoint

TIMING = Timing(drain_settle=1, backoff_base=10, backoff_cap=100, stable_after=20, lease=8, sweep=1000)


@dataclass(eq=False)
class Cloud:
    """A provider in memory. `faults` are raised by the next calls of ensure, after it created something or not."""

    address: Address
    faults: list[tuple[ProviderError, bool]] = field(default_factory=list)
    machines: dict[str, Phase] = field(default_factory=dict)
    created: list[str] = field(default_factory=list)
    stubborn: bool = False
    silent: bool = False

    async def offers(self) -> Sequence[Offer]:
        return [Offer("local-eu", "cpu", 1, 0.0)]

    async def ensure(self, spec: ReplicaSpec) -> None:
        error, creates = self.faults.pop(0) if self.faults else (None, True)
        if creates and spec.replica_id not in self.machines:
            self.machines[spec.replica_id] = Phase.RUNNING
            self.created.append(spec.replica_id)
        if error:
            raise error

    async def describe(self, replica_id: str) -> Description:
        if self.silent:
            raise ProviderError("no answer", code="timeout")
        phase = self.machines.get(replica_id, Phase.ABSENT)
        return Description(phase, self.address if phase is Phase.RUNNING else None)

    async def list_owned(self) -> Sequence[str]:
        return [name for name, phase in self.machines.items() if phase is not Phase.ABSENT]

    async def drain(self, replica_id: str) -> None:
        pass

    async def terminate(self, replica_id: str) -> None:
        if not self.stubborn:
            self.machines[replica_id] = Phase.ABSENT


@dataclass
class World:
    store: Store
    cloud: Cloud
    prober: Prober
    now: float = 1000.0

    def time(self) -> float:
        return self.now

    def controller(self, owner: str = "one", timing: Timing = TIMING) -> Reconciler:
        providers = {"local-eu": self.cloud}
        return Reconciler(
            self.store, providers, timing, owner=owner, clock=self.time, monotonic=self.time, jitter=lambda: 1.0
        )

    async def turn(self, controller: Reconciler, seconds: float = 1.0, times: int = 1) -> None:
        for _ in range(times):
            self.now += seconds
            await controller.tick(self.prober)

    async def endpoint(self) -> Endpoint:
        async with self.store.read() as session:
            return await endpoints.get_endpoint(session, "chat")

    async def replicas(self) -> list[Replica]:
        async with self.store.read() as session:
            return await replicas.live_replicas(session)

    async def ask(self, **changes: Any) -> None:
        """Change what is wanted, as the API and the autoscaler do."""
        async with self.store.write() as session:
            endpoint = await endpoints.get_endpoint(session, "chat")
            await endpoints.write_observed(session, endpoint, changes, self.now)


@asynccontextmanager
async def healthy_server() -> AsyncIterator[Address]:
    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "running": 0, "waiting": 0})

    app = web.Application()

    async def completions(request: web.Request) -> web.Response:
        return web.json_response({})

    app.router.add_get("/health", health)
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield Address("127.0.0.1", runner.addresses[0][1])
    await runner.cleanup()


@pytest.fixture
async def world(store: Store) -> AsyncIterator[World]:
    async with healthy_server() as address:
        prober = Prober(5.0)
        yield World(store, Cloud(address), prober)
        await prober.close()


async def test_no_capacity_for_a_second_leaves_the_first_alone(world: World) -> None:
    await make_endpoint(world.store)
    controller = world.controller()
    await world.turn(controller, times=3)
    (first,) = await world.replicas()
    assert first.state is ReplicaState.READY
    no_room = ProviderRefused("no room for another")
    world.cloud.faults = [(no_room, False)] * 2
    await world.ask(desired_replicas=2)
    await world.turn(controller, times=3)
    endpoint = await world.endpoint()
    assert (endpoint.state, endpoint.reason_code) == ("degraded", "no_capacity")
    assert [replica.id for replica in await world.replicas() if replica.state is ReplicaState.READY] == [first.id]
    await world.turn(controller, seconds=11.0, times=2)  # the second refusal
    assert (await world.endpoint()).failures == 2
    await world.turn(controller, times=5)  # still within its patience: nobody is asked
    assert len(world.cloud.created) == 1
    await world.turn(controller, seconds=11.0, times=5)
    assert (await world.endpoint()).state == "ready"
    await world.turn(controller, seconds=21.0)
    assert (await world.endpoint()).failures == 0
    assert len(await world.replicas()) == 2
    assert first.id in {replica.id for replica in await world.replicas()}


async def test_no_capacity_is_never_given_up_on(world: World) -> None:
    await make_endpoint(world.store)
    world.cloud.faults = [(ProviderRefused("no room"), False)] * 12
    controller = world.controller()
    await world.turn(controller, seconds=101.0, times=30)
    endpoint = await world.endpoint()
    assert not endpoint.given_up
    assert endpoint.state == "ready"


async def test_created_but_errored_is_found_and_used(world: World) -> None:
    await make_endpoint(world.store)
    world.cloud.faults = [(ProviderError("timed out after creating it"), True)]
    controller = world.controller()
    await world.turn(controller, times=4)
    (replica,) = await world.replicas()
    assert replica.state is ReplicaState.READY
    assert world.cloud.created == [replica.id]


async def test_errored_without_creating_is_asked_again_with_the_same_id(world: World) -> None:
    await make_endpoint(world.store)
    world.cloud.faults = [(ProviderError("500"), False)]
    controller = world.controller()
    await world.turn(controller, times=2)
    (before,) = await world.replicas()
    assert before.state is ReplicaState.INTENDED
    await world.turn(controller, seconds=11.0, times=3)
    (after,) = await world.replicas()
    assert (after.id, after.state) == (before.id, ReplicaState.READY)


async def test_a_permanent_refusal_ends_it(world: World) -> None:
    await make_endpoint(world.store)
    quota = ProviderRefused("the quota is 0", code="quota", permanent=True)
    world.cloud.faults = [(quota, False)]
    controller = world.controller()
    await world.turn(controller, seconds=200.0, times=6)
    endpoint = await world.endpoint()
    assert (endpoint.state, endpoint.reason_code, endpoint.given_up) == ("failed", "quota", True)
    assert world.cloud.created == []
    assert await world.replicas() == []
    async with world.store.read() as session:
        (refused,) = await spending.stories(session, 0.0, 1e9)
        assert bill([refused[1]], [PriceBook(1, 0.0, "EUR", {}, {"*": 3600.0})], 0.0, 1e9) == []


async def test_what_rests_is_changed_too(world: World) -> None:
    await make_endpoint(world.store)
    controller = world.controller()
    await world.turn(controller, times=3)
    await world.ask(desired_replicas=0)
    await world.turn(controller, times=6)
    assert (await world.endpoint()).state == "zero"
    for changes in ({"max_replicas": 3}, {"paused": True}, {"max_replicas": 4}):
        async with world.store.write() as session:
            await endpoints.update_endpoint(session, "chat", changes, world.now)
        await world.turn(controller)
        endpoint = await world.endpoint()
        assert endpoint.observed_generation == endpoint.generation
    assert endpoint.state == "paused"


async def test_terminated_is_written_when_the_provider_says_so(world: World) -> None:
    await make_endpoint(world.store)
    controller = world.controller()
    await world.turn(controller, times=3)
    world.cloud.stubborn = True
    async with world.store.write() as session:
        await endpoints.request_delete(session, "chat", world.now)
    await world.turn(controller, times=6)
    (replica,) = await world.replicas()
    assert replica.state is ReplicaState.TERMINATING
    assert (await world.endpoint()).state == "draining"
    world.cloud.stubborn = False
    await world.turn(controller, times=3)
    assert await world.replicas() == []
    async with world.store.read() as session:
        assert await endpoints.list_endpoints(session) == []


async def test_of_two_controllers_one_works_and_the_other_takes_over(world: World) -> None:
    await make_endpoint(world.store)
    one, two = world.controller("one"), world.controller("two")
    await world.turn(one, seconds=0.0)
    await world.turn(two, seconds=0.0, times=3)
    assert len(world.cloud.created) == 1
    assert [replica.state for replica in await world.replicas()] == [ReplicaState.INTENDED]
    await let_leases_end(world.store)
    await world.turn(two, seconds=9.0)
    await world.turn(two, times=2)
    assert [replica.state for replica in await world.replicas()] == [ReplicaState.READY]
    await world.turn(one, times=3)
    assert len(world.cloud.created) == 1


async def test_what_nobody_wants_is_swept(world: World) -> None:
    world.cloud.machines["rep_orphan"] = Phase.RUNNING
    await world.turn(world.controller(), seconds=2000.0)
    assert await world.cloud.list_owned() == []


async def test_a_provider_that_does_not_know_changes_nothing(world: World) -> None:
    await make_endpoint(world.store)
    controller = world.controller()
    await world.turn(controller, times=3)
    world.cloud.silent = True
    await world.turn(controller, seconds=100.0, times=5)
    assert [replica.state for replica in await world.replicas()] == [ReplicaState.READY]
    assert len(world.cloud.created) == 1
    ending = asyncio.create_task(end_all(world.store, {"local-eu": world.cloud}, within=20))
    await asyncio.sleep(0.2)
    assert not ending.done()
    world.cloud.silent = False
    await ending
    assert await world.replicas() == []


async def test_a_stop_that_cannot_reach_the_provider_ends(world: World) -> None:
    await make_endpoint(world.store)
    await world.turn(world.controller(), times=3)
    world.cloud.silent = True
    await end_all(world.store, {"local-eu": world.cloud}, within=0.2)
    assert [replica.state for replica in await world.replicas()] == [ReplicaState.READY]


async def test_rows_that_were_read_while_an_endpoint_was_worked_on_start_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first work writes its intent after the second tick has read, and before that tick's own work begins."""
    await make_endpoint(world.store)
    controller = world.controller(timing=TIMING.model_copy(update={"tick": 0.05}))
    go_on, by_id, live = asyncio.Event(), endpoints.get_endpoint_by_id, replicas.live_replicas

    async def held_up(*arguments: Any) -> Endpoint | None:
        await go_on.wait()
        return await by_id(*arguments)

    async def read_before(session: Any, ids: Any = None) -> list[Replica]:
        found = await live(session, ids)
        if ids is None and controller._working:
            go_on.set()
            await asyncio.gather(*controller._working.values())
        return found

    monkeypatch.setattr(endpoints, "get_endpoint_by_id", held_up)
    monkeypatch.setattr(replicas, "live_replicas", read_before)
    await world.turn(controller, seconds=0.1, times=3)
    assert len(world.cloud.created) == 1
    assert len(await world.replicas()) == 1
