"""Queries on endpoints, their events and their measured cold starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Row, delete, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import Endpoint, EndpointState, ReplicaState, Runtime, SpendStop, Window
from control_plane.errors import Conflict, NotFound, PreconditionFailed
from control_plane.store import generations
from control_plane.store.database import touch
from control_plane.store.ids import new_id
from control_plane.store.models import ColdStartRow, CounterRow, EndpointRow, EventRow, ReplicaRow, quota_of, table_of

RUNTIME_FIELDS = frozenset({"model", "gpu", "gpus", "engine_args"})
"""Fields whose change means new replicas."""
SPEC_FIELDS = (
    "model", "gpu", "gpus", "engine_args", "preset", "min_replicas", "max_replicas", "target", "ttft_slo", "schedule",
    "idle_timeout", "max_wait", "warmth", "warmth_by_wait", "retention", "requests_per_minute", "tokens_per_minute",
    "concurrency", "monthly_budget", "spend_limit",
)  # fmt: skip
"""What a generation is made of, and what a rollback brings back."""
COLD_STARTS_KEPT = 20
REPLICAS_KEPT_SECONDS = 400 * 86_400.0
"""After their end, whether or not their endpoint is there: what was spent can be explained for a year and a month."""
_STARTS_KEPT_SECONDS = 90 * 86_400.0
ENDPOINTS = table_of(EndpointRow)
_LIVE = select(ENDPOINTS).where(ENDPOINTS.c.deleted_at.is_(None)).order_by(ENDPOINTS.c.name)
_COUNTERS = table_of(CounterRow)
_REVISION = select(_COUNTERS.c.value).where(_COUNTERS.c.name == "routes")
_NEXT_REVISION = update(_COUNTERS).where(_COUNTERS.c.name == "routes").values(value=_COUNTERS.c.value + 1)

_STARTS = table_of(ColdStartRow)
_RANK = func.row_number().over(partition_by=_STARTS.c.endpoint_id, order_by=_STARTS.c.at.desc()).label("rank")
_RECENT = select(_STARTS.c.endpoint_id, _STARTS.c.total_ms, _RANK).subquery()
_COLD_STARTS = (
    select(_RECENT.c.endpoint_id, func.avg(_RECENT.c.total_ms))
    .where(_RECENT.c.rank <= 5)
    .group_by(_RECENT.c.endpoint_id)
)


def to_endpoint(row: EndpointRow | Row[Any]) -> Endpoint:
    return Endpoint(
        id=row.id,
        tenant_id=row.tenant_id,
        name=row.name,
        region=row.region,
        model=row.model,
        gpu=row.gpu,
        gpus=row.gpus,
        engine_args=tuple(row.engine_args),
        min_replicas=row.min_replicas,
        max_replicas=row.max_replicas,
        idle_timeout=row.idle_timeout,
        max_wait=row.max_wait,
        warmth=row.warmth,
        paused=row.paused,
        deleting=row.delete_requested_at is not None,
        generation=row.generation,
        runtime_generation=row.runtime_generation,
        observed_generation=row.observed_generation,
        desired_replicas=row.desired_replicas,
        state=EndpointState(row.state),
        reason_code=row.reason_code,
        reason=row.reason,
        failures=row.failures,
        retry_at=row.retry_at,
        failed_generation=row.failed_generation,
        wake_at=row.wake_at,
        sleep_at=row.sleep_at,
        created_at=row.created_at,
        updated_at=row.updated_at,
        quota=quota_of(row),
        retention=row.retention,
        preset=row.preset,
        target=row.target,
        ttft_slo=row.ttft_slo,
        schedule=tuple(Window(**{**window, "days": tuple(window["days"])}) for window in row.schedule),
        warmth_by_wait=row.warmth_by_wait,
        spend_limit=row.spend_limit,
        stop=None
        if row.stopped_at is None
        else SpendStop(row.stopped_at, row.stopped_by or "", row.stopped_limit_nano or 0),
        deleted_at=row.deleted_at,
        canary=row.canary,
        stable_generation=row.stable_generation,
        stable_runtime=None if row.stable_runtime is None else to_runtime(row.stable_runtime),
    )


def to_runtime(fields: Mapping[str, Any]) -> Runtime:
    """What a replica runs, out of its fields in JSON."""
    return Runtime(fields["model"], fields["gpu"], fields["gpus"], tuple(fields["engine_args"]))


async def bump_routes(session: AsyncSession) -> None:
    """Say that gateways must look again."""
    await session.execute(_NEXT_REVISION)
    touch(session, "routes")


async def routes_revision(session: AsyncSession) -> int:
    return await session.scalar(_REVISION) or 0


async def create_endpoint(session: AsyncSession, tenant_id: str, spec: Mapping[str, Any], now: float) -> Endpoint:
    """Write the desired state; a first replica is wanted at once, which proves the model. Raises Conflict."""
    row = EndpointRow(
        id=new_id("ep"),
        tenant_id=tenant_id,
        generation=1,
        runtime_generation=1,
        observed_generation=0,
        desired_replicas=max(1, spec["min_replicas"]),
        state=EndpointState.PENDING,
        reason_code=None,
        reason="created",
        failures=0,
        retry_at=0.0,
        failed_generation=0,
        wake_at=now,
        sleep_at=0.0,
        paused=False,
        created_at=now,
        updated_at=now,
        **spec,
    )
    session.add(row)
    try:
        await session.flush()
    except IntegrityError:
        raise Conflict(
            f"an endpoint named {spec['name']!r} exists; choose another name", code="name_taken", param="name"
        ) from None
    endpoint = to_endpoint(row)
    await generations.record(session, endpoint, _spec(row), (), now)
    add_event(session, endpoint, now, "created", None, f"model {endpoint.model} in {endpoint.region}")
    await bump_routes(session)
    touch(session, "endpoints")
    return endpoint


async def get_endpoint(session: AsyncSession, name: str) -> Endpoint:
    """The live endpoint called `name`. Raises NotFound."""
    return to_endpoint(await _row(session, name))


async def get_endpoint_by_id(session: AsyncSession, endpoint_id: str) -> Endpoint | None:
    row = await session.get(EndpointRow, endpoint_id)
    return None if row is None or row.deleted_at is not None else to_endpoint(row)


async def list_endpoints(
    session: AsyncSession,
    *,
    tenant_id: str | None = None,
    region: str | None = None,
    after: str = "",
    limit: int | None = None,
) -> list[Endpoint]:
    """Live endpoints by name, those after `after` first."""
    query = _LIVE
    if tenant_id:
        query = query.where(ENDPOINTS.c.tenant_id == tenant_id)
    if region:
        query = query.where(ENDPOINTS.c.region == region)
    if after:
        query = query.where(ENDPOINTS.c.name > after)
    if limit is not None:
        query = query.limit(limit)
    return [to_endpoint(row) for row in await session.execute(query)]


async def list_deleted(session: AsyncSession, now: float) -> list[Endpoint]:
    """Endpoints that are gone, and whose retention isn't over, or has been for a week at most."""
    query = select(EndpointRow).where(EndpointRow.deleted_at + EndpointRow.retention > now - 7 * 86_400)
    return [to_endpoint(row) for row in await session.scalars(query)]


