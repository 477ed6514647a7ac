"""A controller that ends by `os._exit` at one point of its work: before, in or after a commit or a provider's call.

It is a process of its own on a database in a file and a cloud over HTTP that both outlive it; another one follows it.
After each change that an operator makes, whatever died, the cloud comes to hold what the database says.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar
from unittest import mock

import aiosqlite.core

from control_plane.autoscaler.loop import Autoscaler
from control_plane.config import Timing
from control_plane.domain import Description, ReplicaSpec
from control_plane.errors import StoreUnavailable
from control_plane.reconciler.holding import owner_name
from control_plane.reconciler.loop import Reconciler
from control_plane.store import endpoints, tenants
from control_plane.store.database import Store
from tests.sim.driver import compiled_once
from tests.sim.machines import Provider, cloud, inventory
from tests.sim.report import Broken
from tests.sim.run import migrated, quick_folder

REGION = "north"
TIMING = Timing(
    tick=0.05, starting_tick=0.02, probe_timeout=2.0, liveness_grace=5.0, start_timeout=10.0, drain_settle=0.02,
    drain_timeout=2.0, stable_after=0.1, backoff_base=0.05, backoff_cap=0.2, max_failures=1000, lease=2.0, sweep=0.2,
    demand_report=0.2, demand_stale=1.0,
)  # fmt: skip
SPEC: dict[str, Any] = {
    "name": "chat", "region": REGION, "model": "m", "gpu": None, "gpus": 0, "engine_args": [], "min_replicas": 1,
    "max_replicas": 2, "idle_timeout": 0.1, "max_wait": 60.0, "warmth": "cold",
}  # fmt: skip
STEPS: tuple[tuple[dict[str, Any], str, int], ...] = (
    ({}, "ready", 1), ({"model": "m2"}, "ready", 1), ({"min_replicas": 2}, "ready", 2),
    ({"min_replicas": 0}, "zero", 0), ({"min_replicas": 1}, "ready", 1), ({"paused": True}, "paused", 0),
    ({"paused": False}, "ready", 1),
)  # fmt: skip
"""What is changed, the state that this leads to, and how many replicas serve then."""
PATIENCE_SECONDS = 60.0
_GONE = 70
_IN_FLIGHT_SECONDS = 0.003
_SLOW_SECONDS = 0.5
"""What is being created when its controller exits comes late: after that one's successor has looked."""
_LOOKS = 25
"""Of that many `describe` and `list_owned` calls one is a point: they are all alike."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class Point:
    """The `number`th time that a controller is `side` of `what`."""

    side: Literal["before", "in", "after"]
    what: str
    number: int


@dataclass
class Crossing:
    """Counts what is crossed, and exits at `point`. Each is written to the descriptor `told`."""

    point: Point | None
    told: int
    counts: Counter[str] = field(default_factory=Counter)

    def side(self, what: str) -> str | None:
        """Which one of the next `what` the point is."""
        point = self.point
        return point.side if point is not None and (point.what, point.number) == (what, self.counts[what] + 1) else None

    async def around(self, what: str, work: Awaitable[Value], seconds: float = 0.0) -> Value:
        """`seconds`: how long after its beginning it is in it."""
        side = self.side(what)
        self.counts[what] += 1
        os.write(self.told, f"{what}\n".encode())
        if side == "before":
            os._exit(_GONE)
        if side == "in":
            asyncio.get_running_loop().call_later(seconds, os._exit, _GONE)
        result = await work
        if side == "after":
            os._exit(_GONE)
        return result


class _Crossed(Provider):
    def __init__(self, account: str, crossing: Crossing) -> None:
        super().__init__(account, REGION)
        self._crossing = crossing

    async def ensure(self, spec: ReplicaSpec) -> None:
        self.create_seconds = _SLOW_SECONDS if self._crossing.side("ensure") == "in" else 0.0
        await self._crossing.around("ensure", super().ensure(spec), _IN_FLIGHT_SECONDS)

    async def describe(self, replica_id: str) -> Description:
        return await self._crossing.around("describe", super().describe(replica_id))

    async def list_owned(self) -> Sequence[str]:
        return await self._crossing.around("list_owned", super().list_owned())

    async def drain(self, replica_id: str) -> None:
        await self._crossing.around("drain", super().drain(replica_id))

    async def terminate(self, replica_id: str) -> None:
        await self._crossing.around("terminate", super().terminate(replica_id), _IN_FLIGHT_SECONDS)


async def _control(url: str, account: str, crossing: Crossing) -> None:
    """What a controller runs, for ever."""
    commit = aiosqlite.core.Connection.commit

    async def crossed(connection: aiosqlite.core.Connection) -> None:
        await crossing.around("commit", commit(connection))

    with mock.patch.object(aiosqlite.core.Connection, "commit", crossed):
        store = Store(url)
        providers = {REGION: _Crossed(account, crossing)}
        await asyncio.gather(
            Reconciler(store, providers, TIMING, owner=owner_name()).run(), Autoscaler(store, TIMING).run()
        )


@dataclass
class Run:
    """One life of an endpoint. `point` is where its first controller exits; None for nowhere.

    With `pausing`, the operator pauses the endpoint before another one follows, and resumes it once all is gone.
    """

    folder: Path
    account: str
    point: Point | None
    pausing: bool
    pid: int = 0
    exits: int = 0
    longest: float = 0.0
    """Seconds from a controller's death until the cloud held what the database said, and that was what was wanted."""
    crossed: Counter[str] = field(default_factory=Counter)

    @property
    def url(self) -> str:
        return f"sqlite+aiosqlite:///{self.folder}/db"

    def run(self) -> None:
        asyncio.run(self._ask(None))
        with closing(sqlite3.connect(self.folder / "db")) as reader, self._controller():
            for changes, state, ready in STEPS:
                if changes:
                    asyncio.run(self._ask(changes))
                self._until(reader, state, ready)
            if self.point is not None and (self.point.side, self.point.what) == ("in", "ensure"):
                time.sleep(_SLOW_SECONDS)  # until what was being created has come
                self._until(reader, state, ready)
        self.crossed.update((self.folder / "crossed").read_text().split())

    def _until(self, reader: sqlite3.Connection, state: str, ready: int) -> None:
        began, died = time.monotonic(), 0.0
        while not self._settled(reader, state, ready):
            if time.monotonic() - began > PATIENCE_SECONDS:
                rows = reader.execute("SELECT id, state, reason FROM replicas").fetchall()
                raise Broken(f"not {state} with {ready}: the cloud has {inventory(self.account)}, the rows are {rows}")
            if self._ended():
                died = time.monotonic()
                self.exits += 1
                if self.pausing:
                    asyncio.run(self._ask({"paused": True}))
                self._start(None)
                if self.pausing:
                    self._until(reader, "paused", 0)
                    asyncio.run(self._ask({"paused": state == "paused"}))
            time.sleep(0.01)
        if died:
            self.longest = max(self.longest, time.monotonic() - died)

    def _settled(self, reader: sqlite3.Connection, state: str, ready: int) -> bool:
        """Whether all is as it was asked. Raises Broken where something stands that was never intended."""
        standing = inventory(self.account)
        rows = dict(reader.execute("SELECT id, state FROM replicas").fetchall())
        if not rows.keys() >= set(standing):
            raise Broken(f"{sorted(set(standing) - rows.keys())} were started without a row")
        live = {name: own for name, own in rows.items() if own != "terminated"}
        now = reader.execute("SELECT state, generation, observed_generation FROM endpoints").fetchone()
        return (
            now[0] == state
            and now[1] == now[2]
            and sorted(live) == standing
            and list(live.values()) == ["ready"] * ready
        )

    async def _ask(self, changes: dict[str, Any] | None) -> None:
        """As an operator does, who asks again where the database is held up. At first, for the endpoint itself."""
        store = Store(self.url)
        for _ in range(5):
            with suppress(StoreUnavailable):
                async with store.write() as session:
                    if changes is None:
                        tenant = await tenants.create_tenant(session, "acme", time.time())
                        await endpoints.create_endpoint(session, tenant.id, SPEC, time.time())
                    else:
                        await endpoints.update_endpoint(session, "chat", changes, time.time())
                break
        else:
            raise Broken("the database was held up for too long")
        await store.close()

    @contextmanager
    def _controller(self) -> Generator[None]:
        self._start(self.point)
        try:
            yield
        finally:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)

    def _start(self, point: Point | None) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            try:
                told = os.open(self.folder / "crossed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                asyncio.run(_control(self.url, self.account, Crossing(point, told)))
            finally:
                os._exit(1)

    def _ended(self) -> bool:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid and os.waitstatus_to_exitcode(status) != _GONE:
            raise Broken(f"a controller ended by itself ({os.waitstatus_to_exitcode(status)})")
        return pid != 0


def points(crossed: Counter[str]) -> list[Point]:
    """All of a run that crossed so much."""
    found: list[Point] = []
    for what, count in sorted(crossed.items()):
        if what in ("describe", "list_owned"):
            found += [Point("before", what, number) for number in range(1, count + 1, _LOOKS)]
        else:
            numbers = range(1, count + 1)
            found += [Point(side, what, number) for number in numbers for side in ("before", "in", "after")]
    return found


def run_exits(count: int) -> Iterator[Run]:
    """`count` lives, each with an exit at another point, evenly over all of them. Raises Broken, with the point."""
    with compiled_once(), cloud() as root:
        every = points(_live(f"{root}/none", None).crossed)
        for number in range(count):
            yield _live(f"{root}/{number}", every[number * len(every) // count], pausing=number % 2 == 1)


def _live(account: str, point: Point | None, *, pausing: bool = False) -> Run:
    with tempfile.TemporaryDirectory(prefix="ingle-exits-", dir=quick_folder()) as folder:
        shutil.copyfile(migrated(), f"{folder}/db")
        run = Run(Path(folder), account, point, pausing)
        try:
            run.run()
        except Broken as error:
            raise Broken(f"{point}{', pausing' * pausing}: {error}") from error
        return run
