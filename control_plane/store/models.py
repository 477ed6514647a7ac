"""The tables. Times are seconds since the epoch; identifiers are prefixed random strings."""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    false,
)
from sqlalchemy import String as Text_
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from control_plane.domain import KeyScope, Quota

# Conventions give every constraint a name, so that migrations can speak of it on both databases.
NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}

Short = Text_(64)
Long = Text_(2048)
BigId = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map: ClassVar = {
        float: Double,
        str: Short,
        dict[str, Any]: JSON,
        list[str]: JSON,
        list[dict[str, Any]]: JSON,
        bytes: LargeBinary,
    }


def table_of(row: type[Base]) -> Table:
    """For statements that only read, or change without reading: plain rows take a third of the time of objects."""
    return Base.metadata.tables[row.__tablename__]


class CounterRow(Base):
    """Named counters; `routes` moves with every change that a gateway must see."""

    __tablename__ = "counters"
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(BigInteger)


class QuotaColumns:
    """Bounds on use, the same for keys, tenants and endpoints."""

    requests_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    tokens_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    concurrency: Mapped[int | None]
    monthly_budget: Mapped[float | None]

    @property
    def quota(self) -> Quota:
        return quota_of(self)


def quota_of(row: Any) -> Quota:
    """The bounds in a row that has QuotaColumns."""
    return Quota(row.requests_per_minute, row.tokens_per_minute, row.concurrency, row.monthly_budget)


class TenantRow(QuotaColumns, Base):
    __tablename__ = "tenants"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    spend_limit: Mapped[float | None]
    created_at: Mapped[float]


class ApiKeyRow(QuotaColumns, Base):
    __tablename__ = "api_keys"
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    name: Mapped[str]
    hash: Mapped[bytes]
    prefix: Mapped[str]
    endpoints: Mapped[list[str] | None]
    routes: Mapped[list[str] | None]
    networks: Mapped[list[str] | None]
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    rotated_to: Mapped[str | None]
    last_used_at: Mapped[float | None]

    @property
    def scope(self) -> KeyScope:
        parts = (self.endpoints, self.routes, self.networks)
        return KeyScope(*(None if part is None else tuple(part) for part in parts))


class AdminTokenRow(Base):
    __tablename__ = "admin_tokens"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    hash: Mapped[bytes] = mapped_column(unique=True)
    role: Mapped[str]
    created_at: Mapped[float]
    revoked_at: Mapped[float | None]


class EndpointRow(QuotaColumns, Base):
    """Desired and observed state of an endpoint; the lease on it covers its replicas too."""

    __tablename__ = "endpoints"
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    name: Mapped[str]
    region: Mapped[str]
    model: Mapped[str] = mapped_column(Long)
    gpu: Mapped[str | None]
    gpus: Mapped[int]
    engine_args: Mapped[list[str]]
    min_replicas: Mapped[int]
    max_replicas: Mapped[int]
    idle_timeout: Mapped[float]
    max_wait: Mapped[float]
    warmth: Mapped[str]
    retention: Mapped[float] = mapped_column(default=90 * 86_400.0)
    """Seconds that its usage events and its own events are kept."""
    preset: Mapped[str | None]
    target: Mapped[float] = mapped_column(default=16.0, server_default="16")
    ttft_slo: Mapped[float | None]
    schedule: Mapped[list[dict[str, Any]]] = mapped_column(default=list, server_default="[]")
    warmth_by_wait: Mapped[bool] = mapped_column(default=False, server_default=false())
    spend_limit: Mapped[float | None]
    """What replicas may cost in a UTC month, in the price book's currency."""
    stopped_at: Mapped[float | None]
    stopped_by: Mapped[str | None] = mapped_column(Text_(16))
    """Whose limit it came to, and how much that was in billionths."""
    stopped_limit_nano: Mapped[int | None] = mapped_column(BigInteger)
    canary: Mapped[int | None]
    paused: Mapped[bool]
    generation: Mapped[int]
    runtime_generation: Mapped[int]
    observed_generation: Mapped[int]
    desired_replicas: Mapped[int]
    state: Mapped[str]
    reason_code: Mapped[str | None]
    reason: Mapped[str] = mapped_column(Long)
    failures: Mapped[int]
    retry_at: Mapped[float]
    failed_generation: Mapped[int]
    stable_generation: Mapped[int] = mapped_column(default=0, server_default="0")
    stable_runtime: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    wake_at: Mapped[float]
    sleep_at: Mapped[float]
    created_at: Mapped[float]
    updated_at: Mapped[float]
    delete_requested_at: Mapped[float | None]
    deleted_at: Mapped[float | None]
    lock_token: Mapped[int] = mapped_column(BigInteger, default=0)
    lock_owner: Mapped[str | None]
    lock_expires_at: Mapped[float] = mapped_column(default=0.0)

    __table_args__ = (
        CheckConstraint("min_replicas >= 0 AND max_replicas >= min_replicas AND max_replicas >= 1", name="replicas"),
    )


