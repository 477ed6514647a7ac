"""How long ago something was, whatever happens to the clocks of this machine and of the others.

Stamps in the database come from many clocks: skewed ones, and ones that were set meanwhile. What decisions need is an
age. A stamp's age is taken from the wall clock once, when it is first seen, and counted by the monotonic clock after.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable

OLDEST = 30 * 86_400.0
"""Seconds; no decision needs to tell older things apart."""


class Steady:
    """Remembers what it has seen, by key; `keep` forgets all else, so that this stays as small as what there is."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._seen: dict[Hashable, tuple[float, float]] = {}

    def local(self, key: Hashable, stamp: float, now: float) -> float:
        """`stamp`, written by any clock, as this process's `now` would have read then.

        A stamp that is another than at the last look was written since: it is as good as now.
        """
        moment = self._monotonic()
        known = self._seen.get(key)
        if known is None:
            known = (stamp, moment - min(OLDEST, max(0.0, now - stamp)))
            self._seen[key] = known
        elif known[0] != stamp:
            known = (stamp, moment)
            self._seen[key] = known
        return now - (moment - known[1])

    def due(self, key: Hashable, stamp: float, now: float, most: float) -> float:
        """`stamp`, a time to come that any clock wrote, as this process's `now` will read then; `most` seconds away."""
        moment = self._monotonic()
        known = self._seen.get(key)
        if known is None or known[0] != stamp:
            known = (stamp, moment + min(most, max(0.0, stamp - now)))
            self._seen[key] = known
        return now + (known[1] - moment)

    def keep(self, keys: Iterable[Hashable]) -> None:
        """Forget everything but `keys`."""
        wanted = set(keys)
        self._seen = {key: value for key, value in self._seen.items() if key in wanted}
