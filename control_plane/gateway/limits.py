"""How much one key, and all keys together, may have open at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from control_plane.errors import Overloaded, RateLimited
from control_plane.gateway.snapshot import Key


class Limiter:
    """Counts open requests per key. Counts of idle keys are dropped, so that this stays as small as the traffic."""

    def __init__(self, per_key: int, in_all: int) -> None:
        self._per_key = per_key
        self._in_all = in_all
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
