"""What each replica cost, rung by rung, to the billionth. Pure.

A replica is billed from the moment it was intended until its provider said that it is gone, unless that refused it; at
rest by the price of its rung. A bill is the sum of its lines, and each line is rounded once, so that they always agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Literal

from control_plane.domain import Rung, SpendStop
from control_plane.metering.prices import NANO, PriceBook, in_force
from control_plane.warmth import price_per_hour

AT_REST = "at_"
"""A reason code with which a replica rests is this and its rung."""


@dataclass(frozen=True, slots=True)
class Story:
    """A replica's life: when it became how warm, in order; `end` is None while it lives."""

    replica_id: str
    accelerator: str | None
    count: int
    steps: Sequence[tuple[float, Rung]]
    end: float | None


@dataclass(frozen=True, slots=True)
class Line:
    """A while of one replica on one rung under one price book. Times in seconds since the epoch."""

    replica_id: str
    rung: Rung
    start: float
    end: float
    price_per_hour: float
    version: int
    amount_nano: int

    @property
    def hours(self) -> float:
        return (self.end - self.start) / 3600


def rung_of(state: str, reason_code: str | None) -> Rung | None:
    """How warm a change of state made a replica; None where it doesn't tell."""
    if state == "resting" and reason_code is not None and reason_code.startswith(AT_REST):
        return Rung(reason_code.removeprefix(AT_REST))
    return Rung.HOT if state in ("starting", "ready") else None


def bill(stories: Iterable[Story], books: Sequence[PriceBook], since: float, until: float) -> list[Line]:
    """Lines within `[since, until)`, by replica and time."""
    cuts = sorted({since, until, *(book.effective_at for book in books if since < book.effective_at < until)})
    lines: list[Line] = []
    for story in stories:
        end = until if story.end is None else min(until, story.end)
        moments = [*story.steps, (end, Rung.HOT)]
        for (start, rung), (following, _) in pairwise(moments):
            for opens, closes in pairwise(cuts):
                begin, finish = max(start, opens), min(following, closes, end)
                if finish <= begin:
                    continue
                book = in_force(books, opens)
                price = price_per_hour(book, story.accelerator, story.count, rung)
                amount = round(price * (finish - begin) / 3600 * NANO)
                lines.append(Line(story.replica_id, rung, begin, finish, price, book.version, amount))
    return lines


def month_start(now: float) -> float:
    """When the UTC month of `now` began."""
    moment = datetime.fromtimestamp(now, UTC)
    return moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()


@dataclass(frozen=True, slots=True)
class Spending:
    """An endpoint's part in this month: amounts in billionths, bounds None where there are none."""

    endpoint_id: str
    tenant_id: str
    limit_nano: int | None
    spent_nano: int


@dataclass(frozen=True, slots=True)
class Bound:
    """The bound that an endpoint comes to first: whose it is, what was spent of it, and how much it is."""

    whose: Literal["endpoint", "tenant"]
    spent_nano: int
    limit_nano: int

    @property
    def reached(self) -> bool:
        return self.spent_nano >= self.limit_nano

    @property
    def share(self) -> float:
        return self.spent_nano / self.limit_nano


def bounds(spending: Sequence[Spending], tenant_limits: Mapping[str, int]) -> dict[str, list[Bound]]:
    """By endpoint, where it or its tenant has a bound: the one that it comes to first before the other."""
    by_tenant: dict[str, int] = {}
    for item in spending:
        by_tenant[item.tenant_id] = by_tenant.get(item.tenant_id, 0) + item.spent_nano
    found: dict[str, list[Bound]] = {}
    for item in spending:
        own = [] if item.limit_nano is None else [Bound("endpoint", item.spent_nano, item.limit_nano)]
        theirs = tenant_limits.get(item.tenant_id)
        if theirs is not None:
            own.append(Bound("tenant", by_tenant[item.tenant_id], theirs))
        if own:
            found[item.endpoint_id] = sorted(own, key=lambda bound: -bound.share)
    return found


def stopping(found: Sequence[Bound], stop: SpendStop | None, now: float) -> Bound | None:
    """The bound for which an endpoint may spend nothing now. `found` is its own, `stop` what stopped it before.

    A bound that was reached stays so until the month is over or it is higher: controllers' clocks differ, and what one
    of them takes for less than the limit would start everything again.
    """
    for bound in found:
        if bound.reached:
            return bound
    if stop is not None and stop.at >= month_start(now):
        for bound in found:
            if bound.whose == stop.whose and bound.limit_nano <= stop.limit_nano:
                return bound
    return None
