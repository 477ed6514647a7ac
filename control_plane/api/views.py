"""Rows and values as the admin API shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Literal

from control_plane import domain
from control_plane.api import money, schemas
from control_plane.metering.prices import PriceBook
from control_plane.observe.logs import iso
from control_plane.security.certificates import Certificate
from control_plane.store.models import ApiKeyRow, AuditRow, EventRow, TenantRow


def endpoint(
    item: domain.Endpoint,
    replicas: Sequence[domain.Replica],
    *,
    tenant: str,
    url: str,
    cold_start_ms: float | None,
) -> schemas.Endpoint:
    return schemas.Endpoint(
        id=item.id,
        name=item.name,
        url=url,
        region=item.region,
        model=item.model,
        state=item.state,
        reason=schemas.Reason(code=item.reason_code, message=item.reason),
        generation=item.generation,
        observed_generation=item.observed_generation,
        given_up=item.given_up,
        tenant=tenant,
        gpu=item.gpu,
        gpus=item.gpus,
        engine_args=list(item.engine_args),
        preset=item.preset,
        min_replicas=item.min_replicas,
        max_replicas=item.max_replicas,
        desired_replicas=item.desired_replicas,
        idle_timeout=item.idle_timeout,
        max_wait=item.max_wait,
        retention=item.retention,
        warmth=item.warmth,
        warmth_by_wait=item.warmth_by_wait,
        target=item.target,
        ttft_slo=item.ttft_slo,
        schedule=[schemas.Window(**{**asdict(window), "days": list(window.days)}) for window in item.schedule],
        spend_limit=item.spend_limit,
        canary=item.canary,
        stable_generation=item.stable_generation,
        paused=item.paused,
        limits=limits(item.quota),
        cold_start_ms=None if cold_start_ms is None else round(cold_start_ms, 1),
        replicas=[replica(one) for one in replicas],
        created_at=iso(item.created_at),
        updated_at=iso(item.updated_at),
    )


def replica(item: domain.Replica) -> schemas.Replica:
    return schemas.Replica(
        id=item.id,
        state=item.state,
        generation=item.generation,
        address=None if item.address is None else str(item.address),
        reason=schemas.Reason(code=item.reason_code, message=item.reason),
        created_at=iso(item.created_at),
        ready_at=_maybe(item.ready_at),
        terminated_at=_maybe(item.terminated_at),
        startup_ms=item.startup_ms,
        rung=item.rung,
    )


def happening(row: EventRow) -> schemas.Event:
    return schemas.Event(
        id=row.id,
        endpoint=row.endpoint_name,
        replica=row.replica_id,
        at=iso(row.at),
        kind=row.kind,
        state=row.state,
        code=row.reason_code,
        message=row.message,
    )


def tenant(row: TenantRow) -> schemas.Tenant:
    bounds = schemas.TenantLimits(**asdict(row.quota), spend_limit=row.spend_limit)
    return schemas.Tenant(id=row.id, name=row.name, limits=bounds, created_at=iso(row.created_at))


def limits(quota: domain.Quota) -> schemas.Limits:
    return schemas.Limits(**asdict(quota))


def prices(book: PriceBook) -> money.Prices:
    return money.Prices(
        version=book.version,
        effective_at=iso(book.effective_at),
        currency=book.currency,
        models={name: money.TokenPrices(**asdict(price)) for name, price in book.models.items()},
        accelerators=dict(book.accelerators),
    )


def key(row: ApiKeyRow, tenants: Mapping[str, str], now: float) -> schemas.Key:
    state: Literal["active", "expired", "revoked"] = "active"
    if row.revoked_at is not None:
        state = "revoked"
    elif row.expires_at is not None and row.expires_at <= now:
        state = "expired"
    return schemas.Key(
        id=row.id,
        name=row.name,
        tenant=tenants.get(row.tenant_id, row.tenant_id),
        prefix=row.prefix,
        state=state,
        limits=limits(row.quota),
        endpoints=row.endpoints,
        routes=row.routes,
        networks=row.networks,
        created_at=iso(row.created_at),
        expires_at=_maybe(row.expires_at),
        revoked_at=_maybe(row.revoked_at),
        rotated_to=row.rotated_to,
        last_used_at=_maybe(row.last_used_at),
    )


def certificate(item: Certificate, now: float) -> schemas.Certificate:
    return schemas.Certificate(
        name=item.name,
        serial=item.serial,
        names=list(item.names),
        not_before=iso(item.not_before),
        not_after=iso(item.not_after),
        days_left=round((item.not_after - now) / 86_400, 2),
        path=str(item.path),
    )


def audit(row: AuditRow) -> schemas.Audit:
    return schemas.Audit(
        id=row.id,
        seq=row.seq,
        hash=row.hash,
        signature=row.signature,
        at=iso(row.at),
        actor=row.actor,
        role=row.role,
        action=row.action,
        target=row.target,
        request_id=row.request_id,
        detail=row.detail,
    )


def _maybe(at: float | None) -> str | None:
    return None if at is None else iso(at)