async def update_endpoint(
    session: AsyncSession,
    name: str,
    changes: Mapping[str, Any],
    now: float,
    *,
    if_generation: int | None = None,
    kind: str = "updated",
    note: str = "",
) -> Endpoint:
    """Change what is asked; counts a generation if anything differs, and says so with `note` in an event.

    Raises NotFound, PreconditionFailed.
    """
    row = await _changeable_row(session, name)
    if if_generation is not None and row.generation != if_generation:
        raise PreconditionFailed(f"{name} is at generation {row.generation}, not {if_generation}: read it again")
    changed = {field: value for field, value in changes.items() if getattr(row, field) != value}
    if not changed:
        return to_endpoint(row)
    before = to_endpoint(row)
    for field, value in changed.items():
        setattr(row, field, value)
    row.generation += 1
    if RUNTIME_FIELDS & changed.keys():
        await _change_runtime(session, row, before)
    if changed.get("paused") is False or RUNTIME_FIELDS & changed.keys():
        row.wake_at = now
    row.failures, row.retry_at, row.updated_at = 0, 0.0, now
    await session.flush()
    endpoint = to_endpoint(row)
    await generations.record(session, endpoint, _spec(row), list(changed), now)
    add_event(session, endpoint, now, kind, None, f"generation {row.generation}: {', '.join(sorted(changed))}{note}")
    await bump_routes(session)
    touch(session, "endpoints")
    return endpoint


async def _change_runtime(session: AsyncSession, row: EndpointRow, before: Endpoint) -> None:
    """Replicas of the generations before are replaced, but where what served before is asked for again, and serves
    still: then those that run it are the new generation's."""
    after = to_endpoint(row)
    row.runtime_generation = row.generation
    if after.runtime == before.stable_runtime:
        await session.execute(
            update(ReplicaRow)
            .where(
                ReplicaRow.endpoint_id == row.id,
                ReplicaRow.generation >= before.stable_generation,
                ReplicaRow.generation < before.runtime_generation,
                ReplicaRow.state != ReplicaState.TERMINATED,  # what has ended ran as what it was
            )
            .values(generation=row.generation)
        )
        row.stable_generation = row.generation


