"""One seed's world: endpoints, controllers that die, gateways, clients, trouble, and what must hold at every moment."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from control_plane.autoscaler.loop import Autoscaler
from control_plane.config import Timing
from control_plane.domain import ReplicaState
from control_plane.errors import IngleError
from control_plane.gateway.activator import Activator
from control_plane.gateway.demand import DemandTracker
from control_plane.gateway.snapshot import SnapshotKeeper
from control_plane.reconciler.loop import Reconciler
from control_plane.security.secret import Secret
from control_plane.store import endpoints, replicas, tenants
from control_plane.store.database import Store
from tests.sim import money
from tests.sim.clock import Process
from tests.sim.cloud import Cloud, Faults, Provider
from tests.sim.gateway import Gateway
from tests.sim.report import Broken, Report

EPOCH = 1_800_000_000.0
REGIONS = ("north", "south")
TIMING = Timing(
    tick=2.0, starting_tick=0.5, probe_timeout=1.0, liveness_grace=6.0, start_timeout=60.0, drain_settle=1.0,
    drain_timeout=20.0, stable_after=10.0, backoff_base=1.0, backoff_cap=10.0, max_failures=1000, lease=8.0, sweep=10.0,
    snapshot_poll=1.0, demand_report=2.0, demand_stale=15.0,
)  # fmt: skip
TROUBLE_SECONDS = 150.0
CALM_SECONDS = 150.0
ORPHAN_SECONDS = 90.0
"""How long a machine may stand that no row wants, while no controller dies: two sweeps, two slow calls, one that is
given up on after ten seconds, and its end."""
_SETTLE_SECONDS = 60.0
"""What was slow or lost in the trouble is known by then."""
_LOOK_SECONDS = 2.5
"""What is looked at each second may have happened so long before."""

_ROWS = "SELECT id, endpoint_id, region, generation, state FROM replicas"
_BOUNDS = "SELECT id, name, runtime_generation, max_replicas FROM endpoints WHERE deleted_at IS NULL"


class Row(NamedTuple):
    """A replica's row."""

    id: str
    endpoint_id: str
    region: str
    generation: int
    state: ReplicaState


