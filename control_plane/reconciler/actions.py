"""What a plan is made from and of: patience, what was seen, actions, and the draft that collects them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from control_plane.domain import Description, Endpoint, Replica, ReplicaState, Rung

RESTING = "resting"
"""Why a replica drains that is to rest afterwards, instead of ending."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Patience, in seconds."""

    liveness_grace: float
    start_timeout: float
    drain_settle: float
    drain_timeout: float
    stable_after: float
    backoff_base: float
    backoff_cap: float
    max_failures: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What provider and probe say of a replica. `healthy` is None where nothing was probed.

    `proof` is what came of a generation that was tried on it: None where none was, else what went wrong, or "".
    """

    description: Description
    healthy: bool | None = None
    busy: int | None = None
    rung: Rung = Rung.HOT
    wake_phases: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds, of its last way up from a rung."""
    proof: str | None = None
    proof_ms: float | None = None
    """How long a proof took that came off."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Write an intent for a new replica of `generation`, which is to become as warm as `rung`, then ensure it."""

    why: str
    generation: int
    rung: Rung = Rung.HOT


@dataclass(frozen=True, slots=True)
class Ensure:
    replica_id: str


@dataclass(frozen=True, slots=True)
class Drain:
    replica_id: str


@dataclass(frozen=True, slots=True)
class Terminate:
    replica_id: str


@dataclass(frozen=True, slots=True)
class Rest:
    """Have it go down, or up, to `rung`."""

    replica_id: str
    rung: Rung


@dataclass(frozen=True, slots=True)
class Wake:
    replica_id: str


@dataclass(frozen=True, slots=True)
class ChangeReplica:
    """Write `changes` to a replica's row; a change of state is an event with `reason`."""

    replica_id: str
    changes: Mapping[str, Any]
    reason_code: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RecordColdStart:
    replica_id: str
    total_ms: float
    phases: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RecordWake:
    replica_id: str
    rung: Rung
    total_ms: float
    phases: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SettleGeneration:
    """Write what became of a generation: `serving` or `failed`."""

    generation: int
    outcome: str
    reason_code: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ChangeEndpoint:
    changes: Mapping[str, Any]


Call = Ensure | Drain | Terminate | Rest | Wake
"""Actions on a replica itself, done after all else is written."""
Action = Launch | Call | ChangeReplica | RecordColdStart | RecordWake | SettleGeneration | ChangeEndpoint


@dataclass(slots=True)
class Failure:
    """`fresh` where it is one of the generation that is asked for, and so may be that one's fault."""

    code: str
    message: str
    permanent: bool
    immediate_retry: bool = False
    fresh: bool = True


@dataclass(slots=True)
class Draft:
    """A plan in the making: replicas as they will be after the actions so far."""

    endpoint: Endpoint
    replicas: list[Replica]
    actions: list[Action] = field(default_factory=list)
    failure: Failure | None = None

    def change(self, replica: Replica, code: str | None = None, reason: str = "", **changes: Any) -> Replica:
        after = replace(replica, **changes)
        written = dict(changes)
        if "state" in changes:
            written |= {"reason_code": code, "reason": reason}
            after = replace(after, reason_code=code, reason=reason)
        self.replicas[self.replicas.index(replica)] = after
        address = written.pop("address", None)
        if address is not None:
            written |= {"host": address.host, "port": address.port}
        weights = written.pop("weights", None)
        if weights is not None:
            written |= {"weights_from": weights.source, "weights_region": weights.region}
        self.actions.append(ChangeReplica(replica.id, written, code, reason))
        return after

    def end(self, replica: Replica, code: str | None, reason: str) -> None:
        self.change(replica, code, reason, state=ReplicaState.TERMINATING)
        self.actions.append(Terminate(replica.id))

    def retire(self, replica: Replica, now: float, code: str, reason: str) -> None:
        """End it, after what it has under way."""
        if replica.state is ReplicaState.READY:
            self.change(replica, code, reason, state=ReplicaState.DRAINING, draining_at=now)
            self.actions.append(Drain(replica.id))
        elif replica.state is ReplicaState.DRAINING:
            self.change(replica, code, reason, state=ReplicaState.DRAINING)
            self.actions.append(Drain(replica.id))
        else:
            self.end(replica, code, reason)

    def fail(
        self, replica: Replica, code: str, message: str, *, permanent: bool, immediate_retry: bool = False
    ) -> None:
        fresh = self.endpoint.proven or replica.generation >= self.endpoint.runtime_generation
        self.failure = Failure(code, message, permanent, immediate_retry, fresh)
