"""States, transitions and value objects. Pure: imports nothing of ours.

Times are seconds since the epoch (float), durations are seconds unless a name ends in `_ms`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

NAME_PATTERN = r"^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$"
_NAME = re.compile(NAME_PATTERN)

PERMANENT_START_FAILURES = frozenset(
    {
        "model_not_found",
        "model_unreadable",
        "unsupported_architecture",
        "invalid_argument",
        "accelerator_not_offered",
        "residency_mismatch",
    }
)


def is_name(text: str) -> bool:
    """Whether `text` may name an endpoint, tenant or region: a DNS label, since it becomes part of a host name."""
    return _NAME.fullmatch(text) is not None


class EndpointState(StrEnum):
    PENDING = "pending"
    PROVISIONING = "provisioning"
    LOADING = "loading"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    ZERO = "zero"
    PAUSED = "paused"
    FAILED = "failed"
    DELETED = "deleted"


class Rung(StrEnum):
    """How warm a replica is, or an endpoint is kept while nobody calls. Each is dearer and sooner than those before.

    COLD: nothing runs. EMBER: a process waits with all it imports, without weights. ASLEEP: weights are in host memory,
    the accelerator's is free. HOT: it serves.
    """

    COLD = "cold"
    EMBER = "ember"
    ASLEEP = "asleep"
    HOT = "hot"


RESTING_RUNGS = frozenset({Rung.EMBER, Rung.ASLEEP})


class ReplicaState(StrEnum):
    """INTENDED is written before anything is started; TERMINATED only once the provider says that it is gone."""

    INTENDED = "intended"
    STARTING = "starting"
    READY = "ready"
    RESTING = "resting"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    TERMINATING = "terminating"
    TERMINATED = "terminated"

    @property
    def active(self) -> bool:
        """Counts towards what was asked: not on its way out."""
        return self in _ACTIVE


_ACTIVE = frozenset(
    {
        ReplicaState.INTENDED,
        ReplicaState.STARTING,
        ReplicaState.READY,
        ReplicaState.RESTING,
        ReplicaState.UNHEALTHY,
    }
)


ELSEWHERE = "another place"
"""The region of what a provider knows only not to be in any region of ours."""


class Phase(StrEnum):
    """What a provider says of a replica."""

    ABSENT = "absent"
    STARTING = "starting"
    RUNNING = "running"
    FAILED = "failed"
    EXITED = "exited"


class Role(StrEnum):
    """Roles of admin tokens; each includes those after it."""

    OWNER = "owner"
    OPERATOR = "operator"
    VIEWER = "viewer"

    def includes(self, other: Role) -> bool:
        order = list(Role)
        return order.index(self) <= order.index(other)


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """`HOST:PORT`, with IPv6 hosts in brackets. Raises ValueError that says what is wrong."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{text!r} is not HOST:PORT")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds on use; None means none. `monthly_budget` is in the price book's currency, by UTC month."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    monthly_budget: float | None = None


@dataclass(frozen=True, slots=True)
class KeyScope:
    """What a key may be used for; None means everything."""

    endpoints: tuple[str, ...] | None = None
    routes: tuple[str, ...] | None = None
    """Paths, such as `/v1/chat/completions`."""
    networks: tuple[str, ...] | None = None
    """Source networks in CIDR notation."""


UNLIMITED = Quota()
ANYTHING = KeyScope()


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a replica runs. A change of it means new replicas."""

    model: str
    gpu: str | None = None
    gpus: int = 0
    engine_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the week with a minimum of its own: from `start` to `end`, minutes after midnight in `zone`.

    `days` count from Monday, 0. Where `end` isn't after `start` it is the next day's.
    """

    days: tuple[int, ...]
    start: int
    end: int
    min_replicas: int
    zone: str = "UTC"


