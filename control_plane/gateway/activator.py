"""Finds a request a replica with room, and holds it while there is none.

A place that becomes free, a snapshot that shows a replica, or one that shows that there won't be any, moves the line
of those who wait. A request never overtakes another of the same key.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection

from control_plane.domain import EndpointState
from control_plane.errors import EndpointUnavailable, IngleError, NotFound, Overloaded
from control_plane.gateway.demand import DemandTracker
from control_plane.gateway.exchange import Exchange
from control_plane.gateway.line import Line, Ticket
from control_plane.gateway.router import Target, choose
from control_plane.gateway.snapshot import Key, Route, SnapshotKeeper

_FIRST_GUESS_MS = 5000.0
_NO_HOPE = frozenset({"no_capacity", "spend_limit_reached"})


class Activator:
    """`max_held` and `max_bytes` bound the requests held per endpoint, and their bodies."""

    def __init__(
        self,
        keeper: SnapshotKeeper,
        demand: DemandTracker,
        *,
        max_held: int,
        max_bytes: int,
        clock: Callable[[], float],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._keeper = keeper
        self._demand = demand
        self._max_held = max_held
        self._max_bytes = max_bytes
        self._clock = clock
        self._draw = draw
        self._lines: dict[str, Line] = {}
        keeper.listen(self._move_all)
        keeper.hurry = lambda: bool(self._lines)

    def try_take(self, exchange: Exchange, route: Route, tried: Collection[str]) -> Target | None:
        """A place at a replica, unless others wait for one or there is none."""
        if route.name in self._lines:
            return None
        target = choose(route.targets, tried, exchange.prefix, self._clock(), route.canary, self._draw())
        if target is not None:
            target.take(exchange.expected_tokens)
        return target

    def can_take(self, route: Route, tried: Collection[str]) -> bool:
        """Whether a replica that isn't among `tried` has room now."""
        return choose(route.targets, tried, None, self._clock()) is not None

    async def hold(
        self, exchange: Exchange, route: Route, key: Key, tried: Collection[str], wait: float, size: int
    ) -> Target:
        """Wait up to `wait` seconds for a place. Raises EndpointUnavailable, Overloaded, NotFound."""
        refuse_if_hopeless(route)
        if wait <= 0:
            self._demand.want(route)
            raise _no_place(route)
        line = self._lines.get(route.name) or Line()
        if line.count >= self._max_held or line.bytes + size > self._max_bytes:
            raise Overloaded(f"the queue of {route.name} is full; try again soon", retry_after=retry_after(route))
        self._lines[route.name] = line
        turn: asyncio.Future[Target] = asyncio.get_running_loop().create_future()
        tokens = exchange.expected_tokens
        ticket = Ticket(route.endpoint_id, key.id, size, tokens, exchange.prefix, frozenset(tried), turn)
        line.push(ticket)
        self._move(route.name)
        with self._demand.held(route):
            try:
                async with asyncio.timeout(wait):
                    return await turn
            except TimeoutError:
                self._give_up(route.name, line, ticket)
                raise _no_place(self._keeper.current.routes.get(route.name, route)) from None
            except BaseException:
                self._give_up(route.name, line, ticket)
                raise

    def done(self, route: Route, target: Target, tokens: int) -> None:
        """Give a place back."""
        target.give_back(tokens)
        self._move(route.name)

    def failed(self, route: Route, target: Target) -> None:
        """Leave `target` out for a while: it couldn't be reached, or broke off."""
        self._move_later(route, target.failed(self._clock()))

    def full(self, route: Route, target: Target) -> None:
        """Send less to `target`: it has as much as it takes."""
        self._move_later(route, target.full(self._clock()))

    def _move_later(self, route: Route, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds + 0.01, self._move, route.name)

    def _give_up(self, name: str, line: Line, ticket: Ticket) -> None:
        line.drop(ticket)
        if line.count == 0 and self._lines.get(name) is line:
            del self._lines[name]
        if ticket.turn.done() and not ticket.turn.cancelled() and ticket.turn.exception() is None:
            # It got a place in the very moment in which its client went away.
            ticket.turn.result().give_back(ticket.tokens)
            self._move(name)

    def _move_all(self) -> None:
        for name in list(self._lines):
            self._move(name)

    def _move(self, name: str) -> None:
        """Let go of those who wait for something that is there now, or never will be."""
        line = self._lines.get(name)
        if line is None:
            return
        route = self._keeper.current.routes.get(name)
        if route is None:
            line.fail(lambda: no_such_endpoint(name))
        elif hopeless(route):
            line.fail(lambda: _in_vain(route))
        else:
            line.serve(lambda ticket: self._place(route, ticket))
        if line.count == 0:
            self._lines.pop(name, None)

    def _place(self, route: Route, ticket: Ticket) -> Target | None:
        if ticket.turn.done() or ticket.endpoint_id != route.endpoint_id:
            return None
        target = choose(route.targets, ticket.tried, ticket.prefix, self._clock(), route.canary, self._draw())
        if target is not None:
            target.take(ticket.tokens)
        return target


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
        raise _in_vain(route)


def _in_vain(route: Route) -> IngleError:
    code = route.reason_code or str(route.state)
    message = f"{route.name} can't serve: {route.reason or code}"
    return EndpointUnavailable(message, code=code, retry_after=retry_after(route))


def _no_place(route: Route) -> IngleError:
    if route.targets:
        return Overloaded(f"every replica of {route.name} has as much as it takes", retry_after=1)
    return EndpointUnavailable(f"{route.name} is starting; try again soon", retry_after=retry_after(route))


def no_such_endpoint(name: str) -> NotFound:
    return NotFound(
        f"The model `{name}` does not exist or you do not have access to it.", code="model_not_found", param="model"
    )


def retry_after(route: Route) -> int:
    """Whole seconds after which a start should be done, from measured starts."""
    return max(1, math.ceil((route.cold_start_ms or _FIRST_GUESS_MS) / 1000))