# A name is free again once its endpoint is gone.
Index(
    "uq_endpoints_live_name",
    EndpointRow.name,
    unique=True,
    sqlite_where=EndpointRow.deleted_at.is_(None),
    postgresql_where=EndpointRow.deleted_at.is_(None),
)


class ReplicaRow(Base):
    __tablename__ = "replicas"
    id: Mapped[str] = mapped_column(primary_key=True)
    endpoint_id: Mapped[str] = mapped_column(ForeignKey("endpoints.id"))
    generation: Mapped[int]
    region: Mapped[str]
    state: Mapped[str]
    host: Mapped[str | None] = mapped_column(Text_(255))
    port: Mapped[int | None]
    reason_code: Mapped[str | None]
    reason: Mapped[str] = mapped_column(Long)
    created_at: Mapped[float]
    ready_at: Mapped[float | None]
    unhealthy_at: Mapped[float | None]
    draining_at: Mapped[float | None]
    terminated_at: Mapped[float | None]
    startup_ms: Mapped[float | None]
    busy: Mapped[int]
    rung: Mapped[str] = mapped_column(default="hot", server_default="hot")
    woken_at: Mapped[float | None]
    weights_from: Mapped[str | None] = mapped_column(Long)
    weights_region: Mapped[str | None]
    refused_at: Mapped[float | None]

    __table_args__ = (Index("ix_replicas_endpoint_id_state", "endpoint_id", "state"),)


class EventRow(Base):
    """What happened to an endpoint, with its reason. Never deleted with the endpoint."""

    __tablename__ = "endpoint_events"
    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    endpoint_id: Mapped[str] = mapped_column(index=True)
    endpoint_name: Mapped[str]
    replica_id: Mapped[str | None] = mapped_column(index=True)
    at: Mapped[float]
    kind: Mapped[str]
    state: Mapped[str]
    reason_code: Mapped[str | None]
    message: Mapped[str] = mapped_column(Long)


class DemandRow(Base):
    __tablename__ = "demand"
    endpoint_id: Mapped[str] = mapped_column(ForeignKey("endpoints.id"), primary_key=True)
    gateway_id: Mapped[str] = mapped_column(primary_key=True)
    in_flight: Mapped[int]
    held: Mapped[int]
    last_finished_at: Mapped[float]
    reported_at: Mapped[float]


class GenerationRow(Base):
    """What an endpoint was asked to be, and what became of it: `pending`, `serving`, `failed` or `superseded`."""

    __tablename__ = "generations"
    endpoint_id: Mapped[str] = mapped_column(primary_key=True)
    generation: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[float]
    spec: Mapped[dict[str, Any]]
    changed: Mapped[list[str]]
    outcome: Mapped[str]
    reason_code: Mapped[str | None]
    reason: Mapped[str] = mapped_column(Long)
    settled_at: Mapped[float | None]


class WakeRow(Base):
    """How long a replica took from a rung of warmth to ready."""

    __tablename__ = "wakes"
    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    endpoint_id: Mapped[str]
    replica_id: Mapped[str]
    rung: Mapped[str]
    model: Mapped[str] = mapped_column(Long)
    region: Mapped[str]
    at: Mapped[float]
    total_ms: Mapped[float]
    phases: Mapped[dict[str, Any]]

    __table_args__ = (Index("ix_wakes_endpoint_id_rung_at", "endpoint_id", "rung", "at"),)


class DriftRow(Base):
    """Where a provider's inventory and our records disagreed: see `metering/ledger`."""

    __tablename__ = "drift"
    replica_id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str]
    """Empty where nobody can say."""
    endpoint_id: Mapped[str | None]
    we_say: Mapped[str]
    they_say: Mapped[str | None]
    amount_nano: Mapped[int | None] = mapped_column(BigInteger)
    currency: Mapped[str | None]
    seen_by: Mapped[str | None] = mapped_column(Long)
    """The regions of the provider whose inventory it was."""
    since: Mapped[float]
    seen_at: Mapped[float]
    settled_at: Mapped[float | None]


class ScalerRow(Base):
    """What the autoscaler must still know after a restart."""

    __tablename__ = "scaler_state"
    endpoint_id: Mapped[str] = mapped_column(primary_key=True)
    at: Mapped[float]
    state: Mapped[dict[str, Any]]


class ColdStartRow(Base):
    __tablename__ = "cold_starts"
    replica_id: Mapped[str] = mapped_column(primary_key=True)
    endpoint_id: Mapped[str] = mapped_column(index=True)
    model: Mapped[str] = mapped_column(Long)
    region: Mapped[str]
    at: Mapped[float]
    total_ms: Mapped[float]
    phases: Mapped[dict[str, Any]]


class UsageRow(Base):
    __tablename__ = "usage_events"
    request_id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str]
    key_id: Mapped[str]
    endpoint_id: Mapped[str]
    endpoint_name: Mapped[str]
    replica_id: Mapped[str | None]
    region: Mapped[str]
    route: Mapped[str]
    started_at: Mapped[float]
    duration_ms: Mapped[float]
    ttft_ms: Mapped[float | None]
    held_ms: Mapped[float]
    status: Mapped[int]
    outcome: Mapped[str]
    streamed: Mapped[bool]
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    wasted_tokens: Mapped[int] = mapped_column(BigInteger)
    estimated: Mapped[bool]
    cost_nano: Mapped[int] = mapped_column(BigInteger)
    price_version: Mapped[int]

    __table_args__ = (Index("ix_usage_events_endpoint_id_started_at", "endpoint_id", "started_at"),)


