"""Requests that wait for a replica of one endpoint: first come, first served within a key, and keys in turn."""

from __future__ import annotations

from asyncio import Future
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from control_plane.gateway.router import Target


@dataclass(slots=True, eq=False)
class Ticket:
    """One waiting request: `turn` becomes the replica whose place it has."""

    endpoint_id: str
    key_id: str
    size: int
    tokens: int
    prefix: bytes | None
    tried: frozenset[str]
    turn: Future[Target]


class Line:
    def __init__(self) -> None:
        self._keys: OrderedDict[str, deque[Ticket]] = OrderedDict()
        self.count = 0
        self.bytes = 0

    def push(self, ticket: Ticket) -> None:
        self._keys.setdefault(ticket.key_id, deque()).append(ticket)
        self.count += 1
        self.bytes += ticket.size

    def drop(self, ticket: Ticket) -> None:
        """Forget a ticket; one that isn't there any more is none."""
        own = self._keys.get(ticket.key_id)
        if own is not None and ticket in own:
            own.remove(ticket)
            self._gone(ticket)

    def serve(self, place: Callable[[Ticket], Target | None]) -> None:
        """Give each key's first a place, in turns, until there is none left."""
        served = True
        while served:
            served = False
            for key_id in list(self._keys):
                ticket = self._keys[key_id][0]
                target = place(ticket)
                if target is None:
                    continue
                self._keys[key_id].popleft()
                self._keys.move_to_end(key_id)
                self._gone(ticket)
                ticket.turn.set_result(target)
                served = True

    def fail(self, error: Callable[[], Exception]) -> None:
        """Send all away."""
        for own in self._keys.values():
            for ticket in own:
                ticket.turn.set_exception(error())
        self._keys.clear()
        self.count = self.bytes = 0

    def _gone(self, ticket: Ticket) -> None:
        self.count -= 1
        self.bytes -= ticket.size
        if not self._keys[ticket.key_id]:
            del self._keys[ticket.key_id]