@dataclass(frozen=True, slots=True)
class SpendStop:
    """Since when an endpoint may spend nothing, by whose limit (`endpoint` or `tenant`), and how much that was."""

    at: float
    whose: str
    limit_nano: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint as stored: what was asked (`generation` counts that) and what stands."""

    id: str
    tenant_id: str
    name: str
    region: str
    model: str
    gpu: str | None
    gpus: int
    engine_args: tuple[str, ...]
    min_replicas: int
    max_replicas: int
    idle_timeout: float
    max_wait: float
    warmth: str
    paused: bool
    deleting: bool
    generation: int
    runtime_generation: int
    """The newest generation that changed what a replica runs; older replicas are replaced."""
    observed_generation: int
    desired_replicas: int
    state: EndpointState
    reason_code: str | None
    reason: str
    failures: int
    retry_at: float
    failed_generation: int
    """The generation that was given up on; 0 when none was."""
    wake_at: float
    sleep_at: float
    created_at: float
    updated_at: float
    quota: Quota = UNLIMITED
    retention: float = 90 * 86_400.0
    preset: str | None = None
    target: float = 16.0
    """Requests at once that one replica should carry."""
    ttft_slo: float | None = None
    """Seconds to the first token that 95 of 100 requests should keep."""
    schedule: tuple[Window, ...] = ()
    warmth_by_wait: bool = False
    """Whether `warmth` is the cheapest that meets `max_wait`, and is looked at again as more is measured."""
    spend_limit: float | None = None
    """What its replicas may cost in a UTC month, in the price book's currency."""
    stop: SpendStop | None = None
    """Since it has cost as much as it may, or its tenant has."""
    deleted_at: float | None = None
    """When the last of it was gone; None while there is any."""
    canary: int | None = None
    """Percent of requests that a generation gets which isn't stable yet; None rolls it out."""
    stable_generation: int = 0
    """The runtime generation that was last seen to serve, and its `stable_runtime`; 0 before any did."""
    stable_runtime: Runtime | None = None

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    @property
    def given_up(self) -> bool:
        return self.failed_generation == self.generation

    @property
    def runtime(self) -> Runtime:
        return Runtime(self.model, self.gpu, self.gpus, self.engine_args)

    @property
    def proven(self) -> bool:
        """Whether what is asked has been seen to serve."""
        return self.stable_generation >= self.runtime_generation

    @property
    def falls_back(self) -> bool:
        """Whether what is asked was given up on, and what served before it serves on."""
        return self.given_up and not self.proven and self.stable_runtime is not None

    def runtime_of(self, generation: int) -> Runtime:
        """What a replica of `generation` runs."""
        if generation < self.runtime_generation and self.stable_runtime is not None:
            return self.stable_runtime
        return self.runtime


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica as stored."""

    id: str
    endpoint_id: str
    generation: int
    region: str
    state: ReplicaState
    address: Address | None
    reason_code: str | None
    reason: str
    created_at: float
    ready_at: float | None
    unhealthy_at: float | None
    draining_at: float | None
    terminated_at: float | None
    startup_ms: float | None
    busy: int
    rung: Rung = Rung.HOT
    """How warm it is, or is to become."""
    woken_at: float | None = None
    """When it was last asked to leave its rung."""
    weights: Weights | None = None


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """All that a provider needs to start a replica."""

    replica_id: str
    endpoint_name: str
    region: str
    model: str
    gpu: str | None = None
    gpus: int = 0
    engine_args: tuple[str, ...] = ()
    rung: str = Rung.HOT


@dataclass(frozen=True, slots=True)
class Weights:
    """Where a replica read its weights: an address, and what its owner calls the region that this is in.

    `NODE` is what its node had, or fetched by itself.
    """

    source: str
    region: str | None = None


NODE = "node"


@dataclass(frozen=True, slots=True)
class Kept:
    """Something that a provider keeps for a replica, such as its secrets: where, and in which region.

    The region is as in `Description`: ours by its name, or the provider's name of another one.
    """

    what: str
    where: str
    region: str | None


@dataclass(frozen=True, slots=True)
class Description:
    """A provider's word on a replica. `phases` holds start-up phases in milliseconds."""

    phase: Phase
    address: Address | None = None
    startup_ms: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    code: str | None = None
    message: str = ""
    region: str | None = None
    """Where the provider says that it runs; None while it runs nowhere."""
    began_at: float | None = None
    """Since when it costs money by the provider's word, in seconds since the epoch; None where it doesn't say."""
    weights: Weights | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """What a provider can start in a region. `accelerator` is "cpu" or an accelerator type."""

    region: str
    accelerator: str
    max_per_replica: int
    price_per_hour: float
    fixed: bool = field(default=False, compare=False)
    """Whether the region never has more: what it offers doesn't come and go as a cluster's nodes do."""


def lack_of_accelerators(region: str, offered: Mapping[str, int], gpu: str | None, gpus: int) -> str | None:
    """Why a replica with so many of `gpu` can't be there; None where it can. `offered`: the most a replica may have."""
    wanted = max(1, gpus)
    alike = [count for name, count in offered.items() if name == gpu or (gpu == "cuda" and name != "cpu")]
    if gpu is None or wanted <= max(alike, default=0):
        return None
    has = ", ".join(f"{count} {name}" if name != "cpu" else name for name, count in sorted(offered.items()))
    return f"region {region} offers {has}, not {f'{wanted} {gpu}' if wanted > 1 else gpu}"


@dataclass(frozen=True, slots=True)
class Demand:
    """One gateway's report on one endpoint."""

    gateway_id: str
    in_flight: int
    held: int
    last_finished_at: float
    reported_at: float


@dataclass(frozen=True, slots=True)
class UsageEvent:
    """One finished request, as billed: exactly once by `request_id`."""

    request_id: str
    tenant_id: str
    key_id: str
    endpoint_id: str
    endpoint_name: str
    replica_id: str | None
    region: str
    route: str
    started_at: float
    duration_ms: float
    ttft_ms: float | None
    held_ms: float
    status: int
    outcome: str
    streamed: bool
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt's."""
    wasted_tokens: int = 0
    """Of the completion's: generated, but the client was gone."""
    estimated: bool = False
    """The replica's own count never came; tokens are what the gateway saw."""
    cost_nano: int = 0
    """In billionths of the price book's currency."""
    price_version: int = 0


@dataclass(frozen=True, slots=True)
class AlertState:
    """An alert for one set of labels. `state` is pending, firing or resolved.

    `told` has, by receiver, the firing (its `fired_at`) that it knows of, negative once it knows that it is over.
    """

    fingerprint: str
    alert: str
    labels: Mapping[str, str]
    state: str
    value: float
    summary: str
    since: float
    seen_at: float
    fired_at: float | None = None
    resolved_at: float | None = None
    told: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """How an endpoint was in a while from `at` on; None where nothing happened that would tell. Times in seconds."""

    at: int
    ttft_p50: float | None = None
    ttft_p95: float | None = None
    tpot: float | None = None
    tokens_per_s: float | None = None
    requests_per_s: float | None = None
    in_flight: float | None = None
    held: float | None = None
    kv_usage: float | None = None
    hit_ratio: float | None = None
    replicas: float | None = None
    cost: float | None = None
    """In the price book's currency, of the replicas, for the whole while."""