_UNDONE_TOLD = 20


async def roll_back(
    session: AsyncSession, name: str, to: int | None, now: float, *, if_generation: int | None = None
) -> tuple[Endpoint, int]:
    """Ask again for what an earlier generation was, the last that served by default. Returns that one's number too.

    Raises NotFound, Conflict, PreconditionFailed.
    """
    row = await _changeable_row(session, name)
    found = await generations.to_return_to(session, to_endpoint(row), to)
    changes = {field: value for field, value in found.spec.items() if field in SPEC_FIELDS}
    changes["canary"] = None
    if changes.get("warmth_by_wait"):
        del changes["warmth"]  # it was a choice then, and has been made anew since
    undone = ", ".join(
        f"{one.generation} ({one.outcome}: {', '.join(one.changed)})"
        for one in reversed(await generations.history(session, row.id, _UNDONE_TOLD))
        if one.generation > found.generation
    )
    after = await update_endpoint(
        session,
        name,
        changes,
        now,
        if_generation=if_generation,
        kind="rolled_back",
        note=f", as in generation {found.generation}; undone: {undone}",
    )
    return after, found.generation


def _spec(row: EndpointRow) -> dict[str, Any]:
    return {field: getattr(row, field) for field in SPEC_FIELDS}


async def request_delete(session: AsyncSession, name: str, now: float) -> Endpoint:
    row = await _row(session, name, lock=True)
    if row.delete_requested_at is None:
        row.delete_requested_at = row.updated_at = now
        add_event(session, to_endpoint(row), now, "delete_requested", None, "replicas drain, then it is gone")
        await session.flush()
        await bump_routes(session)
        touch(session, "endpoints")
    return to_endpoint(row)


async def request_wake(session: AsyncSession, name: str, now: float) -> Endpoint:
    """Want a replica now; an endpoint that was given up on is tried again. Raises NotFound, Conflict."""
    row = await _changeable_row(session, name)
    if row.paused:
        raise Conflict(f"{name} is paused: resume it with `ingle endpoint update {name} --resume`", code="paused")
    row.wake_at = row.updated_at = now
    row.failed_generation, row.failures, row.retry_at = 0, 0, 0.0
    await session.flush()
    add_event(session, to_endpoint(row), now, "wake_requested", None, "asked for by an operator")
    touch(session, "endpoints")
    return to_endpoint(row)


async def request_sleep(session: AsyncSession, name: str, now: float) -> Endpoint:
    row = await _changeable_row(session, name)
    if row.min_replicas > 0:
        raise Conflict(
            f"{name} keeps at least {row.min_replicas} replica(s): set --min-replicas 0 first", code="min_replicas"
        )
    row.sleep_at = row.updated_at = now
    await session.flush()
    add_event(session, to_endpoint(row), now, "sleep_requested", None, "asked for by an operator")
    touch(session, "endpoints")
    return to_endpoint(row)


async def set_desired(session: AsyncSession, endpoint: Endpoint, desired: int, why: str, now: float) -> bool:
    """Write the autoscaler's decision, unless the endpoint changed since it was read."""
    as_read = (EndpointRow.wake_at == endpoint.wake_at, EndpointRow.desired_replicas == endpoint.desired_replicas)
    if not await write_unless_changed(session, endpoint, as_read, desired_replicas=desired):
        return False
    add_event(session, endpoint, now, "scaled", None, f"{endpoint.desired_replicas} → {desired} replicas: {why}")
    return True


async def write_unless_changed(
    session: AsyncSession, endpoint: Endpoint, as_read: Sequence[ColumnElement[bool]], **values: Any
) -> bool:
    """Write what was decided by an endpoint as it was read: returns whether it still is so."""
    result = await session.execute(
        update(EndpointRow)
        .where(
            EndpointRow.id == endpoint.id,
            EndpointRow.generation == endpoint.generation,
            EndpointRow.deleted_at.is_(None),
            *as_read,
        )
        .values(**values)
        .returning(EndpointRow.id)
    )
    touch(session, "endpoints")
    return result.scalar_one_or_none() is not None


async def write_observed(session: AsyncSession, endpoint: Endpoint, changes: Mapping[str, Any], now: float) -> None:
    """Write what the reconciler found. The caller holds the lease and guards the transaction by it."""
    await session.execute(update(EndpointRow).where(EndpointRow.id == endpoint.id).values(**changes))
    await bump_routes(session)
    touch(session, "endpoints")


