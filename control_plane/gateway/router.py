"""Which replica a request goes to. Pure: decisions take `now`.

Requests with the same beginning go to the same replica, whose cache has it, as long as that one isn't loaded beyond
the others; all else goes where the fewest tokens are outstanding. A replica that fails is left out, for longer each
time, and comes back by doubling what it may have open. One that says that it is full gets less, and slowly more again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from yarl import URL

MOST_OPEN = 1024
"""Requests that a gateway has open at one replica at most."""
PREFIX_BYTES = 256
_EJECT_SECONDS = 2.0
_EJECT_MOST = 30.0
_FULL_SECONDS = 0.2
_OVERLOAD = 1.25
_SLACK_TOKENS = 2048


@dataclass(slots=True)
class Target:
    """A replica that can be sent to. All but the first three are this gateway's own, and outlive refreshes.

    `tokens` are outstanding: prompts and expected replies of what is open. `ramp` bounds what may be open after a
    failure; 0 is no bound.
    """

    id: str
    address: str
    authorization: str = field(repr=False)
    in_flight: int = 0
    tokens: int = 0
    capacity: int = MOST_OPEN
    ramp: int = 0
    failures: int = 0
    out_until: float = 0.0
    _urls: dict[str, URL] = field(default_factory=dict, repr=False)

    def url(self, path: str, scheme: str = "http") -> URL:
        """`path` comes from the gateway's fixed list of routes, so that this cache is bounded."""
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(f"{scheme}://{self.address}{path}", encoded=True)
        return url

    def has_room(self, now: float) -> bool:
        return now >= self.out_until and self.in_flight < min(self.capacity, self.ramp or self.capacity)

    def take(self, tokens: int) -> None:
        self.in_flight += 1
        self.tokens += tokens

    def give_back(self, tokens: int) -> None:
        self.in_flight -= 1
        self.tokens -= tokens

    def failed(self, now: float) -> float:
        """Leave it out. Returns for how long, in seconds."""
        self.failures += 1
        seconds = min(_EJECT_MOST, _EJECT_SECONDS * (1 << min(self.failures - 1, 10)))
        self.out_until = now + seconds
        self.ramp = 1
        return seconds

    def full(self, now: float) -> float:
        """Send less for now: it has as much as it takes. Returns for how long nothing, in seconds."""
        self.capacity = max(1, min(self.capacity, self.in_flight - 1))
        self.out_until = max(self.out_until, now + _FULL_SECONDS)
        return _FULL_SECONDS

    def served(self) -> None:
        """It answered in good order."""
        self.capacity = min(MOST_OPEN, self.capacity + 1)
        if self.ramp:
            self.ramp *= 2
            if self.ramp >= self.capacity:
                self.ramp = self.failures = 0


def prefix_of(text: bytes) -> bytes | None:
    """What a prompt's beginning is known by; None for one so short that no cache would help."""
    return _digest(text[:PREFIX_BYTES]) if len(text) >= PREFIX_BYTES else None


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class Canary:
    """A generation that is tried: its replicas' ids, and the percent of requests that go there."""

    percent: int
    ids: frozenset[str]


def choose(
    targets: Sequence[Target],
    tried: Collection[str],
    prefix: bytes | None,
    now: float,
    canary: Canary | None = None,
    draw: float = 0.0,
) -> Target | None:
    """A target with room that isn't among `tried`, if there is one.

    `draw`, in [0, 1), decides between a canary and the others; where the one side has no room the other is asked.
    """
    free = [target for target in targets if target.id not in tried and target.has_room(now)]
    if canary is not None:
        chosen = draw * 100 < canary.percent
        free = [target for target in free if (target.id in canary.ids) is chosen] or free
    if not free:
        return None
    if prefix is not None and len(free) > 1:
        # Each replica draws a number from prefix and id: one that comes or goes moves only its own share.
        home = max(free, key=lambda target: _digest(prefix + target.id.encode()))
        mean = sum(target.tokens for target in free) / len(free)
        if home.tokens <= _OVERLOAD * mean + _SLACK_TOKENS:
            return home
    return min(free, key=lambda target: (target.tokens, target.in_flight))
