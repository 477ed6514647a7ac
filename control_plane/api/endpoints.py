"""Operations on endpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from control_plane import domain
from control_plane.api import schemas, views
from control_plane.api.operations import PAGED, Answer, Call, Operation, Page, Parameter, limit_of, number_of
from control_plane.api.places import Places
from control_plane.api.rollouts import choice_for, figures_of
from control_plane.domain import Role
from control_plane.errors import NotFound, Unprocessable
from control_plane.observe.logs import redact
from control_plane.planning import presets
from control_plane.planning.admission import require_fit
from control_plane.store import endpoints, replicas, tenants
from control_plane.store.database import Store
from control_plane.warmth import choose

_MAY_BE_NULL = frozenset({"gpu", "preset", "ttft_slo", "canary", "spend_limit", *schemas.Limits.model_fields})
LogReader = Callable[[str, str, int, int | None], Awaitable[tuple[list[str], int]]]
"""Region, replica id, most lines, position after which → lines that it logged, and the next position."""
_NO_CANARY = {
    True: "a canary is of a change: give model, gpu or engine_args with it",
    False: "there is nothing that serves beside a canary: wait until the endpoint was ready once",
}
_FOLLOWED = 20
"""Of an endpoint's newest replicas, at once."""


class EndpointOperations:
    """`read_logs` is the provider's, handed in: the API knows no provider."""

    def __init__(self, store: Store, places: Places, read_logs: LogReader) -> None:
        self._store = store
        self._places = places
        self._read_logs = read_logs

    def table(self) -> list[Operation]:
        path = "/admin/v1/endpoints"
        one = f"{path}/{{name}}"
        return [
            Operation("createEndpoint", "POST", path, Role.OPERATOR, "Create an endpoint", self.create,
                      schemas.Endpoint, schemas.EndpointCreate, status=202, idempotent=True),
            Operation("checkEndpoint", "POST", f"{path}/check", Role.VIEWER,
                      "Say whether an endpoint's document would be accepted; its name and tenant aren't looked up",
                      self.check, schemas.Accepted, schemas.EndpointCreate),
            Operation("listEndpoints", "GET", path, Role.VIEWER, "List endpoints by name", self.list,
                      schemas.Endpoint, is_list=True,
                      parameters=(*PAGED, Parameter("tenant", "only this tenant's"),
                                  Parameter("region", "only those in this region"))),
            Operation("showEndpoint", "GET", one, Role.VIEWER, "Show an endpoint", self.show,
                      schemas.Endpoint, conditional=True),
            Operation("updateEndpoint", "PATCH", one, Role.OPERATOR, "Change an endpoint", self.update,
                      schemas.Endpoint, schemas.EndpointUpdate, status=202, conditional=True),
            Operation("deleteEndpoint", "DELETE", one, Role.OPERATOR, "Delete an endpoint", self.delete,
                      schemas.Endpoint, status=202),
            Operation("wakeEndpoint", "POST", f"{one}/wake", Role.OPERATOR, "Start a replica now", self.wake,
                      schemas.Endpoint, status=202),
            Operation("sleepEndpoint", "POST", f"{one}/sleep", Role.OPERATOR, "Scale to zero now", self.sleep,
                      schemas.Endpoint, status=202),
            Operation("listEndpointEvents", "GET", f"{one}/events", Role.VIEWER, "The last events, in order",
                      self.events, schemas.Event, is_list=True, parameters=PAGED),
            Operation("showEndpointLogs", "GET", f"{one}/logs", Role.OPERATOR, "The last log lines of its replicas",
                      self.logs, schemas.Logs, is_list=True,
                      parameters=(Parameter("lines", "lines of each replica, 1 to 5000", "integer"),
                                  Parameter("after", "an earlier answer's `next`: only what came since"))),
        ]  # fmt: skip

    async def create(self, call: Call) -> Answer:
        asked: schemas.EndpointCreate = call.body
        accepted = await self._accept(asked)
        async with self._store.write() as session:
            again = await call.once.repeated(session)
            if again is not None:
                return Answer(schemas.Endpoint.model_validate(again), 202, again["generation"])
            tenant = await tenants.get_tenant(session, asked.tenant)
            spec = asked.model_dump(exclude={"tenant"}) | {"engine_args": accepted.engine_args}
            why = await _settle_warmth(session, asked, spec, call.now)
            made = await endpoints.create_endpoint(session, tenant.id, spec, call.now)
            if why:
                endpoints.add_event(session, made, call.now, "warmth", None, f"{made.warmth}: {why}")
            await call.audit(
                session, "endpoint.create", made.name, **asked.model_dump(exclude_unset=True, exclude={"name"})
            )
            view = await self.view(session, made)
            call.once.remember(session, 202, view.model_dump())
            return Answer(view, 202, made.generation)

    async def check(self, call: Call) -> Answer:
        return Answer(await self._accept(call.body))

    async def _accept(self, asked: schemas.EndpointCreate) -> schemas.Accepted:
        """Raises Unprocessable naming the field for which no endpoint can be like this."""
        self._places.require(asked.region)
        arguments = presets.resolve(asked.preset, asked.engine_args)
        require_fit(asked.model, asked.gpu, asked.gpus, arguments)
        await self._places.require_offer(asked.region, asked.gpu, asked.gpus)
        return schemas.Accepted(name=asked.name, region=asked.region, engine_args=list(arguments))

    async def list(self, call: Call) -> Page:
        limit = limit_of(call.query)
        region = call.query.get("region")
        if region is not None:
            self._places.require(region)
        async with self._store.read() as session:
            tenant = call.query.get("tenant")
            tenant_id = (await tenants.get_tenant(session, tenant)).id if tenant else None
            found = await endpoints.list_endpoints(
                session, tenant_id=tenant_id, region=region, after=call.query.get("after", ""), limit=limit
            )
            names = {row.id: row.name for row in await tenants.list_tenants(session)}
            starts = await endpoints.cold_start_estimates(session)
            urls = await self._places.urls(session)
            running: dict[str, list[domain.Replica]] = {}
            for replica in await replicas.live_replicas(session, [item.id for item in found]):
                running.setdefault(replica.endpoint_id, []).append(replica)
        items = [
            views.endpoint(
                item,
                running.get(item.id, []),
                tenant=names.get(item.tenant_id, item.tenant_id),
                url=self._places.endpoint_url(urls.get(item.region, ""), item.region, item.name),
                cold_start_ms=starts.get(item.id),
            )
            for item in found
        ]
        return Page(list(items), found[-1].name if len(found) == limit else None)

    async def show(self, call: Call) -> Answer:
        async with self._store.read() as session:
            found = await endpoints.get_endpoint(session, call.path["name"])
            return Answer(await self.view(session, found), generation=found.generation)

    async def update(self, call: Call) -> Answer:
        asked: schemas.EndpointUpdate = call.body
        given = asked.model_dump(include=set(call.given))
        changes: dict[str, Any] = {name: given[name] for name in call.given}
        for name, value in changes.items():
            if value is None and name not in _MAY_BE_NULL:
                raise Unprocessable(f"{name} can't be null", param=name)
        async with self._store.write() as session:
            before = await endpoints.get_endpoint(session, call.path["name"])
            low = changes.get("min_replicas", before.min_replicas)
            high = changes.get("max_replicas", before.max_replicas)
            if low > high:
                raise Unprocessable(f"min_replicas {low} is more than max_replicas {high}", param="min_replicas")
            by_wait = changes.get("warmth") == "auto" or ("warmth" not in changes and before.warmth_by_wait)
            if not by_wait and changes.get("warmth", before.warmth) == "hot" and low == 0:
                raise Unprocessable("warmth hot needs min_replicas of 1 or more", param="min_replicas")
            changes |= _runtime_changes(before, changes)
            if "warmth" in changes:
                changes["warmth_by_wait"] = by_wait
            if by_wait and {"warmth", "max_wait"} & changes.keys():
                wait = changes.get("max_wait", before.max_wait)
                changes["warmth"], _ = choose(await figures_of(session, before, call.now), wait)
            _settle_canary(before, changes)
            after = await endpoints.update_endpoint(
                session, before.name, changes, call.now, if_generation=call.if_generation
            )
            if after.canary is not None and (after.proven or after.stable_runtime is None):
                raise Unprocessable(_NO_CANARY[after.proven], param="canary")
            await call.audit(session, "endpoint.update", after.name, **changes)
            return Answer(await self.view(session, after), 202, after.generation)

    async def delete(self, call: Call) -> Answer:
        async with self._store.write() as session:
            found = await endpoints.request_delete(session, call.path["name"], call.now)
            await call.audit(session, "endpoint.delete", found.name)
            return Answer(await self.view(session, found), 202)

    async def wake(self, call: Call) -> Answer:
        async with self._store.write() as session:
            found = await endpoints.request_wake(session, call.path["name"], call.now)
            await call.audit(session, "endpoint.wake", found.name)
            return Answer(await self.view(session, found), 202)

    async def sleep(self, call: Call) -> Answer:
        async with self._store.write() as session:
            found = await endpoints.request_sleep(session, call.path["name"], call.now)
            await call.audit(session, "endpoint.sleep", found.name)
            return Answer(await self.view(session, found), 202)

    async def events(self, call: Call) -> Page:
        limit = limit_of(call.query)
        after = call.query.get("after")
        async with self._store.read() as session:
            found = await endpoints.get_endpoint(session, call.path["name"])
            rows = await endpoints.list_events(
                session,
                endpoint_id=found.id,
                after=int(number_of(call.query, "after", 0, 0, 2**53)),
                limit=limit,
                newest=after is None,
            )
        return Page([views.happening(row) for row in rows], str(rows[-1].id) if rows else after)

    async def logs(self, call: Call) -> Page:
        lines = int(number_of(call.query, "lines", 100, 1, 5000))
        known = _positions(call.query.get("after"))
        async with self._store.read() as session:
            found = await endpoints.get_endpoint(session, call.path["name"])
            recent = await replicas.recent_replicas(session, found.id, limit=_FOLLOWED if known else 5)
        items, positions = [], {}
        for replica in reversed(recent):
            # one that began since the last answer is told from its first line
            after = known.get(replica.id, 0) if known else None
            said, positions[replica.id] = await self._read_logs(replica.region, replica.id, lines, after)
            if said or not known:
                safe = [redact(line) for line in said]
                items.append(schemas.Logs(replica=replica.id, state=replica.state, lines=safe))
        return Page(list(items), ",".join(f"{name}:{position}" for name, position in positions.items()) or "none:0")

    async def view(self, session: AsyncSession, item: domain.Endpoint) -> schemas.Endpoint:
        try:
            tenant = (await tenants.get_tenant(session, item.tenant_id)).name
        except NotFound:
            tenant = item.tenant_id
        starts = await endpoints.cold_start_estimates(session)
        gateway = (await self._places.urls(session)).get(item.region, "")
        return views.endpoint(
            item,
            await replicas.live_replicas(session, [item.id]),
            tenant=tenant,
            url=self._places.endpoint_url(gateway, item.region, item.name),
            cold_start_ms=starts.get(item.id),
        )


