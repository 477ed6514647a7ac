"""Finds a request a replica, and holds it while there is none.

Held requests of an endpoint wait first come, first served; a snapshot that shows a replica, or that there won't be
one, releases them in that order.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection

from control_plane.domain import EndpointState
from control_plane.errors import EndpointUnavailable, NotFound, Overloaded
from control_plane.gateway.demand import DemandTracker
from control_plane.gateway.snapshot import Route, SnapshotKeeper, Target

SUSPECT_SECONDS = 2.0
_FIRST_GUESS_MS = 5000.0
_NO_HOPE = frozenset({"no_capacity"})


class Activator:
    """`max_held` bounds the requests held per endpoint."""

    def __init__(
        self, keeper: SnapshotKeeper, demand: DemandTracker, *, max_held: int, clock: Callable[[], float]
    ) -> None:
        self._keeper = keeper
        self._demand = demand
        self._max_held = max_held
        self._clock = clock
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        keeper.listen(self._release)
        keeper.hurry = lambda: bool(self._waiting)

    def pick(self, route: Route, tried: Collection[str]) -> Target | None:
        """The ready replica with the fewest requests of ours open, not among `tried` and not found broken lately."""
        best: Target | None = None
        now = self._clock()
        for target in route.targets:
            if target.suspect_until > now or target.id in tried:
                continue
            if best is None or target.in_flight < best.in_flight:
                best = target
        return best

    def suspect(self, target: Target) -> None:
        """Leave `target` out for a while: it couldn't be reached."""
        target.suspect_until = self._clock() + SUSPECT_SECONDS
        asyncio.get_running_loop().call_later(SUSPECT_SECONDS + 0.01, self._release)

    async def hold(self, route: Route, tried: Collection[str], wait: float) -> Target:
        """Wait up to `wait` seconds for a replica. Raises EndpointUnavailable, Overloaded, NotFound."""
        refuse_if_hopeless(route)
        if wait <= 0:
            self._demand.want(route)
            raise starting(route)
        if self._demand.held_count(route.endpoint_id) >= self._max_held:
            raise Overloaded(
                f"{route.name} is starting and its queue is full; try again soon", retry_after=retry_after(route)
            )
        deadline = self._clock() + wait
        loop = asyncio.get_running_loop()
        with self._demand.held(route):
            while True:
                turn: asyncio.Future[None] = loop.create_future()
                queue = self._waiting.setdefault(route.name, deque())
                queue.append(turn)
                try:
                    async with asyncio.timeout(max(0.0, deadline - self._clock())):
                        await turn
                except TimeoutError:
                    raise starting(self._keeper.current.routes.get(route.name, route)) from None
                finally:
                    if not turn.done() or turn.cancelled():
                        self._drop(route.name, turn)
                fresh = self._keeper.current.routes.get(route.name)
                if fresh is None or fresh.endpoint_id != route.endpoint_id:
                    raise no_such_endpoint(route.name)
                refuse_if_hopeless(fresh)
                target = self.pick(fresh, tried)
                if target is not None:
                    return target

    def _release(self) -> None:
        """Let go of those who wait for something that is there now, or never will be."""
        for name in list(self._waiting):
            route = self._keeper.current.routes.get(name)
            if route is None or route.targets or hopeless(route):
                for turn in self._waiting.pop(name):
                    if not turn.done():
                        turn.set_result(None)

    def _drop(self, name: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(name)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[name]


def hopeless(route: Route) -> bool:
    """Whether waiting is in vain."""
    if route.targets:
        return False
    return route.state in (EndpointState.FAILED, EndpointState.PAUSED) or route.reason_code in (
        *_NO_HOPE,
        "endpoint_paused",
    )


def refuse_if_hopeless(route: Route) -> None:
    if hopeless(route):
        code = route.reason_code or str(route.state)
        raise EndpointUnavailable(
            f"{route.name} can't serve: {route.reason or code}", code=code, retry_after=retry_after(route)
        )


def starting(route: Route) -> EndpointUnavailable:
    return EndpointUnavailable(f"{route.name} is starting; try again soon", retry_after=retry_after(route))


def no_such_endpoint(name: str) -> NotFound:
    return NotFound(
        f"The model `{name}` does not exist or you do not have access to it.", code="model_not_found", param="model"
    )


def retry_after(route: Route) -> int:
    """Whole seconds after which a start should be done, from measured starts."""
    return max(1, math.ceil((route.cold_start_ms or _FIRST_GUESS_MS) / 1000))
