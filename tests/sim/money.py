"""What the cloud charges, second by second, beside what the ledger says, and the stop where that is enough."""

from __future__ import annotations

import sqlite3
from itertools import pairwise

from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import Rung
from control_plane.metering.bill import bill
from control_plane.metering.ledger import Kind
from control_plane.metering.prices import NANO
from control_plane.store import prices, spending
from tests.sim.cloud import Cloud, Machine
from tests.sim.report import Broken

SECOND = {Rung.HOT: 0.01, Rung.ASLEEP: 0.002, Rung.EMBER: 0.0005}
"""What a machine costs on each rung."""
LIMITS = (None, None, 0.5, 2.0)
"""What endpoints may spend: for ever, or for a while that ends in the run."""
STOP_SECONDS = 60.0
"""From the last cent to the last machine: a look, what is in flight, and the machine's end."""
LATE_SECONDS = 25.0
"""How long a machine may be there, rest or be gone before we know, while nothing is wrong: a start to rest takes up to
twenty seconds, and is billed as hot until it is seen to rest."""
_BOUNDS = "SELECT name, spend_limit, stopped_at FROM endpoints WHERE deleted_at IS NULL"
_STOPS = (
    "SELECT endpoint_name, count(*) FROM endpoint_events WHERE kind = 'spend' AND reason_code IS NOT NULL GROUP BY 1"
)
_DRIFT = "SELECT replica_id FROM drift WHERE kind = ?"


async def set_prices(session: AsyncSession, at: float) -> None:
    hour = {rung: price * 3600 for rung, price in SECOND.items()}
    kinds = {f"cpu/{rung}": price for rung, price in hour.items()}
    await prices.add_book(session, "USD", {}, {"cpu": hour[Rung.HOT], **kinds}, at)


def charged(machine: Machine, since: float, until: float) -> float:
    """What the cloud charges for a machine within `[since, until)`: from when it was there until it was gone."""
    end = until if machine.gone_at is None else min(until, machine.gone_at)
    moments = [*machine.rungs, (end, Rung.HOT)]
    return sum(SECOND[rung] * max(0.0, min(then, end) - max(at, since)) for (at, rung), (then, _) in pairwise(moments))


async def billed(session: AsyncSession, since: float, until: float) -> dict[str, float]:
    """What the ledger says of each replica."""
    books = await prices.list_books(session)
    found: dict[str, float] = {}
    after = ""
    while page := await spending.stories(session, since, until, after=after):
        for _, story in page:
            found[story.replica_id] = sum(line.amount_nano for line in bill([story], books, since, until)) / NANO
        after = page[-1][1].replica_id
    return found


def strangers(reader: sqlite3.Connection) -> set[str]:
    """What the ledger has as known to the provider alone."""
    return {row[0] for row in reader.execute(_DRIFT, (Kind.OURS_MISSING,))}


def stops(reader: sqlite3.Connection) -> dict[str, int]:
    """How often each endpoint was stopped for what it cost."""
    return dict(reader.execute(_STOPS).fetchall())


def check_bill(theirs: dict[str, float], ours: dict[str, float], drift: set[str]) -> None:
    """Each replica's bill is the cloud's, but for what can't be known at once; or it is drift."""
    for name in theirs.keys() | ours.keys():
        over = (ours.get(name, 0.0) - theirs.get(name, 0.0)) / SECOND[Rung.HOT]
        if abs(over) > LATE_SECONDS and name not in drift:
            raise Broken(f"the bill of {name} is {over:.0f} s of a hot machine over what the cloud charges")


class Stop:
    """No endpoint goes on after its limit, as the cloud counts it, and nothing of a stopped one is left standing."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._since: dict[str, float] = {}

    def check(self, reader: sqlite3.Connection, now: float, *, exact: bool) -> None:
        """While nothing is wrong. Where clocks are set or askew (not `exact`), what was spent is not to be known.

        What stood without a row is drift, told in money, and not the endpoint's bill.
        """
        drift = strangers(reader)
        for name, limit, stopped_at in reader.execute(_BOUNDS):
            own = [machine for machine in self._cloud.machines.values() if machine.endpoint == name]
            billed = sum(charged(machine, 0.0, now) for machine in own if machine.replica_id not in drift)
            spent = exact and limit is not None and billed >= limit
            standing = [machine for machine in own if self._cloud.exists(machine.replica_id)]
            if not standing or (stopped_at is None and not spent):
                self._since.pop(name, None)
            elif now - self._since.setdefault(name, now) > STOP_SECONDS:
                raise Broken(f"{name} has spent its limit of {limit}, and {standing[0].replica_id} stands")
