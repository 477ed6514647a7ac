"""How endpoints are at this moment: what gateways report, and what replicas' own metrics say."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import aiohttp

from control_plane import domain
from control_plane.api import schemas
from control_plane.api.operations import Call, Operation, Page, Parameter, limit_of
from control_plane.api.samples import GATEWAY, Rates, Reading, rates, read
from control_plane.domain import ReplicaState, Role
from control_plane.metering.prices import NANO, PriceBook, in_force
from control_plane.observe import metrics
from control_plane.observe.logs import iso
from control_plane.security.mesh import PLAIN, Link
from control_plane.security.secret import Secret
from control_plane.store import endpoints, prices, replicas, traffic
from control_plane.store.database import Store

_FRESH_SECONDS = 1.0
"""Who asks again so soon is told the same."""
_WINDOW_SECONDS = 10.0
_OLDEST_SECONDS = 60.0
_KEPT = 12
_AT_ONCE = 32
_SCRAPE_SECONDS = 1.5
_REPORT_STALE_SECONDS = 15.0
_MOST_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Look:
    at: float
    readings: Mapping[str, Reading]


class LiveOperations:
    """`link` is how replicas are reached."""

    def __init__(self, store: Store, secret: Secret, link: Link = PLAIN) -> None:
        self._store = store
        self._secret = secret
        self._link = link
        self._looks: dict[str, deque[_Look]] = {}
        self._turn = asyncio.Lock()
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=_SCRAPE_SECONDS), connector=aiohttp.TCPConnector(limit=_AT_ONCE)
        )

    def table(self) -> list[Operation]:
        return [
            Operation("listLive", "GET", "/admin/v1/live", Role.VIEWER, "How endpoints are right now", self.live,
                      schemas.Live, is_list=True, parameters=(Parameter("endpoint", "only this endpoint's"),)),
            Operation("listColdStarts", "GET", "/admin/v1/endpoints/{name}/cold-starts", Role.VIEWER,
                      "Its last cold starts by phase, newest first", self.cold_starts, schemas.ColdStart, is_list=True,
                      parameters=(Parameter("limit", "how many", "integer"),)),
        ]  # fmt: skip

    async def close(self) -> None:
        await self._session.close()

    async def live(self, call: Call) -> Page:
        return Page(list(await self.look(call.now, call.query.get("endpoint"))))

    async def cold_starts(self, call: Call) -> Page:
        async with self._store.read() as session:
            found = await endpoints.get_endpoint(session, call.path["name"])
            rows = await endpoints.list_cold_starts(session, found.id, limit_of(call.query, 10))
        return Page(
            [
                schemas.ColdStart(replica=row.replica_id, at=iso(row.at), total_ms=row.total_ms, phases=row.phases)
                for row in rows
            ]
        )

    async def look(self, now: float, name: str | None = None) -> list[schemas.Live]:
        """All endpoints, or the one called `name`. Raises NotFound, StoreUnavailable."""
        async with self._store.read() as session:
            found = (
                await endpoints.list_endpoints(session)
                if name is None
                else [await endpoints.get_endpoint(session, name)]
            )
            running: dict[str, list[domain.Replica]] = {item.id: [] for item in found}
            for replica in await replicas.live_replicas(session, list(running)):
                running[replica.endpoint_id].append(replica)
            demand = await traffic.demand_by_endpoint(session)
            book = in_force(await prices.list_books(session), now)
        async with self._turn:
            await self._scrape(found, running, now)
            if name is None:
                self._looks = {key: looks for key, looks in self._looks.items() if key in running}
        return [_live(item, running[item.id], demand.get(item.id, []), self._looks[item.id], book) for item in found]

    async def _scrape(
        self, found: Sequence[domain.Endpoint], running: Mapping[str, Sequence[domain.Replica]], now: float
    ) -> None:
        due = [
            endpoint_id
            for endpoint_id in running
            if not (looks := self._looks.get(endpoint_id)) or abs(now - looks[-1].at) >= _FRESH_SECONDS
        ]
        reachable = [
            (replica.endpoint_id, replica.id, replica.address)
            for endpoint_id in due
            for replica in running[endpoint_id]
            if replica.address is not None and replica.state in (ReplicaState.READY, ReplicaState.DRAINING)
        ]
        readings = await asyncio.gather(*(self._read(replica_id, address) for _, replica_id, address in reachable))
        seen: dict[str, dict[str, Reading]] = {endpoint_id: {} for endpoint_id in due}
        own = _first_tokens({item.id: (item.region, item.name) for item in found if item.id in seen})
        for (endpoint_id, replica_id, _), reading in zip(reachable, readings, strict=True):
            if reading is not None:
                seen[endpoint_id][replica_id] = reading
        for endpoint_id, ttft in own.items():
            seen[endpoint_id][GATEWAY] = Reading(ttft=ttft)
        for endpoint_id in due:
            self._looks.setdefault(endpoint_id, deque(maxlen=_KEPT)).append(_Look(now, seen[endpoint_id]))

    async def _read(self, replica_id: str, address: domain.Address) -> Reading | None:
        """None where it doesn't answer: whether that is a fault is the reconciler's to find out."""
        headers = {"Authorization": f"Bearer {self._secret.replica_token(replica_id)}"}
        try:
            async with self._session.get(
                self._link.url(address, "/metrics"), headers=headers, **self._link.options(replica_id)
            ) as answer:
                body = await answer.content.read(_MOST_BYTES)
                while chunk := await answer.content.read(_MOST_BYTES - len(body)):
                    body += chunk
                return read(body.decode()) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None


def _first_tokens(wanted: Mapping[str, tuple[str, str]]) -> dict[str, dict[float, float]]:
    """By endpoint id, how late streams began at gateways of this process, what they were held for included."""
    found: dict[str, dict[float, float]] = {}
    places = {place: endpoint_id for endpoint_id, place in wanted.items()}
    for family in metrics.time_to_first_token.collect():
        for sample in family.samples:
            endpoint_id = places.get((sample.labels.get("region", ""), sample.labels.get("endpoint", "")))
            if endpoint_id is not None and sample.name.endswith("_bucket"):
                found.setdefault(endpoint_id, {})[float(sample.labels["le"])] = sample.value
    return found


def _live(
    item: domain.Endpoint,
    running: Sequence[domain.Replica],
    demand: Sequence[domain.Demand],
    looks: Sequence[_Look],
    book: PriceBook,
) -> schemas.Live:
    newest = looks[-1]
    gauges = [reading.gauges for reading in newest.readings.values()]
    filled = [gauge["kv_usage"] for gauge in gauges if "kv_usage" in gauge]
    fresh = [report for report in demand if newest.at - report.reported_at < _REPORT_STALE_SECONDS]
    return schemas.Live(
        endpoint=item.name,
        region=item.region,
        state=item.state,
        at=newest.at,
        in_flight=sum(report.in_flight for report in fresh),
        held=sum(report.held for report in fresh),
        running=round(sum(gauge.get("running", 0.0) for gauge in gauges)),
        waiting=round(sum(gauge.get("waiting", 0.0) for gauge in gauges)),
        kv_usage=max(filled, default=None),
        replicas=sum(replica.state is ReplicaState.READY for replica in running),
        desired=item.desired_replicas,
        cost_per_hour=book.hours_nano(item.gpu, float(len(running)), item.gpus) / NANO,
        currency=book.currency,
        **asdict(_rates(looks)),
    )


def _rates(looks: Sequence[_Look]) -> Rates:
    """Over the last ten seconds, or since the look before where that is longer ago."""
    newest = looks[-1]
    earlier = [look for look in looks if 0 < newest.at - look.at <= _OLDEST_SECONDS]
    recent = [look for look in earlier if newest.at - look.at <= _WINDOW_SECONDS]
    base = recent[0] if recent else earlier[-1] if earlier else None
    return Rates() if base is None else rates(base.readings, newest.readings, newest.at - base.at)
