"""What the admin API takes and gives. The OpenAPI document is made from these models.

Durations are in seconds, times are ISO 8601 in UTC.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from control_plane.api.fields import (
    PLAIN,
    Budget,
    Canary,
    Concurrency,
    EngineArgs,
    Gpu,
    Grace,
    IdleTimeout,
    Lifetime,
    MaxWait,
    Model,
    Name,
    Network,
    PerMinute,
    Preset,
    Replicas,
    Retention,
    Route,
    Slo,
    Spend,
    Target,
    Warmth,
    Zone,
)


class Input(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Limits(Input):
    """Bounds on use; null is none."""

    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    concurrency: Concurrency | None = None
    monthly_budget: Budget | None = None


class Window(Input):
    """A part of the week with a minimum of its own; `start` and `end` are minutes after midnight in `zone`.

    `days` count from Monday, 0. Where `end` isn't after `start` it is the next day's.
    """

    days: Annotated[list[Annotated[int, Field(ge=0, le=6)]], Field(min_length=1, max_length=7)]
    start: Annotated[int, Field(ge=0, le=1439)]
    end: Annotated[int, Field(ge=0, le=1440)]
    min_replicas: Annotated[int, Field(ge=1, le=64)]
    zone: Zone = "UTC"


Schedule = Annotated[list[Window], Field(max_length=50)]


class EndpointCreate(Limits):
    name: Name
    region: Name
    model: Model
    tenant: Name = "default"
    gpu: Gpu | None = None
    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    engine_args: EngineArgs = []
    preset: Preset | None = None
    min_replicas: Replicas = 0
    max_replicas: Annotated[int, Field(ge=1, le=64)] = 1
    idle_timeout: IdleTimeout = 300.0
    max_wait: MaxWait = 60.0
    retention: Retention = 90 * 86_400.0
    warmth: Warmth | None = None
    """Nothing is cold, or auto where `max_wait` is given."""
    target: Target = 16.0
    ttft_slo: Slo | None = None
    schedule: Schedule = []
    spend_limit: Spend | None = None

    @model_validator(mode="after")
    def _replicas_agree(self) -> EndpointCreate:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} is more than max_replicas {self.max_replicas}")
        if self.warmth == "hot" and self.min_replicas == 0:
            raise ValueError("warmth hot needs min_replicas of 1 or more")
        if self.gpus and self.gpu is None:
            raise ValueError("gpus says how many there are to be of gpu, which is missing")
        return self


class Accepted(BaseModel):
    """An endpoint that could be made. `engine_args` are the preset's and its own."""

    name: str
    region: str
    engine_args: list[str]


class EndpointUpdate(Limits):
    model: Model | None = None
    gpu: Gpu | None = None
    gpus: Annotated[int, Field(ge=0, le=64)] | None = None
    engine_args: EngineArgs | None = None
    preset: Preset | None = None
    min_replicas: Replicas | None = None
    max_replicas: Annotated[int, Field(ge=1, le=64)] | None = None
    idle_timeout: IdleTimeout | None = None
    max_wait: MaxWait | None = None
    retention: Retention | None = None
    warmth: Warmth | None = None
    target: Target | None = None
    ttft_slo: Slo | None = None
    schedule: Schedule | None = None
    spend_limit: Spend | None = None
    canary: Canary | None = None
    paused: bool | None = None


class TenantLimits(Limits):
    """`spend_limit` bounds what the replicas of all its endpoints cost."""

    spend_limit: Spend | None = None


class TenantCreate(Input):
    name: Name


class KeyUpdate(Limits):
    """A key's limits, and what it may be used for; null is everything."""

    endpoints: Annotated[list[Name], Field(min_length=1, max_length=256)] | None = None
    routes: Annotated[list[Route], Field(min_length=1, max_length=8)] | None = None
    networks: Annotated[list[Network], Field(min_length=1, max_length=64)] | None = None


class KeyCreate(KeyUpdate):
    tenant: Name = "default"
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=PLAIN)] = "default"
    expires_in: Lifetime | None = None


class Rollback(Input):
    to: Annotated[int, Field(ge=1)] | None = None
    """A generation; the last that served before this one where nothing is said."""


class KeyRotate(Input):
    grace_seconds: Grace = 0.0


class CertificateRotate(Input):
    name: Annotated[str, Field(max_length=128)] | None = None


class Reason(BaseModel):
    code: str | None
    message: str


class Replica(BaseModel):
    id: str
    state: str
    generation: int
    address: str | None
    reason: Reason
    created_at: str
    ready_at: str | None
    terminated_at: str | None
    startup_ms: float | None
    rung: str


