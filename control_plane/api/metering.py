"""Operations on usage, prices and cost."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.api import money, views
from control_plane.api.operations import PAGED, Answer, Call, Operation, Page, Parameter, limit_of, number_of
from control_plane.domain import Endpoint, Role
from control_plane.errors import Unprocessable
from control_plane.metering import prices as book_of
from control_plane.metering.bill import Line, bill
from control_plane.metering.cost import hours
from control_plane.metering.prices import NANO, PriceBook, TokenPrices
from control_plane.observe.logs import iso
from control_plane.store import drift, endpoints, prices, spending, tenants, usage
from control_plane.store.database import Store

_MONTH = 30 * 86_400
_MOST_REQUESTS = 200_000
"""Of one endpoint, whose times are looked at to tell idle hours from busy ones."""
_COST_SECONDS = 30.0
_LONGEST = 400 * 86_400
_MOST_DRIFT = 1000


class MeteringOperations:
    def __init__(self, store: Store) -> None:
        self._store = store

    def table(self) -> list[Operation]:
        period = (
            Parameter("since", "seconds since the epoch", "number"),
            Parameter("until", "seconds since the epoch", "number"),
            Parameter("tenant", "only this tenant's"),
            Parameter("endpoint", "only this endpoint's"),
        )
        path = "/admin/v1/prices"
        return [
            Operation("listUsage", "GET", "/admin/v1/usage", Role.VIEWER, "Requests and tokens of whole UTC hours",
                      self.usage, money.Usage, is_list=True,
                      parameters=(*period, Parameter("by", "`hour` for one item an hour"))),
            Operation("listCost", "GET", "/admin/v1/cost", Role.VIEWER, "What endpoints cost, deleted ones too",
                      self.cost, money.Cost, is_list=True, parameters=(*period, *PAGED)),
            Operation("listCostLines", "GET", "/admin/v1/cost/lines", Role.VIEWER,
                      "What each replica cost, rung by rung: the lines of a bill", self.lines, money.CostLine,
                      is_list=True, parameters=(*period, Parameter("after", "cursor of the page"))),
            Operation("listDrift", "GET", "/admin/v1/cost/drift", Role.VIEWER,
                      "Where providers' inventories and our records disagree, or did, and what that comes to",
                      self.drift, money.Drift,
                      is_list=True),
            Operation("listPrices", "GET", path, Role.VIEWER, "Price books, newest first", self.prices,
                      money.Prices, is_list=True),
            Operation("setPrices", "POST", path, Role.OWNER, "Put the next price book in force", self.set_prices,
                      money.Prices, money.PricesCreate, status=201, idempotent=True),
        ]  # fmt: skip

    async def usage(self, call: Call) -> Page:
        since, until = _period(call)
        by = call.query.get("by")
        if by not in (None, "hour"):
            raise Unprocessable("by must be hour", param="by")
        async with self._store.read() as session:
            tenant_id, names = await _tenant(session, call)
            rows = await usage.usage_summary(
                session,
                since=since,
                until=until,
                tenant_id=tenant_id,
                endpoint=call.query.get("endpoint"),
                by_hour=by == "hour",
            )
        return Page([_usage(row, names) for row in rows])

    async def cost(self, call: Call) -> Page:
        since, until = _money_period(call)
        limit = limit_of(call.query)
        name, _, last = call.query.get("after", "").partition("/")
        async with self._store.read(_COST_SECONDS) as session:
            tenant_id, names = await _tenant(session, call)
            books = await prices.list_books(session)
            found = await spending.billed_endpoints(
                session, since, until, name=call.query.get("endpoint"), tenant_id=tenant_id,
                after=(name, last), limit=limit,
            )  # fmt: skip
            items = [await self._cost(session, item, names, books, since, until, call.now) for item in found]
        return Page(list(items), f"{found[-1].name}/{found[-1].id}" if len(found) == limit else None)

    async def _cost(
        self,
        session: AsyncSession,
        item: Endpoint,
        names: dict[str, str],
        books: list[PriceBook],
        since: float,
        until: float,
        now: float,
    ) -> money.Cost:
        alive = idle = 0.0
        warmth = 0
        lives = await usage.lives(session, item.id, since, until)
        work = await usage.work(session, item.id, since, until, _MOST_REQUESTS + 1)
        if len(work) > _MOST_REQUESTS:
            raise Unprocessable(
                f"{item.name} had more than {_MOST_REQUESTS:,} requests in that time: ask for a shorter one",
                param="since",
            )
        for start, end, book in _spans(books, since, until):
            part = hours(lives, work, start, end)
            alive, idle = alive + part.alive, idle + part.idle
            busy = part.alive - part.idle
            warmth -= book.hours_nano(item.gpu, busy, item.gpus)
        total = await spending.spent(session, item, books, since, until)
        # all but the hours in which something was served is the price of warmth, each by its rung
        warmth = max(0, warmth + total)
        told = max(since, item.created_at) >= now - item.retention
        requests, tokens, price = await usage.tokens_cost(session, item.id, since, until)
        return money.Cost(
            tenant=names.get(item.tenant_id, item.tenant_id),
            endpoint=item.name,
            endpoint_id=item.id,
            deleted_at=_gone(item),
            region=item.region,
            accelerator=item.gpu or "cpu",
            currency=book_of.in_force(books, until).currency,
            replica_hours=round(alive, 6),
            idle_hours=round(idle, 6) if told else None,
            replicas_cost=total / NANO,
            warmth_cost=warmth / NANO if told else None,
            requests=requests,
            tokens=tokens,
            tokens_price=price / NANO,
        )

    async def lines(self, call: Call) -> Page:
        since, until = _money_period(call)
        async with self._store.read(_COST_SECONDS) as session:
            tenant_id, _ = await _tenant(session, call)
            books = await prices.list_books(session)
            found = await spending.stories(
                session, since, until, name=call.query.get("endpoint"), tenant_id=tenant_id,
                after=call.query.get("after", ""),
            )  # fmt: skip
        items = [_line(item, line, books) for item, story in found for line in bill([story], books, since, until)]
        return Page(list(items), found[-1][1].replica_id if len(found) == spending.STORIES else None)

    async def drift(self, call: Call) -> Page:
        async with self._store.read() as session:
            rows = await drift.list_drift(session, _MOST_DRIFT)
        return Page(
            [
                money.Drift(
                    replica=row.replica_id,
                    kind=row.kind,
                    region=row.region or None,
                    we_say=row.we_say,
                    they_say=row.they_say,
                    amount=None if row.amount_nano is None else row.amount_nano / NANO,
                    currency=row.currency,
                    since=iso(row.since),
                    seen_at=iso(row.seen_at),
                    settled_at=None if row.settled_at is None else iso(row.settled_at),
                )
                for row in rows
            ]
        )

    async def prices(self, call: Call) -> Page:
        async with self._store.read() as session:
            return Page([views.prices(book) for book in await prices.list_books(session)])

    async def set_prices(self, call: Call) -> Answer:
        asked: money.PricesCreate = call.body
        async with self._store.write() as session:
            again = await call.once.repeated(session)
            if again is not None:
                return Answer(money.Prices.model_validate(again), 201)
            models = {name: TokenPrices(**price.model_dump()) for name, price in asked.models.items()}
            book = await prices.add_book(session, asked.currency, models, asked.accelerators, call.now)
            view = views.prices(book)
            await call.audit(session, "prices.set", f"version {book.version}", **asked.model_dump())
            call.once.remember(session, 201, view.model_dump())
            return Answer(view, 201)


def _line(item: Endpoint, line: Line, books: list[PriceBook]) -> money.CostLine:
    return money.CostLine(
        endpoint=item.name,
        endpoint_id=item.id,
        deleted_at=_gone(item),
        replica=line.replica_id,
        rung=line.rung,
        since=iso(line.start),
        until=iso(line.end),
        hours=round(line.hours, 9),
        price_per_hour=line.price_per_hour,
        price_version=line.version,
        amount=line.amount_nano / NANO,
        currency=book_of.in_force(books, line.start).currency,
    )


def _period(call: Call) -> tuple[float, float]:
    since = number_of(call.query, "since", call.now - _MONTH, 0, 2**40)
    until = number_of(call.query, "until", call.now + usage.HOUR, 0, 2**40)
    if until - since > _LONGEST:
        raise Unprocessable("since and until may be 400 days apart at most", param="since")
    return since, until


def _money_period(call: Call) -> tuple[float, float]:
    """What was spent is known up to now, and for as long as replicas are on record."""
    since, until = _period(call)
    until = min(until, call.now)
    if since >= until:
        raise Unprocessable("since must be before until, and before now", param="since")
    if since < call.now - endpoints.REPLICAS_KEPT_SECONDS:
        days = endpoints.REPLICAS_KEPT_SECONDS / 86_400
        raise Unprocessable(f"what replicas cost is on record for {days:g} days", param="since")
    return since, until


def _gone(item: Endpoint) -> str | None:
    return None if item.deleted_at is None else iso(item.deleted_at)


async def _tenant(session: AsyncSession, call: Call) -> tuple[str | None, dict[str, str]]:
    tenant = call.query.get("tenant")
    tenant_id = (await tenants.get_tenant(session, tenant)).id if tenant else None
    return tenant_id, {row.id: row.name for row in await tenants.list_tenants(session)}


def _spans(books: list[PriceBook], since: float, until: float) -> list[tuple[float, float, PriceBook]]:
    """`[since, until)` cut where another price book came into force."""
    cuts = sorted({since, until, *(book.effective_at for book in books if since < book.effective_at < until)})
    return [(start, end, book_of.in_force(books, start)) for start, end in pairwise(cuts)]


def _usage(row: dict[str, Any], names: dict[str, str]) -> money.Usage:
    same = ("region", "requests", "prompt_tokens", "completion_tokens", "cached_tokens", "wasted_tokens")
    return money.Usage(
        hour=iso(row["hour"]) if "hour" in row else None,
        tenant=names.get(row["tenant_id"], row["tenant_id"]),
        endpoint=row["endpoint_name"],
        price=row["cost_nano"] / NANO,
        mean_duration_ms=row["mean_duration_ms"],
        mean_ttft_ms=row["mean_ttft_ms"],
        **{name: row[name] for name in same},
    )
