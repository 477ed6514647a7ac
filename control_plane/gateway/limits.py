"""How much one key, and all keys together, may have open and in memory at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from control_plane.errors import Overloaded, RateLimited
from control_plane.gateway.snapshot import Key


class Limiter:
    """Counts open requests per key, and the bytes of all bodies that are held in memory.

    Counts of idle keys are dropped, so that this stays as small as the traffic.
    """

    def __init__(self, per_key: int, in_all: int, buffered: int) -> None:
        self._per_key = per_key
        self._in_all = in_all
        self._may_buffer = buffered
        self._buffered = 0
        self._open: dict[str, int] = {}
        self._total = 0

    @contextmanager
    def admit(self, key: Key, headers: dict[str, str]) -> Iterator[None]:
        """Hold a place for one request, and say in `headers` how many are left. Raises RateLimited, Overloaded."""
        limit = key.concurrency or self._per_key
        used = self._open.get(key.id, 0)
        headers["x-ratelimit-limit-requests"] = str(limit)
        headers["x-ratelimit-remaining-requests"] = str(max(0, limit - used - 1))
        headers["x-ratelimit-reset-requests"] = "1s"
        if used >= limit:
            raise RateLimited(f"this key may have {limit} requests open at once; wait for one to end", retry_after=1)
        if self._total >= self._in_all:
            raise Overloaded("the gateway has all the requests open that it can; try again soon", retry_after=1)
        self._open[key.id] = used + 1
        self._total += 1
        try:
            yield
        finally:
            self._total -= 1
            left = self._open[key.id] - 1
            if left:
                self._open[key.id] = left
            else:
                del self._open[key.id]

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