async def _settle_warmth(session: AsyncSession, asked: schemas.EndpointCreate, spec: dict[str, Any], now: float) -> str:
    """What is kept while nobody calls, where that is to be found out. Returns why it was chosen."""
    spec["warmth_by_wait"] = asked.warmth == "auto" or (asked.warmth is None and "max_wait" in asked.model_fields_set)
    if not spec["warmth_by_wait"]:
        spec["warmth"] = asked.warmth or "cold"
        return ""
    spec["warmth"], why = await choice_for(
        session, asked.model, asked.region, asked.gpu, asked.gpus, asked.max_wait, now
    )
    return why


def _settle_canary(before: domain.Endpoint, changes: dict[str, Any]) -> None:
    """A change that doesn't ask for a canary is rolled out."""
    if before.canary is not None and "canary" not in changes and endpoints.RUNTIME_FIELDS & changes.keys():
        changes["canary"] = None


def _runtime_changes(before: domain.Endpoint, changes: dict[str, Any]) -> dict[str, Any]:
    """The engine's arguments where they or the preset change. Raises Unprocessable where the change can't fit."""
    found = {}
    if "engine_args" in changes:
        resolved = presets.resolve(changes.get("preset", before.preset), changes["engine_args"])
        found["engine_args"] = list(resolved)
    elif "preset" in changes:
        found["engine_args"] = list(presets.changed(before.preset, before.engine_args, changes["preset"]))
    asked = asdict(before.runtime) | changes | found
    if asked["gpus"] and asked["gpu"] is None:
        raise Unprocessable("gpus says how many there are to be of gpu, which is missing", param="gpus")
    if changes.keys() & {"model", "gpu", "gpus", "engine_args", "preset"}:
        require_fit(asked["model"], asked["gpu"], asked["gpus"], asked["engine_args"])
    return found


def _positions(cursor: str | None) -> dict[str, int]:
    """How far each replica's log was told, out of a cursor that an earlier answer gave. Raises Unprocessable."""
    if cursor is None:
        return {}
    known = {}
    for part in cursor.split(",")[:_FOLLOWED]:
        name, _, position = part.rpartition(":")
        if not name or not position.isdigit() or len(position) > 15:
            raise Unprocessable("after must be the `next` of an earlier answer", param="after")
        known[name] = int(position)
    return known