class Endpoint(BaseModel):
    name: str
    url: str
    region: str
    model: str
    state: str
    reason: Reason
    generation: int
    observed_generation: int
    given_up: bool
    tenant: str
    gpu: str | None
    gpus: int
    engine_args: list[str]
    """With those of the preset among them."""
    preset: str | None
    min_replicas: int
    max_replicas: int
    desired_replicas: int
    idle_timeout: float
    max_wait: float
    retention: float
    warmth: str
    warmth_by_wait: bool
    """Whether it is the cheapest that meets `max_wait`."""
    target: float
    ttft_slo: float | None
    schedule: list[Window]
    spend_limit: float | None
    canary: int | None
    stable_generation: int
    """The last that was seen to serve; 0 before any did."""
    paused: bool
    limits: Limits
    cold_start_ms: float | None
    replicas: list[Replica]
    created_at: str
    updated_at: str
    id: str


class Event(BaseModel):
    id: int
    endpoint: str
    replica: str | None
    at: str
    kind: str
    state: str
    code: str | None
    message: str


class Generation(BaseModel):
    """`outcome` is pending, serving, served, failed or superseded."""

    generation: int
    at: str
    outcome: str
    changed: list[str]
    code: str | None
    reason: str
    settled_at: str | None
    spec: dict[str, Any]


class EvidenceLine(BaseModel):
    """A line of evidence: `hash` is over `seq`, `previous` and `content`, and signed; `previous` is the one before."""

    seq: int
    content: dict[str, Any]
    previous: str
    hash: str
    signature: str


class RungFigures(BaseModel):
    """What a rung of warmth takes from a request to its first token, and costs. Times in milliseconds.

    `measured` is from how many ways up; 0 is an estimate from cold starts.
    """

    rung: str
    chosen: bool
    price_per_hour: float
    currency: str
    first_token_ms: float | None
    p95_ms: float | None
    measured: int
    phases: dict[str, float]


class Logs(BaseModel):
    replica: str
    state: str
    lines: list[str]


class Live(BaseModel):
    """An endpoint right now. Times are in seconds, rates over the last ten; null where nothing happened that tells.

    Times to the first token are those of gateways in this process, with what they held; else those of replicas.
    """

    endpoint: str
    region: str
    state: str
    at: float
    """Seconds since the epoch."""
    in_flight: int
    held: int
    running: int
    """Sequences in replicas' batches, and those `waiting` for a place in one."""
    waiting: int
    replicas: int
    desired: int
    ttft_p50: float | None
    ttft_p95: float | None
    tpot: float | None
    tokens_per_s: float | None
    kv_usage: float | None
    hit_ratio: float | None
    cost_per_hour: float
    currency: str


class ColdStart(BaseModel):
    replica: str
    at: str
    total_ms: float
    phases: dict[str, float]
    """Milliseconds."""


class Region(BaseModel):
    name: str
    jurisdiction: str | None
    provider: str
    reachable: bool
    """Whether the provider answered just now."""
    trouble: str | None
    """Why it didn't, or why nothing can be started."""
    accelerators: dict[str, int]
    """What it offers, and how many of it a replica may have at most."""
    url: str
    gateway: Literal["up", "silent"]
    endpoints: int


class Tenant(BaseModel):
    id: str
    name: str
    limits: TenantLimits
    created_at: str


class Key(BaseModel):
    id: str
    name: str
    tenant: str
    prefix: str
    state: Literal["active", "expired", "revoked"]
    limits: Limits
    endpoints: list[str] | None
    routes: list[str] | None
    networks: list[str] | None
    created_at: str
    expires_at: str | None
    revoked_at: str | None
    rotated_to: str | None
    last_used_at: str | None


class NewKey(Key):
    """A key just made. `secret` is shown this once."""

    secret: str


class Certificate(BaseModel):
    name: str
    serial: str
    names: list[str]
    not_before: str
    not_after: str
    days_left: float
    path: str


class Audit(BaseModel):
    id: int
    seq: int | None
    hash: str | None
    signature: str | None
    at: str
    actor: str
    role: str
    action: str
    target: str
    request_id: str
    detail: dict[str, Any]


class AuditFault(BaseModel):
    seq: int
    kind: Literal["changed", "missing", "reordered", "unsigned", "cut"]
    message: str


class AuditCheck(BaseModel):
    """What a walk along the whole chain found. `head` is the last record's hash: keep it elsewhere."""

    intact: bool
    records: int
    seq: int
    head: str
    faults: list[AuditFault]
    public_key: str


class Status(BaseModel):
    version: str
    ca_file: str
    regions: list[str]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorDetail
