"""How much may be open and in memory at once: requests per key, tenant and endpoint, requests and bytes in all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from control_plane.errors import Overloaded, RateLimited


@dataclass(frozen=True, slots=True)
class Bound:
    """At most `limit` requests open for `scope`; where it is `shared`, on all gateways together."""

    scope: str
    limit: int
    shared: bool
    whose: str


class Limiter:
    """Counts open requests, and the bytes of all bodies that are held in memory.

    What other gateways have open under a shared bound is known from their last report. Counts of what is idle are
    dropped, so that this stays as small as the traffic.
    """

    def __init__(self, in_all: int, buffered: int) -> None:
        self._in_all = in_all
        self._may_buffer = buffered
        self._buffered = 0
        self._open: dict[str, int] = {}
        self._shared: set[str] = set()
        self._elsewhere: Mapping[str, int] = {}
        self._total = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place for one request among all. Raises Overloaded."""
        if self._total >= self._in_all:
            raise Overloaded("the gateway has all the requests open that it can; try again soon", retry_after=1)
        self._total += 1
        try:
            yield
        finally:
            self._total -= 1

    @contextmanager
    def admit(self, *bounds: Bound) -> Iterator[None]:
        """A place under each of `bounds`. Raises RateLimited."""
        for bound in bounds:
            elsewhere = self._elsewhere.get(bound.scope, 0) if bound.shared else 0
            if self._open.get(bound.scope, 0) + elsewhere >= bound.limit:
                raise RateLimited(
                    f"this {bound.whose} may have {bound.limit} requests open at once; wait for one to end",
                    retry_after=1,
                )
        for bound in bounds:
            self._open[bound.scope] = self._open.get(bound.scope, 0) + 1
            if bound.shared:
                self._shared.add(bound.scope)
        try:
            yield
        finally:
            for bound in bounds:
                left = self._open[bound.scope] - 1
                if left:
                    self._open[bound.scope] = left
                else:
                    del self._open[bound.scope]

    def report(self) -> dict[str, int]:
        """Requests open here under shared bounds. One that ended is told once, as 0."""
        counts = {scope: self._open.get(scope, 0) for scope in self._shared}
        self._shared = {scope for scope, count in counts.items() if count}
        return counts

    def hear(self, elsewhere: Mapping[str, int]) -> None:
        """Take what other gateways have open, by scope."""
        self._elsewhere = elsewhere

    @contextmanager
    def room(self) -> Iterator[Callable[[int], None]]:
        """Room for one body, given back at the end. The function takes so many bytes more, or raises Overloaded."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self._buffered + size > self._may_buffer:
                raise Overloaded("the gateway holds all the requests that it has memory for", retry_after=1)
            self._buffered += size
            taken += size

        try:
            yield take
        finally:
            self._buffered -= taken
