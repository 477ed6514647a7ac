"""Waits for an endpoint and shows on stderr what it is doing meanwhile."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from control_plane.domain import EndpointState, ReplicaState
from control_plane.errors import GaveUpWaiting, IngleError, NotFound

if TYPE_CHECKING:
    from control_plane.api.schemas import Endpoint
    from control_plane.client import AdminClient

_POLL_SECONDS = 0.2
Goal = Callable[["Endpoint"], bool]


def serving(endpoint: Endpoint) -> bool:
    """What was asked runs."""
    if endpoint.observed_generation != endpoint.generation:
        return False
    return endpoint.state == EndpointState.READY or (endpoint.paused and endpoint.state == EndpointState.PAUSED)


def settled(endpoint: Endpoint) -> bool:
    """What was asked stands, running or not; a canary stands once it serves."""
    if endpoint.canary is not None and endpoint.observed_generation != endpoint.generation:
        return any(
            replica.state == ReplicaState.READY and replica.generation == endpoint.generation
            for replica in endpoint.replicas
        )
    return endpoint.observed_generation == endpoint.generation and endpoint.state in (
        EndpointState.READY,
        EndpointState.ZERO,
        EndpointState.PAUSED,
    )


def asleep(endpoint: Endpoint) -> bool:
    return endpoint.state in (EndpointState.ZERO, EndpointState.PAUSED)


def never(endpoint: Endpoint) -> bool:
    """For a deletion, whose goal is that there is no endpoint."""
    return False


def wait_for(client: AdminClient, name: str, goal: Goal, patience: float) -> Endpoint | None:
    """Wait until `goal`; None once the endpoint is gone and that was the goal.

    Raises IngleError where it failed for good, GaveUpWaiting after `patience` seconds.
    """
    from rich.console import Console

    console = Console(file=sys.stderr)
    began = time.monotonic()
    said = ""
    with console.status(f"{name} …") as status:
        while True:
            try:
                endpoint = client.endpoint(name)
            except NotFound:
                if goal is never:
                    return None
                raise
            text = f"{name}: {endpoint.state}" + (f" ({endpoint.reason.message})" if endpoint.reason.message else "")
            if text != said:
                said = text
                if console.is_terminal:
                    status.update(text)
                else:
                    print(text, file=sys.stderr, flush=True)
            if goal(endpoint):
                return endpoint
            if endpoint.given_up and goal is not never and goal is not asleep:
                raise IngleError(f"{name} failed: {endpoint.reason.message} ({endpoint.reason.code})")
            if time.monotonic() - began > patience:
                raise GaveUpWaiting(f"gave up waiting for {name} after {patience:g} s: it is {endpoint.state}")
            time.sleep(_POLL_SECONDS)