def add_event(
    session: AsyncSession,
    endpoint: Endpoint,
    now: float,
    kind: str,
    reason_code: str | None,
    message: str,
    *,
    state: str | None = None,
    replica_id: str | None = None,
) -> None:
    session.add(
        EventRow(
            endpoint_id=endpoint.id,
            endpoint_name=endpoint.name,
            replica_id=replica_id,
            at=now,
            kind=kind,
            state=state or endpoint.state,
            reason_code=reason_code,
            message=message[:2000],
        )
    )
    touch(session, "events")


async def list_events(
    session: AsyncSession, *, endpoint_id: str | None = None, after: int = 0, limit: int = 100, newest: bool = False
) -> Sequence[EventRow]:
    """Events in order. With `newest`, the last `limit` of them."""
    query = select(EventRow).where(EventRow.id > after)
    if endpoint_id:
        query = query.where(EventRow.endpoint_id == endpoint_id)
    if newest:
        rows = (await session.scalars(query.order_by(EventRow.id.desc()).limit(limit))).all()
        return list(reversed(rows))
    return (await session.scalars(query.order_by(EventRow.id).limit(limit))).all()


async def last_event_id(session: AsyncSession) -> int:
    return await session.scalar(select(func.max(EventRow.id))) or 0


async def tidy(session: AsyncSession, now: float) -> None:
    """Drop records of what ended long ago: terminated replicas with their events, measured starts."""
    await session.execute(delete(ReplicaRow).where(ReplicaRow.terminated_at < now - REPLICAS_KEPT_SECONDS))
    old = (EventRow.kind == "replica", EventRow.at < now - REPLICAS_KEPT_SECONDS)
    await session.execute(delete(EventRow).where(*old, EventRow.replica_id.not_in(select(ReplicaRow.id))))
    await session.execute(delete(ColdStartRow).where(ColdStartRow.at < now - _STARTS_KEPT_SECONDS))


async def delete_events(session: AsyncSession, endpoint_id: str | None, before: float, limit: int) -> int:
    """Delete at most `limit` events from before `before`, of one endpoint or all. Returns how many.

    Replicas' own changes stay, for as long as replicas do: money is counted by them, and they tell of no tenant.
    """
    doomed = select(EventRow.id).where(EventRow.at < before, EventRow.kind != "replica")
    if endpoint_id is not None:
        doomed = doomed.where(EventRow.endpoint_id == endpoint_id)
    gone = await session.execute(delete(EventRow).where(EventRow.id.in_(doomed.limit(limit))))
    return int(getattr(gone, "rowcount", 0))


async def add_cold_start(
    session: AsyncSession, endpoint: Endpoint, replica_id: str, total_ms: float, phases: Mapping[str, float], now: float
) -> None:
    session.add(
        ColdStartRow(
            replica_id=replica_id,
            endpoint_id=endpoint.id,
            model=endpoint.model,
            region=endpoint.region,
            at=now,
            total_ms=total_ms,
            phases=dict(phases),
        )
    )
    await session.flush()
    kept = (
        select(ColdStartRow.replica_id)
        .where(ColdStartRow.endpoint_id == endpoint.id)
        .order_by(ColdStartRow.at.desc())
        .limit(COLD_STARTS_KEPT)
    )
    await session.execute(
        delete(ColdStartRow).where(ColdStartRow.endpoint_id == endpoint.id, ColdStartRow.replica_id.not_in(kept))
    )


async def list_cold_starts(session: AsyncSession, endpoint_id: str, limit: int) -> list[ColdStartRow]:
    """An endpoint's last starts, newest first."""
    query = select(ColdStartRow).where(ColdStartRow.endpoint_id == endpoint_id)
    return list(await session.scalars(query.order_by(ColdStartRow.at.desc()).limit(limit)))


async def cold_start_estimates(session: AsyncSession) -> dict[str, float]:
    """Milliseconds that a start takes, by endpoint: the mean of its last five."""
    return {endpoint_id: float(mean) for endpoint_id, mean in await session.execute(_COLD_STARTS)}


async def _row(session: AsyncSession, name: str, *, lock: bool = False) -> EndpointRow:
    query = select(EndpointRow).where(EndpointRow.name == name, EndpointRow.deleted_at.is_(None))
    row = await session.scalar(query.with_for_update() if lock else query)
    if row is None:
        raise NotFound(f"no endpoint named {name!r}: `ingle endpoint list` shows what there is", param="name")
    return row


async def _changeable_row(session: AsyncSession, name: str) -> EndpointRow:
    row = await _row(session, name, lock=True)
    if row.delete_requested_at is not None:
        raise Conflict(f"{name} is being deleted", code="deleting", param="name")
    return row
