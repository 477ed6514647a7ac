"""Operations on an endpoint's generations, and on what each rung of warmth takes and costs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sqlalchemy.ext.asyncio import AsyncSession

from control_plane import domain
from control_plane.api import schemas
from control_plane.api.operations import Answer, Call, Operation, Page, Parameter, limit_of
from control_plane.domain import Role, Rung
from control_plane.errors import Conflict
from control_plane.metering.prices import in_force
from control_plane.observe.logs import iso
from control_plane.store import endpoints, generations, prices, warmth
from control_plane.store.database import Store
from control_plane.warmth import FirstTokens, RungFigures, choose, figures

View = Callable[[AsyncSession, domain.Endpoint], Awaitable[schemas.Endpoint]]


class RolloutOperations:
    """`view` shows an endpoint."""

    def __init__(self, store: Store, view: View) -> None:
        self._store = store
        self._view = view

    def table(self) -> list[Operation]:
        one = "/admin/v1/endpoints/{name}"
        return [
            Operation("listGenerations", "GET", f"{one}/generations", Role.VIEWER,
                      "What it was asked to be, and what became of that, newest first", self.history,
                      schemas.Generation, is_list=True, parameters=(Parameter("limit", "how many", "integer"),)),
            Operation("rollBackEndpoint", "POST", f"{one}/rollback", Role.OPERATOR,
                      "Ask again for an earlier generation", self.roll_back, schemas.Endpoint, schemas.Rollback,
                      status=202, conditional=True),
            Operation("promoteEndpoint", "POST", f"{one}/promote", Role.OPERATOR,
                      "Roll a canary out", self.promote, schemas.Endpoint, status=202),
            Operation("showWarmth", "GET", f"{one}/warmth", Role.VIEWER,
                      "What each rung of warmth takes to a first token, and costs an hour", self.rungs,
                      schemas.RungFigures, is_list=True),
        ]  # fmt: skip

    async def history(self, call: Call) -> Page:
        async with self._store.read() as session:
            found = await endpoints.get_endpoint(session, call.path["name"])
            rows = await generations.history(session, found.id, limit_of(call.query, 20))
        return Page(
            [
                schemas.Generation(
                    generation=row.generation,
                    at=iso(row.at),
                    outcome=row.outcome,
                    changed=row.changed,
                    code=row.reason_code,
                    reason=row.reason,
                    settled_at=None if row.settled_at is None else iso(row.settled_at),
                    spec=row.spec,
                )
                for row in rows
            ]
        )

    async def roll_back(self, call: Call) -> Answer:
        asked: schemas.Rollback = call.body
        async with self._store.write() as session:
            after, to = await endpoints.roll_back(
                session, call.path["name"], asked.to, call.now, if_generation=call.if_generation
            )
            await call.audit(session, "endpoint.rollback", after.name, to=to, generation=after.generation)
            return Answer(await self._view(session, after), 202, after.generation)

    async def promote(self, call: Call) -> Answer:
        async with self._store.write() as session:
            before = await endpoints.get_endpoint(session, call.path["name"])
            if before.canary is None or before.proven:
                raise Conflict(f"{before.name} has no canary", code="no_canary", param="name")
            if before.given_up:
                raise Conflict(f"the canary failed: {before.reason}", code="canary_failed", param="name")
            after = await endpoints.update_endpoint(session, before.name, {"canary": None}, call.now, kind="promoted")
            await call.audit(session, "endpoint.promote", after.name, generation=after.generation)
            return Answer(await self._view(session, after), 202, after.generation)

    async def rungs(self, call: Call) -> Page:
        async with self._store.read() as session:
            found = await endpoints.get_endpoint(session, call.path["name"])
            book = in_force(await prices.list_books(session), call.now)
            measured = await figures_of(session, found, call.now)
        return Page([_figures(item, book.currency, found.warmth) for item in measured])


async def figures_of(session: AsyncSession, endpoint: domain.Endpoint, now: float) -> list[RungFigures]:
    book = in_force(await prices.list_books(session), now)
    ways = await warmth.ways_of(session, endpoint)
    tokens = await warmth.first_tokens(session, endpoint.id)
    return figures(ways, tokens, book, endpoint.gpu, endpoint.gpus)


async def choice_for(
    session: AsyncSession, model: str, region: str, gpu: str | None, gpus: int, max_wait: float, now: float
) -> tuple[Rung, str]:
    """For an endpoint that isn't there yet: what others with its model in its region took tells."""
    book = in_force(await prices.list_books(session), now)
    return choose(figures(await warmth.ways_like(session, model, region), FirstTokens(), book, gpu, gpus), max_wait)


def _figures(item: RungFigures, currency: str, chosen: str) -> schemas.RungFigures:
    return schemas.RungFigures(
        rung=item.rung,
        chosen=item.rung == chosen,
        price_per_hour=item.price_per_hour,
        currency=currency,
        first_token_ms=_rounded(item.first_token_ms),
        p95_ms=_rounded(item.p95_ms),
        measured=item.measured,
        phases=dict(item.phases),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
