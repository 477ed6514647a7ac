"""What the admin API takes and gives. The OpenAPI document is made from these models.

Durations are in seconds, times are ISO 8601 in UTC.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from control_plane.domain import NAME_PATTERN

Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=63, description="a DNS label")]
PLAIN = r"^[^\x00-\x1f\x7f]*$"
Model = Annotated[
    str, Field(min_length=1, max_length=2048, pattern=PLAIN, description="a model's name, path or address")
]
Gpu = Annotated[str, Field(min_length=1, max_length=64, pattern=PLAIN, description="an accelerator type")]
EngineArgs = Annotated[list[Annotated[str, Field(max_length=1024, pattern=PLAIN)]], Field(max_length=64)]
Replicas = Annotated[int, Field(ge=0, le=64)]
IdleTimeout = Annotated[float, Field(ge=1, le=86_400 * 7, description="seconds without a request before it sleeps")]
MaxWait = Annotated[float, Field(ge=0, le=3600, description="seconds that a request is held while a replica starts")]
Concurrency = Annotated[int, Field(ge=1, le=100_000, description="requests open at once")]
Lifetime = Annotated[float, Field(ge=1, le=86_400 * 3650, description="seconds until it expires")]
Grace = Annotated[float, Field(ge=0, le=86_400 * 30, description="seconds that the old key still works")]
Warmth = Literal["cold", "hot"]


class Input(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EndpointCreate(Input):
    name: Name
    region: Name
    model: Model
    tenant: Name = "default"
    gpu: Gpu | None = None
    gpus: Annotated[int, Field(ge=0, le=1)] = 0
    engine_args: EngineArgs = []
    min_replicas: Replicas = 0
    max_replicas: Annotated[int, Field(ge=1, le=64)] = 1
    idle_timeout: IdleTimeout = 300.0
    max_wait: MaxWait = 60.0
    warmth: Warmth = "cold"

    @model_validator(mode="after")
    def _replicas_agree(self) -> EndpointCreate:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} is more than max_replicas {self.max_replicas}")
        if self.warmth == "hot" and self.min_replicas == 0:
            raise ValueError("warmth hot needs min_replicas of 1 or more")
        return self


class EndpointUpdate(Input):
    model: Model | None = None
    gpu: Gpu | None = None
    engine_args: EngineArgs | None = None
    min_replicas: Replicas | None = None
    max_replicas: Annotated[int, Field(ge=1, le=64)] | None = None
    idle_timeout: IdleTimeout | None = None
    max_wait: MaxWait | None = None
    warmth: Warmth | None = None
    paused: bool | None = None


class TenantCreate(Input):
    name: Name


class KeyCreate(Input):
    tenant: Name = "default"
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=PLAIN)] = "default"
    expires_in: Lifetime | None = None
    concurrency: Concurrency | None = None


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
    min_replicas: int
    max_replicas: int
    desired_replicas: int
    idle_timeout: float
    max_wait: float
    warmth: str
    paused: bool
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


class Logs(BaseModel):
    replica: str
    state: str
    lines: list[str]


class Region(BaseModel):
    name: str
    provider: str
    url: str
    gateway: Literal["up", "silent"]
    endpoints: int


class Tenant(BaseModel):
    id: str
    name: str
    created_at: str


class Key(BaseModel):
    id: str
    name: str
    tenant: str
    prefix: str
    state: Literal["active", "expired", "revoked"]
    concurrency: int | None
    created_at: str
    expires_at: str | None
    revoked_at: str | None
    rotated_to: str | None


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


class Usage(BaseModel):
    tenant: str
    endpoint: str
    region: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    mean_duration_ms: float | None
    mean_ttft_ms: float | None


class Audit(BaseModel):
    id: int
    at: str
    actor: str
    role: str
    action: str
    target: str
    request_id: str
    detail: dict[str, Any]


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
