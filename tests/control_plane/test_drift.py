"""The ledger's two sides: what our records and providers say, and what they differ by in times and money."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import pytest

from control_plane.domain import Description, Offer, Phase, ReplicaSpec, ReplicaState, Rung
from control_plane.errors import ProviderError
from control_plane.metering.bill import Story
from control_plane.metering.ledger import Difference, Kind, Ours, Theirs, amount_nano, compare
from control_plane.metering.prices import NANO, PriceBook
from control_plane.observe import metrics
from control_plane.reconciler.sweep import sweep
from control_plane.store import drift, prices, replicas
from control_plane.store.database import Store
from tests.control_plane.harness import Installation, create, ingle, until
from tests.control_plane.test_store import make_endpoint

HOUR = 3600.0
NOW = 10 * HOUR
BOOKS = [PriceBook(1, 0.0, "EUR", {}, {"l4": 1.0, "l4/asleep": 0.25})]
UNSAID = Theirs()


def ours(state: str = "ready", ended_at: float | None = None) -> Ours:
    return Ours("rep_1", "ep", "eu-1", ReplicaState(state), 4 * HOUR, ended_at)


@pytest.mark.parametrize(
    ("row", "said", "noted", "expected", "amount"),
    [
        # the same, as far as anybody can say
        (ours(), Theirs("eu-1", 4 * HOUR + 60), {}, None, None),
        (ours(), Theirs("eu-1", 4 * HOUR - 60), {}, None, None),
        (ours(), UNSAID, {}, None, None),
        (ours("starting"), None, {}, None, None),
        (ours("terminating"), None, {}, None, None),
        (ours("terminated"), None, {}, None, None),
        # billed before it began, and begun before it was billed
        (ours(), Theirs("eu-1", 6 * HOUR), {}, (Kind.TIMES_DIFFER, 4 * HOUR, 6 * HOUR), 2.0),
        (ours("starting"), Theirs("eu-1", 6 * HOUR), {}, (Kind.TIMES_DIFFER, 4 * HOUR, 6 * HOUR), 2.0),
        (ours(), Theirs("eu-1", 1 * HOUR), {}, (Kind.TIMES_DIFFER, 4 * HOUR, 1 * HOUR), -3.0),
        # billed since it isn't there any more, by its rung; and there since it isn't billed any more
        (ours(), None, {}, (Kind.THEIRS_MISSING, "ready", "nothing"), 0.0),
        (ours("resting"), None, {"theirs_missing": 8 * HOUR}, (Kind.THEIRS_MISSING, "resting", "nothing"), 0.5),
        (ours("terminated", 9 * HOUR), UNSAID, {}, (Kind.OURS_MISSING, "terminated", "it is there"), -1.0),
        (ours("terminated", 9 * HOUR), Theirs("eu-1", HOUR), {}, (Kind.OURS_MISSING, "terminated", HOUR), -1.0),
        # nobody's
        (None, Theirs("me-1", 7 * HOUR), {}, (Kind.OURS_MISSING, "nothing", 7 * HOUR), None),
        (None, UNSAID, {}, (Kind.OURS_MISSING, "nothing", "it is there"), None),
    ],
)
def test_how_the_sides_differ(
    row: Ours | None,
    said: Theirs | None,
    noted: dict[str, float],
    expected: tuple[Kind, object, object] | None,
    amount: float | None,
) -> None:
    owned = {} if said is None else {"rep_1": said}
    since = {("rep_1", kind): at for kind, at in noted.items()}
    found = compare([] if row is None else [row], owned, since, NOW, 120.0)
    assert [(one.kind, one.we_say, one.they_say) for one in found] == ([] if expected is None else [expected])
    if found and row is not None and amount is not None:
        story = Story("rep_1", "l4", 1, [(4 * HOUR, Rung.HOT), (8 * HOUR, Rung.ASLEEP)], row.ended_at)
        assert amount_nano(found[0], story, BOOKS) / NANO == amount
    if found and row is None and said is not None:
        assert (found[0].region, found[0].endpoint_id) == (said.region, None)


def test_what_only_one_side_counts_is_priced_by_the_book_of_its_time() -> None:
    dearer = [*BOOKS, PriceBook(2, 2 * HOUR, "EUR", {}, {"l4": 10.0})]
    early = Difference("rep_1", Kind.TIMES_DIFFER, "eu-1", "ep", 3 * HOUR, HOUR, HOUR, 3 * HOUR, False)
    assert amount_nano(early, Story("rep_1", "l4", 2, [(3 * HOUR, Rung.HOT)], None), dearer) == -22 * NANO


async def test_drift_is_noted_until_both_sides_agree(store: Store) -> None:
    endpoint = await make_endpoint(store)
    async with store.write() as session:
        await prices.add_book(session, "EUR", {}, {"*": 3600.0}, 0.0)
        for name in ("rep_1", "rep_2", "rep_3"):
            await replicas.add_intent(session, name, endpoint, 1, Rung.HOT, 100.0)
        await replicas.write_replica(session, "rep_1", {"state": "ready"})
        await replicas.write_replica(session, "rep_2", {"state": "terminated", "terminated_at": 100.0})

    async def look(owned: list[str] | dict[str, Theirs], now: float, regions: Sequence[str] = ("local-eu",)) -> Any:
        said = owned if isinstance(owned, dict) else dict.fromkeys(owned, UNSAID)
        async with store.write() as session:
            return sorted(await drift.note_drift(session, regions, said, now, 120.0))

    async def rows() -> dict[tuple[str, str], tuple[Any, ...]]:
        async with store.read() as session:
            return {
                (row.replica_id, row.kind): (row.region, row.we_say, row.amount_nano, row.settled_at)
                for row in await drift.list_drift(session, 10)
            }

    # rep_3 is on its way: neither side can be held to it
    assert await look(["rep_1"], 101.0) == []
    assert await look(["rep_2", "stranger"], 102.0) == ["rep_1", "rep_2", "stranger"]
    assert await look({"rep_2": UNSAID, "stranger": Theirs("moon-1", 90.0)}, 103.0) == []
    assert await look([], 103.0, ("local-me",)) == [], "what another provider sees settles nothing here"
    assert await rows() == {
        ("rep_1", "theirs_missing"): ("local-eu", "ready", 1 * NANO, None),
        ("rep_2", "ours_missing"): ("local-eu", "terminated", -3 * NANO, None),
        ("stranger", "ours_missing"): ("moon-1", "nothing", None, None),
    }
    assert await look(["rep_1"], 104.0) == []
    assert {row[-1] for row in (await rows()).values()} == {104.0}
    assert await look(["rep_1", "rep_2"], 105.0) == ["rep_2"], "it is drift anew"
    async with store.read() as session:
        assert [(row.replica_id, row.since) for row in await drift.list_drift(session, 1)] == [("rep_2", 105.0)]
        assert await drift.standing_drift(session) == {"local-eu": 1}
    assert await look({"rep_1": Theirs("local-eu", 400.0)}, 500.0) == ["rep_1"]
    differs = ("local-eu", "1970-01-01T00:01:40.000Z", 300 * NANO, None)
    assert (await rows())["rep_1", "times_differ"] == differs
    async with store.read() as session:
        assert await drift.standing_drift(session) == {}, "nothing is there that only one side knows"


class Inventory:
    """A provider that has what it is told to have, and ends what it is told to end."""

    def __init__(self, has: dict[str, Description | ProviderError]) -> None:
        self.has = has

    async def offers(self) -> Sequence[Offer]:
        return []

    async def ensure(self, spec: ReplicaSpec) -> None:
        raise AssertionError("nothing is started here")

    async def describe(self, replica_id: str) -> Description:
        found = self.has[replica_id]
        if isinstance(found, ProviderError):
            raise found
        return found

    async def list_owned(self) -> Sequence[str]:
        return list(self.has)

    async def drain(self, replica_id: str) -> None:
        raise AssertionError("nothing is drained here")

    async def terminate(self, replica_id: str) -> None:
        del self.has[replica_id]


async def test_strangers_are_booked_to_where_their_provider_says(store: Store) -> None:
    silent = ProviderError("it doesn't answer", code="cluster_unreachable")
    cluster = Inventory(
        {
            "in-b": Description(Phase.RUNNING, region="b-1", began_at=50.0),
            "on-the-moon": Description(Phase.RUNNING, region="moon-1"),
            "unknown": silent,
        }
    )
    by_region = {"a-1": cluster, "b-1": cluster, "c-1": Inventory({})}
    await sweep(store, by_region, 100.0, 120.0)
    async with store.read() as session:
        found = {row.replica_id: (row.region, row.they_say) for row in await drift.list_drift(session, 10)}
    assert found == {
        "in-b": ("b-1", "1970-01-01T00:00:50.000Z"),
        "on-the-moon": ("moon-1", "it is there"),
        "unknown": ("", "it is there"),
    }
    text = metrics.exposition("")[0].decode()
    for region, count in (("a-1", 0), ("b-1", 1), ("c-1", 0), ("elsewhere", 2)):
        assert f'ingle_drift{{region="{region}"}} {count}.0' in text
    assert cluster.has == {}, "nobody wants them"
    await sweep(store, by_region, 110.0, 120.0)
    async with store.read() as session:
        assert {row.settled_at for row in await drift.list_drift(session, 10)} == {110.0}
    assert 'ingle_drift{region="elsewhere"} 0.0' in metrics.exposition("")[0].decode()


def test_drift_is_told(fresh: Installation) -> None:
    """A replica that our records lost and the provider still runs, and one that is billed from before it began."""
    fresh.up()
    with fresh.admin() as admin:
        admin.set_prices({"currency": "EUR", "models": {}, "accelerators": {"*": 1.0}})
        create(admin, "lost", "fast", idle_timeout=600)
        create(admin, "early", "fast", idle_timeout=600)
        (replica,) = (one.id for one in admin.endpoint("lost").replicas)
        (early,) = (one.id for one in admin.endpoint("early").replicas)
        with sqlite3.connect(fresh.home / "ingle.db") as database:
            database.execute("UPDATE replicas SET state = 'terminated' WHERE id = ?", (replica,))
            database.execute("UPDATE replicas SET created_at = created_at - 7200 WHERE id = ?", (early,))
            database.execute("UPDATE price_books SET effective_at = 0")
        found = until(lambda: [one for one in admin.drift() if one.replica == replica] or None, "it is noted")
        assert (found[0].kind, found[0].we_say) == ("ours_missing", "terminated")
        (times,) = until(lambda: [one for one in admin.drift() if one.replica == early] or None, "it is noted too")
        assert (times.kind, times.region, times.currency) == ("times_differ", "local-eu", "EUR")
        assert times.amount == pytest.approx(2.0, abs=0.02), "two hours that nothing ran in"
        assert times.they_say is not None
        assert times.we_say < times.they_say
        until(lambda: all(one.settled_at for one in admin.drift() if one.replica == replica), "both sides agree")
        told = ingle(fresh.home, "cost", "--drift").stdout
        assert replica in told
        assert f"{times.amount}" in told
        admin.delete_endpoint("early")
        until(lambda: all(one.settled_at for one in admin.drift()), "it is gone, and so is what it was about")
