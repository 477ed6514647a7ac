"""One request's facts, gathered on its way through the gateway."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from control_plane.gateway.snapshot import Key, Route, Target
from control_plane.gateway.sse import Usage
from control_plane.observe.tracing import ServerSpan


@dataclass(slots=True)
class Exchange:
    """`path` is the replica's route, `override_model` says that the URL and not the body names the endpoint."""

    path: str
    span: ServerSpan
    request_id: str = field(default_factory=lambda: f"req_{os.urandom(12).hex()}")
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

    def __post_init__(self) -> None:
        self.headers |= {"x-request-id": self.request_id, "server": "ingle"}

    def elapsed(self) -> float:
        return time.perf_counter() - self.started
