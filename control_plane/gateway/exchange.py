"""One request's facts, gathered on its way through the gateway."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field

from aiohttp import web

from control_plane.gateway.quotas import Reservation
from control_plane.gateway.router import Target
from control_plane.gateway.snapshot import Key, Route
from control_plane.gateway.sse import Usage
from control_plane.observe.tracing import ServerSpan

_random = random.Random(os.urandom(32))  # noqa: S311  # ids are to differ, not to be secret


def new_request_id() -> str:
    return f"req_{_random.getrandbits(96):024x}"


@dataclass(slots=True)
class Exchange:
    """`path` is the replica's route, `override_model` says that the URL and not the body names the endpoint."""

    path: str
    span: ServerSpan
    request_id: str = field(default_factory=new_request_id)
    started: float = field(default_factory=time.perf_counter)
    started_at: float = field(default_factory=time.time)
    override_model: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    """For the reply, whatever it will be."""
    key: Key | None = None
    route: Route | None = None
    target: Target | None = None
    held: float = 0.0
    first_byte: float | None = None
    status: int = 0
    outcome: str = "refused"
    error: str | None = None
    streamed: bool = False
    usage: Usage | None = None
    prefix: bytes | None = None
    """What the prompt's beginning is known by."""
    expected_tokens: int = 0
    """Of prompt and reply, as far as the request tells."""
    prompt_guess: int = 0
    """Tokens of the prompt, as far as its size tells."""
    seen: int = 0
    """Pieces of content that came from the replica."""
    delivered: int = 0
    """Of those, how many were passed on."""
    dispatched: bool = False
    reservation: Reservation | None = None
    keep_alive: float | None = None
    """Seconds between comments while a stream is held, where its client asked for them."""
    response: web.StreamResponse | None = None
    """A stream that has begun: whatever happens from now on is told in it."""

    def __post_init__(self) -> None:
        self.headers |= {"x-request-id": self.request_id, "server": "ingle"}

    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def tokens(self, outcome: str) -> tuple[Usage, bool]:
        """What to bill, and whether it is an estimate: the replica's own count where there is one.

        A reply that was cut is billed for what came of it, a request that failed before its reply for nothing.
        """
        if self.usage is not None and outcome in ("ok", "error"):
            return self.usage, False
        if not self.dispatched or outcome not in ("ok", "cancelled", "upstream_lost"):
            return Usage(), outcome == "gateway_lost"
        known = self.usage or Usage(self.prompt_guess)
        return Usage(known.prompt_tokens, max(known.completion_tokens, self.seen), known.cached_tokens), True
