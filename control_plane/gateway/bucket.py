"""One limit as one gateway sees it: its part of a window, given to it by the store. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from control_plane.store.limits import Ask, Grant, Kind, window_end, window_start

_SHARE = 100
"""A gateway takes a hundredth of a limit beyond what it needs, so that it needn't ask for each request."""


@dataclass(slots=True)
class Bucket:
    """`left` is what this gateway may still use; negative is what it used beyond its part and owes.

    A bucket that isn't `shared` is this gateway's alone, and the store isn't asked.
    """

    scope: str
    kind: Kind
    limit: int
    shared: bool
    whose: str = "key"
    started_at: float = 0.0
    ends_at: float = 0.0
    used: int = 0
    left: int = 0
    touched: bool = True
    _shown: int = 0

    def has(self, amount: int, now: float) -> bool:
        return now < self.ends_at and self.left >= amount

    def alone(self, amount: int, least: int, now: float) -> None:
        """Take `amount` and a share more without asking the store; nothing where `least` isn't left."""
        start = window_start(self.kind, self.started_at, now)
        used = self.used if start == self.started_at and now < self.ends_at else 0
        room = self.limit - used
        granted = min(amount + self.limit // _SHARE, room) if room >= least else 0
        self.adopt(Grant(granted, used + granted, start))

    def ask(self, amount: int, least: int) -> Ask:
        """Ask the store for `amount`; what is owed goes along and counts as told."""
        owed, self.left = (-self.left, 0) if self.left < 0 else (0, self.left)
        return Ask(self.scope, self.kind, self.limit, least, amount + self.limit // _SHARE, owed)

    def give_back(self, now: float) -> Ask | None:
        """Tell the store what is owed, or, where nothing was asked for lately, what isn't needed."""
        if not self.shared or self.left == 0 or (self.left > 0 and (self.touched or now >= self.ends_at)):
            return None
        owed, self.left = -self.left, 0
        return Ask(self.scope, self.kind, self.limit, 1, 0, owed)

    def untold(self, ask: Ask) -> None:
        """The store never heard `ask`."""
        self.left -= ask.owed

    def adopt(self, grant: Grant) -> None:
        if grant.started_at != self.started_at:
            # What was left of the last window is void; what is owed stays owed.
            self.left = min(self.left, 0)
            self._shown = self.limit
            self.started_at, self.ends_at = grant.started_at, window_end(self.kind, grant.started_at)
        self.left += grant.granted
        self.used = grant.used

    def remaining(self, now: float) -> int:
        """What to tell a client: never negative, never more than was told before in the same window."""
        if now >= self.ends_at:
            return self.limit
        self._shown = max(0, min(self._shown, self.limit - self.used + max(0, self.left)))
        return self._shown

    def resets_in(self, now: float) -> int:
        """Whole seconds until the window ends; at least 1."""
        return max(1, math.ceil(self.ends_at - now))


@dataclass(slots=True)
class Part:
    """What one request took of a bucket."""

    bucket: Bucket
    amount: int
    started_at: float

    def settle(self, actual: int, now: float) -> None:
        """Give back what wasn't used; what was used beyond is owed. An old window's leftovers are void."""
        difference = self.amount - actual
        if difference < 0 or (self.bucket.started_at == self.started_at and now < self.bucket.ends_at):
            self.bucket.left += difference