@dataclass
class World:
    seed: int
    folder: Path
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        self.report = Report(self.seed)
        self.chance = random.Random(self.seed)
        self.cloud = Cloud(self.chance)
        self.url = f"sqlite+aiosqlite:///{self.folder}/db"
        self._hash = hashlib.sha256()
        self._ids = 0
        self._database_down_until = 0.0
        self._calm = False
        self._controllers: list[Process] = []
        self._born = 0
        self._orphan_since: dict[str, float] = {}
        self._seen_orphans: set[str] = set()
        self._swept: set[str] = set()
        """Those that a controller says it ended as such; others end by a call that was on its way."""
        self.skew = self.chance.choice((0.0, 2.0, 300.0))
        self._jump = 0.0
        """How far the controllers' clocks were set in mid-run."""
        self.faults: list[str] = []
        self._gone_since: dict[str, float] = {}
        self._exact = self.skew == 0.0 and self.chance.random() < 0.7
        """All clocks tell the same, and nobody sets one."""
        self._stop = money.Stop(self.cloud)

    def note(self, *what: object) -> None:
        self._hash.update(f"{asyncio.get_running_loop().time():.6f} {what}\n".encode())

    def heard(self, name: str, **fields: Any) -> None:
        """What a loop logs. A fault that it got over is still a fault."""
        if name.endswith(".fault"):
            error = fields.get("error")
            cause = error.__cause__ if isinstance(error, BaseException) else None
            self.faults.append(f"{name}: {error!r} {cause or ''}"[:1000])
        if name == "replica.orphan":
            self._swept.add(str(fields["replica"]))
        self.note(name)

    def new_id(self, prefix: str) -> str:
        self._ids += 1
        return f"{prefix}_{self.seed:x}x{self._ids:06d}"

    # ---- processes

    def _trouble(self) -> tuple[float, bool]:
        """What a statement may meet: a short wait, or a database that is away."""
        if asyncio.get_running_loop().time() < self._database_down_until:
            return 0.05, True
        if self.chance.random() < 0.05:
            return self.chance.uniform(0.0, 0.05 if self._calm else 0.5), False
        return 0.0, False

    def _process(self, name: str) -> Process:
        return Process(name, self._trouble)

    def _clock(self, skew: float, *, jumps: bool = False) -> Callable[[], float]:
        loop = asyncio.get_running_loop()
        return lambda: EPOCH + loop.time() + skew + (self._jump if jumps else 0.0)

    def _start_controller(self) -> None:
        self._born += 1
        process = self._process(f"controller {self._born}")
        store = Store(self.url)
        clock = self._clock(self.chance.uniform(-self.skew, self.skew), jumps=True)
        providers = {region: self._provider(region) for region in REGIONS}
        owner = f"sim{self._born}:{os.getpid()}:{self._born}"
        loop = asyncio.get_running_loop()
        reconciler = Reconciler(
            store, providers, TIMING, owner=owner, clock=clock, jitter=self.chance.random, monotonic=loop.time
        )
        process.spawn(reconciler.run())
        process.spawn(Autoscaler(store, TIMING, clock=clock, monotonic=loop.time).run())
        self._controllers.append(process)
        self.note("start", process.name)

    def _provider(self, region: str) -> Provider:
        return Provider(self.cloud, region)

    async def _kill_controller(self) -> None:
        process = self._controllers.pop(self.chance.randrange(len(self._controllers)))
        self._orphan_since.clear()  # it may have been the one that looked
        self.report.kills += 1
        self.note("kill", process.name)
        await process.kill()

    # ---- the run

    async def run(self) -> Report:
        store = Store(self.url)
        await self._create_endpoints(store)
        for _ in range(self.chance.choice((1, 2))):
            self._start_controller()
        gateways = [await self._start_gateway(region) for region in REGIONS]
        calls: set[asyncio.Task[None]] = set()
        background = [
            asyncio.create_task(self._traffic(gateways, calls)),
            asyncio.create_task(self._chaos(store)),
            asyncio.create_task(self._watch()),
        ]
        try:
            await self._over(background, TROUBLE_SECONDS)
            background[0].cancel()
            self._calm_down()
            await self._over(background[1:], CALM_SECONDS)
            for call in list(calls):
                if not call.done():
                    raise Broken("a request had no answer")
                call.result()
            if self.faults:
                raise Broken(self.faults[0])
            await self._converged(store)
        finally:
            for task in (*background, *calls):
                task.cancel()
            await asyncio.gather(*background, *calls, return_exceptions=True)
            for process in (*self._controllers, *(gateway.process for gateway in gateways)):
                await process.kill()
            await store.close()
        self.report.machines = len(self.cloud.machines)
        self.report.trace = self._hash.hexdigest()[:16]
        return self.report

    async def _over(self, background: list[asyncio.Task[None]], seconds: float) -> None:
        """Let time pass; what fails in the background fails the run."""
        done, _ = await asyncio.wait(background, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def _create_endpoints(self, store: Store) -> None:
        now = self._clock(0.0)()
        async with store.write() as session:
            tenant = await tenants.create_tenant(session, "acme", now)
            await money.set_prices(session, now - 20_000)
            for number in range(self.chance.choice((1, 2, 3))):
                spec: dict[str, Any] = {
                    "name": f"chat{number}",
                    "region": self.chance.choice(REGIONS),
                    "model": "m",
                    "gpu": None,
                    "gpus": 0,
                    "engine_args": [],
                    "min_replicas": self.chance.choice((0, 0, 1)),
                    "max_replicas": self.chance.choice((1, 2, 3)),
                    "idle_timeout": self.chance.choice((5.0, 20.0, 60.0)),
                    "max_wait": 60.0,
                    "warmth": self.chance.choice(("cold", "cold", "ember", "asleep")),
                    "spend_limit": self.chance.choice(money.LIMITS),
                }
                await endpoints.create_endpoint(session, tenant.id, spec, now)

    async def _start_gateway(self, region: str) -> Gateway:
        process, store = self._process(f"gateway {region}"), Store(self.url)
        clock = self._clock(0.0)
        keeper = SnapshotKeeper(store, Secret(b"s" * 32), self.folder / region, region, poll=1.0, clock=clock)
        demand = DemandTracker(store, f"gw {region}", region, interval=TIMING.demand_report, clock=clock)
        activator = Activator(keeper, demand, max_held=1000, max_bytes=1 << 30, clock=clock, draw=self.chance.random)
        await process.spawn(keeper.start())
        process.spawn(keeper.run())
        process.spawn(demand.run(keeper))
        return Gateway(self, region, process, keeper, demand, activator)

    async def _traffic(self, gateways: list[Gateway], calls: set[asyncio.Task[None]]) -> None:
        """Bursts, and silences in which endpoints go to sleep."""
        while True:
            await asyncio.sleep(self.chance.choice((0.1, 1.0, 5.0, 25.0)))
            for _ in range(self.chance.choice((1, 1, 3, 12))):
                gateway = self.chance.choice(gateways)
                names = [
                    name for name, route in gateway.keeper.current.routes.items() if route.region == gateway.region
                ]
                if names:
                    call = gateway.process.spawn(gateway.request(self.chance.choice(sorted(names))))
                    calls.add(call)

    async def _chaos(self, store: Store) -> None:
        """Faults come and go; controllers die and others start; machines die or hang; operators change their minds."""
        while not self._calm:
            await asyncio.sleep(self.chance.uniform(1.0, 12.0))
            if self._calm:
                return
            what = self.chance.randrange(10)
            standing = [machine for machine in self.cloud.standing() if not machine.lost]
            if what == 0 and self._controllers:
                await self._kill_controller()
                if not self._controllers or self.chance.random() < 0.7:
                    await asyncio.sleep(self.chance.uniform(0.0, 5.0))
                    self._start_controller()
            elif what == 1 and len(self._controllers) < 3:
                self._start_controller()
            elif what == 2:
                self._database_down_until = asyncio.get_running_loop().time() + self.chance.uniform(0.5, 6.0)
            elif what == 3:
                refuse, time_out, lost = (self.chance.choice((0.0, 0.2, 0.4)) * self.chance.random() for _ in range(3))
                self.cloud.faults = Faults(refuse, time_out, lost, slow=self.chance.choice((0.0, 0.3, 0.9)))
            elif what == 4 and standing:
                self.cloud.lose(self.chance.choice(standing))
            elif what == 5 and standing:
                self.chance.choice(standing).hung = True
            elif what == 6 and not self._exact:
                self._jump = self.chance.choice((0.0, 3600.0, -3600.0))
            elif what == 7:
                await self._strand(store)
            elif what >= 8:
                await self._operate(store)
            self.note("chaos", what)

    async def _strand(self, store: Store) -> None:
        """Who asks for a machine dies, and nobody wants it any more before it is there."""
        before, self.cloud.faults = self.cloud.faults, Faults(slow_create=1.0)
        await self._change_all(store, {"paused": False, "model": f"m{self._born}+"})
        for _ in range(300):
            if self.cloud.under_way or self._calm:
                break
            await asyncio.sleep(0.05)
        self.cloud.faults = before if not self._calm else Faults()
        while self.cloud.under_way and self._controllers:
            await self._kill_controller()
        await self._change_all(store, {"paused": True})
        if not self._controllers:
            self._start_controller()

    async def _change_all(self, store: Store, changes: dict[str, Any]) -> None:
        with suppress(IngleError):
            async with store.write() as session:
                for endpoint in await endpoints.list_endpoints(session):
                    await endpoints.update_endpoint(session, endpoint.name, changes, self._clock(0.0)())

    async def _operate(self, store: Store) -> None:
        with suppress(IngleError):
            async with store.write() as session:
                known = await endpoints.list_endpoints(session)
                if known:
                    endpoint = self.chance.choice(known)
                    pause = {"paused": not endpoint.paused}
                    model = {"model": f"m{self._born}", "canary": None}
                    changes = self.chance.choice(
                        (pause, pause, model, {"model": "bad"}, {**model, "canary": 20}, {"warmth": "ember"})
                    )
                    await endpoints.update_endpoint(session, endpoint.name, changes, self._clock(0.0)())

    def _calm_down(self) -> None:
        self._calm = True
        self.cloud.faults = Faults()
        self._database_down_until = 0.0
        if not self._controllers:
            self._start_controller()

    # ---- what must hold

    async def _watch(self) -> None:
        """By a reader of its own, which trouble spares: what is looked at each second is looked at often."""
        with closing(sqlite3.connect(self.folder / "db")) as reader:
            while True:
                await asyncio.sleep(1.0)
                rows = {
                    row[0]: Row(row[0], row[1], row[2], row[3], ReplicaState(row[4])) for row in reader.execute(_ROWS)
                }
                live = [row for row in rows.values() if row.state is not ReplicaState.TERMINATED]
                self._check_machines(rows)
                self._check_numbers(reader.execute(_BOUNDS).fetchall(), live)
                now = asyncio.get_running_loop().time()
                self._check_orphans(rows, now)
                if self._calm:
                    self._stop.check(reader, now, exact=self._exact)
                self.note(sorted((row.id, str(row.state)) for row in live))

    def _check_machines(self, rows: dict[str, Row]) -> None:
        for name, count in self.cloud.creations.items():
            if count > 1:
                raise Broken(f"{name} was started {count} times")
        for machine in self.cloud.standing():
            row = rows.get(machine.replica_id)
            if row is None:
                raise Broken(f"{machine.replica_id} was started without a row")
            if row.region != machine.region:
                raise Broken(f"{machine.replica_id} runs in {machine.region}, not {row.region}")
            # a create that was under way when its row was ended may still take effect: then it is swept
            if row.state is ReplicaState.TERMINATED:
                seen = self._gone_since.setdefault(row.id, asyncio.get_running_loop().time())
                if machine.created_at < seen - _LOOK_SECONDS:
                    raise Broken(f"{machine.replica_id} is called terminated and stands")

    def _check_numbers(self, bounds: list[tuple[str, str, int, int]], live: list[Row]) -> None:
        """Never above the maximum, save for a generation that is being replaced."""
        for endpoint_id, name, generation, most in bounds:
            current = [
                row
                for row in live
                if row.endpoint_id == endpoint_id and row.state.active and row.generation >= generation
            ]
            if len(current) > most:
                raise Broken(f"{name} has {len(current)} replicas, at most {most} are wanted")

    def _check_orphans(self, rows: dict[str, Row], now: float) -> None:
        orphans = {
            name for name, row in rows.items() if row.state is ReplicaState.TERMINATED and self.cloud.exists(name)
        }
        if not self._controllers or now < self._database_down_until:
            self._orphan_since.clear()
        for name in list(self._orphan_since):
            if name not in orphans:
                del self._orphan_since[name]
        for name in orphans:
            self.report.orphans += name not in self._seen_orphans
            self._seen_orphans.add(name)
            since = self._orphan_since.setdefault(name, now)
            if self._calm and now - since > ORPHAN_SECONDS:
                raise Broken(f"{name} has stood for {now - since:.0f} s and nobody wants it")

    async def _converged(self, store: Store) -> None:
        """After the calm: what stands is what the rows say and the bill too, and each endpoint rests or serves."""
        now, quiet = asyncio.get_running_loop().time(), TROUBLE_SECONDS + _SETTLE_SECONDS
        async with store.read() as session:
            known = await endpoints.list_endpoints(session)
            live = await replicas.live_replicas(session)
            ours = await money.billed(session, EPOCH + quiet, EPOCH + now)
        with closing(sqlite3.connect(self.folder / "db")) as reader:
            strangers = money.strangers(reader)
            stops = money.stops(reader)
        if max(stops.values(), default=0) > 1:
            raise Broken(f"endpoints were stopped more than once for one limit: {stops}")
        if self._swept - strangers:
            raise Broken(f"{min(self._swept - strangers)} was swept, and is no drift in the ledger")
        if self._exact:
            theirs = {one.replica_id: money.charged(one, quiet, now) for one in self.cloud.machines.values()}
            money.check_bill(theirs, ours, strangers)
        standing = {machine.replica_id for machine in self.cloud.standing()}
        wanted = {replica.id for replica in live}
        # one may come to its limit in the last moments: its machine has gone, and nobody has seen so yet
        stopped = {endpoint.id for endpoint in known if endpoint.stopped}
        ending = {one.id for one in live if one.endpoint_id in stopped and one.state is ReplicaState.TERMINATING}
        if not wanted - ending <= standing <= wanted:
            raise Broken(f"the cloud has {sorted(standing - wanted)} too many and {sorted(wanted - standing)} too few")
        for endpoint in known:
            fallen = endpoint.falls_back and str(endpoint.state) == "degraded"
            # what was never seen to serve has nothing to fall back to, but what came up once it was asked for no more
            unseen_before = endpoint.model == "bad" and endpoint.stable_runtime is None
            hopeless = unseen_before and str(endpoint.state) in ("failed", "degraded")
            if endpoint.given_up and not endpoint.stopped and endpoint.reason_code != "model_not_found":
                raise Broken(f"{endpoint.name} has forgotten why it failed: {endpoint.reason_code}, {endpoint.reason}")
            unseen = endpoint.observed_generation != endpoint.generation and not endpoint.given_up
            if unseen and endpoint.canary is None:
                raise Broken(f"{endpoint.name} is still said to be at generation {endpoint.observed_generation}")
            # one may come to its limit in the last moments
            if str(endpoint.state) not in ("ready", "zero", "paused") and not (fallen or hopeless or endpoint.stopped):
                raise Broken(f"{endpoint.name} is {endpoint.state} ({endpoint.reason}) long after the trouble")