class UsageHourRow(Base):
    """Usage summed by UTC hour; kept when single events are deleted."""

    __tablename__ = "usage_hours"
    hour: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    """Seconds since the epoch at its start."""
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(primary_key=True)
    endpoint_id: Mapped[str] = mapped_column(primary_key=True)
    price_version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    endpoint_name: Mapped[str]
    region: Mapped[str]
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    wasted_tokens: Mapped[int] = mapped_column(BigInteger)
    cost_nano: Mapped[int] = mapped_column(BigInteger)
    duration_ms: Mapped[float]
    ttft_ms: Mapped[float]
    streams: Mapped[int] = mapped_column(BigInteger)


class PriceRow(Base):
    """One version of the price book, in force from `effective_at` until the next one."""

    __tablename__ = "price_books"
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    effective_at: Mapped[float]
    currency: Mapped[str]
    models: Mapped[dict[str, Any]]
    accelerators: Mapped[dict[str, Any]]


class LimitWindowRow(Base):
    """How much of a limit is given out to gateways in the window that began at `started_at`."""

    __tablename__ = "limit_windows"
    scope: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    started_at: Mapped[float]
    used: Mapped[int] = mapped_column(BigInteger)


class OpenRequestsRow(Base):
    """One gateway's report on requests open under a concurrency limit."""

    __tablename__ = "open_requests"
    scope: Mapped[str] = mapped_column(primary_key=True)
    gateway_id: Mapped[str] = mapped_column(primary_key=True)
    open: Mapped[int]
    reported_at: Mapped[float]


class AuditRow(Base):
    __tablename__ = "audit_records"
    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    at: Mapped[float]
    actor: Mapped[str]
    role: Mapped[str]
    action: Mapped[str]
    target: Mapped[str] = mapped_column(Text_(255))
    request_id: Mapped[str]
    detail: Mapped[dict[str, Any]]
    seq: Mapped[int | None] = mapped_column(BigInteger, unique=True)
    """Its place in the chain; records from before there was one have none."""
    previous: Mapped[str | None]
    hash: Mapped[str | None]
    signature: Mapped[str | None] = mapped_column(Text_(128))


class GatewayRow(Base):
    __tablename__ = "gateways"
    id: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str] = mapped_column(index=True)
    url: Mapped[str] = mapped_column(Text_(255))
    started_at: Mapped[float]
    heartbeat_at: Mapped[float]


class IdempotencyRow(Base):
    """A create's answer, kept for a repeat of the same request. Secrets are not kept: see `api/idempotency`."""

    __tablename__ = "idempotency_keys"
    actor: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(Text_(255), primary_key=True)
    fingerprint: Mapped[str]
    status: Mapped[int]
    response: Mapped[dict[str, Any]]
    created_at: Mapped[float]


class JobRow(Base):
    """Work that one process at a time does, and which one does it until when."""

    __tablename__ = "jobs"
    name: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    expires_at: Mapped[float]


class AlertRow(Base):
    """An alert for one set of labels, from when its expression first had a value until some time after it had none."""

    __tablename__ = "alerts"
    fingerprint: Mapped[str] = mapped_column(primary_key=True)
    alert: Mapped[str]
    labels: Mapped[dict[str, Any]]
    state: Mapped[str]
    value: Mapped[float]
    summary: Mapped[str] = mapped_column(Long)
    since: Mapped[float]
    seen_at: Mapped[float]
    fired_at: Mapped[float | None]
    resolved_at: Mapped[float | None]
    told: Mapped[dict[str, Any]]
    """By receiver: the firing (its `fired_at`) that it knows of, negative once it knows that it is over."""


class SilenceRow(Base):
    """Who matches all of `matchers` is not told of."""

    __tablename__ = "alert_silences"
    id: Mapped[str] = mapped_column(primary_key=True)
    matchers: Mapped[dict[str, Any]]
    comment: Mapped[str] = mapped_column(Long)
    created_by: Mapped[str]
    created_at: Mapped[float]
    ends_at: Mapped[float]


class HistoryRow(Base):
    """How an endpoint was in the `step` seconds from `at` on."""

    __tablename__ = "endpoint_history"
    endpoint_id: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    ttft_p50: Mapped[float | None]
    ttft_p95: Mapped[float | None]
    tpot: Mapped[float | None]
    tokens_per_s: Mapped[float | None]
    requests_per_s: Mapped[float | None]
    in_flight: Mapped[float | None]
    held: Mapped[float | None]
    kv_usage: Mapped[float | None]
    hit_ratio: Mapped[float | None]
    replicas: Mapped[float | None]
    cost: Mapped[float | None]

    __table_args__ = (Index("ix_endpoint_history_step_at", "step", "at"),)
