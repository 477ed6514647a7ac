"""What replicas cost to the billionth, the stop where that is enough, and drift from what providers say."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from sqlalchemy import update

from control_plane.api import money
from control_plane.api.metering import MeteringOperations
from control_plane.autoscaler.spend import Spent
from control_plane.domain import Endpoint, Rung, SpendStop
from control_plane.errors import Unprocessable
from control_plane.metering.bill import Bound, Line, Spending, Story, bill, bounds, month_start, rung_of, stopping
from control_plane.metering.prices import NANO, PriceBook
from control_plane.store import endpoints, generations, replicas, spending
from control_plane.store.database import Store
from control_plane.store.models import EndpointRow
from tests.control_plane.harness import Installation, chat, create, ingle, state_of, until
from tests.control_plane.test_evidence import call_of
from tests.control_plane.test_store import SPEC, make_endpoint

HOUR = 3600.0
CHEAP = PriceBook(1, 0.0, "USD", {}, {"l4": 1.0, "l4/asleep": 0.25})
DEAR = PriceBook(2, 10 * HOUR, "USD", {}, {"l4": 2.0})


def story(*steps: tuple[float, Rung], end: float | None = None) -> Story:
    return Story("rep_1", "l4", 1, [(at * HOUR, rung) for at, rung in steps], None if end is None else end * HOUR)


@pytest.mark.parametrize(
    ("one", "since", "until_", "amounts"),
    [
        (story((0, Rung.HOT), end=2), 0, 24, [2.0]),
        (story((0, Rung.HOT), (1, Rung.ASLEEP), (5, Rung.HOT), end=6), 0, 24, [1.0, 1.0, 1.0]),
        # another price book in the midst of it, without a price for a rung: a share of the accelerator's
        (story((8, Rung.ASLEEP), end=12), 0, 24, [0.5, 0.4]),
        # it lives, and only a part of its life is asked for
        (story((0, Rung.HOT)), 1, 4, [3.0]),
        (story((0, Rung.HOT), end=2), 3, 4, []),
    ],
)
def test_lines_of_a_bill(one: Story, since: float, until_: float, amounts: list[float]) -> None:
    lines = bill([one], [CHEAP, DEAR], since * HOUR, until_ * HOUR)
    assert [line.amount_nano / 1e9 for line in lines] == pytest.approx(amounts)


@given(
    st.lists(st.tuples(st.floats(0, 20), st.sampled_from([Rung.HOT, Rung.ASLEEP, Rung.EMBER])), min_size=1, max_size=6),
    st.floats(0.1, 5),
    st.integers(1, 6),
)
def test_lines_are_of_one_life_without_gap_or_overlap(
    steps: list[tuple[float, Rung]], length: float, parts: int
) -> None:
    steps = sorted(steps, key=lambda step: step[0])
    end = steps[-1][0] + length
    lines = bill([story(*steps, end=end)], [CHEAP, DEAR], 0.0, 30 * HOUR)
    assert sum(line.hours for line in lines) == pytest.approx(end - steps[0][0], abs=1e-6)
    assert all(first.end <= second.start for first, second in itertools.pairwise(lines))
    # asked for in parts it comes to the same, but for what each line is rounded by
    bounds = [30 * HOUR * part / parts for part in range(parts + 1)]
    apart = [
        line
        for low, high in itertools.pairwise(bounds)
        for line in bill([story(*steps, end=end)], [CHEAP, DEAR], low, high)
    ]
    assert abs(_total(apart) - _total(lines)) <= len(apart) + len(lines)


def _total(lines: list[Line]) -> int:
    return sum(line.amount_nano for line in lines)


@pytest.mark.parametrize(
    ("state", "code", "rung"),
    [
        ("intended", None, None), ("starting", None, Rung.HOT), ("ready", None, Rung.HOT),
        ("draining", "resting", None),
        ("resting", "at_ember", Rung.EMBER), ("resting", "at_asleep", Rung.ASLEEP), ("resting", None, None),
    ],
)  # fmt: skip
def test_what_a_change_of_state_tells(state: str, code: str | None, rung: Rung | None) -> None:
    assert rung_of(state, code) is rung


@pytest.mark.parametrize(
    ("spent", "limits", "tenants", "expected"),
    [
        ([5, 5], [None, None], {}, {}),
        ([5, 5], [5, 6], {}, {"e0": ("endpoint", True, 1.0), "e1": ("endpoint", False, 5 / 6)}),
        ([5, 5], [6, 6], {"t": 10}, {"e0": ("tenant", True, 1.0), "e1": ("tenant", True, 1.0)}),
        ([5, 5], [6, None], {"t": 20}, {"e0": ("endpoint", False, 5 / 6), "e1": ("tenant", False, 0.5)}),
        ([0, 5], [None, 5], {"other": 1}, {"e1": ("endpoint", True, 1.0)}),
    ],
)
def test_the_bound_that_comes_first(
    spent: list[int],
    limits: list[int | None],
    tenants: Mapping[str, int],
    expected: dict[str, tuple[str, bool, float]],
) -> None:
    parts = [Spending(f"e{n}", "t", limit, cost) for n, (cost, limit) in enumerate(zip(spent, limits, strict=True))]
    found = {name: (own[0].whose, own[0].reached, own[0].share) for name, own in bounds(parts, tenants).items()}
    assert found == expected


MAY = datetime(2027, 5, 1, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("found", "stop", "expected"),
    [
        ([], None, None),
        ([Bound("endpoint", 4, 5)], None, None),
        ([Bound("endpoint", 5, 5)], None, "endpoint"),
        ([Bound("tenant", 9, 10), Bound("endpoint", 1, 5)], None, None),
        # less than it was, by a clock that is behind: it stays
        ([Bound("endpoint", 4, 5)], SpendStop(MAY + 60, "endpoint", 5), "endpoint"),
        ([Bound("tenant", 4, 5), Bound("endpoint", 1, 9)], SpendStop(MAY + 60, "tenant", 5), "tenant"),
        # a higher limit, none, another month
        ([Bound("endpoint", 4, 6)], SpendStop(MAY + 60, "endpoint", 5), None),
        ([Bound("endpoint", 4, 5)], SpendStop(MAY + 60, "tenant", 5), None),
        ([], SpendStop(MAY + 60, "tenant", 5), None),
        ([Bound("endpoint", 0, 5)], SpendStop(MAY - 60, "endpoint", 5), None),
        # higher, and not high enough
        ([Bound("endpoint", 8, 7)], SpendStop(MAY + 60, "endpoint", 5), "endpoint"),
    ],
)  # fmt: skip
def test_what_was_stopped_goes_on_for_a_cause_only(
    found: list[Bound], stop: SpendStop | None, expected: str | None
) -> None:
    bound = stopping(found, stop, MAY + 3600)
    assert (bound.whose if bound else None) == expected


async def test_what_goes_on_is_tried_again_and_told_once(store: Store) -> None:
    endpoint = await make_endpoint(store)
    async with store.write() as session:
        await session.execute(update(EndpointRow).values(failed_generation=1, failures=3, retry_at=MAY))
    stop = SpendStop(MAY, "tenant", 5)
    for told, value in ((True, stop), (False, stop), (True, None), (False, None)):
        async with store.write() as session:
            assert await spending.set_stop(session, endpoint, value, "why", MAY) is told
        async with store.read() as session:
            (now,) = await endpoints.list_endpoints(session)
        assert now.stop == value
        assert now.given_up is (value is not None)


def test_a_month_is_utcs() -> None:
    assert (
        month_start(datetime(2026, 12, 31, 23, 59, tzinfo=UTC).timestamp())
        == datetime(2026, 12, 1, tzinfo=UTC).timestamp()
    )


def test_an_endpoint_that_has_cost_enough_stops_and_goes_on(fresh: Installation) -> None:
    key = fresh.up().facts["key"]
    with fresh.admin() as admin:
        admin.set_prices({"currency": "USD", "models": {}, "accelerators": {"*": 3600.0}})  # one a second
        url = create(admin, "costly", "tokens-100+pace-20ms", idle_timeout=600, spend_limit=2.0)
        create(admin, "other", "fast", idle_timeout=600)
        with fresh.tenant(url, key) as tenant:
            with tenant.stream("POST", "/chat/completions", json=chat(stream=True)) as answer:
                # a stream that runs when the stop comes ends in its own time
                text = answer.read().decode()
            assert (answer.status_code, text.count("data: {")) == (200, 100)
            until(lambda: state_of(admin, "costly") == "paused", "it is stopped")
            assert admin.endpoint("costly").reason.code == "spend_limit_reached"
            until(lambda: tenant.post("/chat/completions", json=chat()).status_code == 503, "refused")
            refused = tenant.post("/chat/completions", json=chat())
            assert refused.json()["error"]["code"] == "spend_limit_reached"
        assert state_of(admin, "other") == "ready"
        assert any("spend limit is reached" in event.message for event in admin.events("costly"))
        lines = admin.cost_lines(endpoint="costly")
        (total,) = [cost.replicas_cost for cost in admin.cost(endpoint="costly")]
        assert sum(round(line.amount * NANO) for line in lines) == round(total * NANO), "to the billionth"
        assert total >= 2.0
        table = ingle(fresh.home, "cost", "--by-replica", "--endpoint", "costly")
        assert lines[0].replica in table.stdout
        # a higher limit, and it goes on
        admin.update_endpoint("costly", {"spend_limit": 100000.0})
        until(lambda: admin.endpoint("costly").reason.code != "spend_limit_reached", "it may again")
        admin.wake_endpoint("costly")
        until(lambda: state_of(admin, "costly") == "ready", "it serves again")
        # a tenant's limit stops all that is its
        admin.limit_tenant("default", {"spend_limit": 0.5})
        until(lambda: {state_of(admin, name) for name in ("costly", "other")} == {"paused"}, "both are stopped")
        # who deletes what was spent on has spent it all the same
        for name in ("costly", "other"):
            admin.delete_endpoint(name)
        until(lambda: not admin.endpoints(), "they are gone")
        costs = {one.endpoint: one for one in admin.cost()}
        assert all(one.deleted_at and one.replicas_cost > 0 for one in costs.values())
        amounts = {name: [line for line in admin.cost_lines() if line.endpoint == name] for name in costs}
        assert costs.keys() == amounts.keys() == {"costly", "other"}
        for name, own in amounts.items():
            assert sum(round(line.amount * NANO) for line in own) == round(costs[name].replicas_cost * NANO)
            assert {line.deleted_at for line in own} == {costs[name].deleted_at}
        shown = ingle(fresh.home, "cost", "--by-replica", "--month", time.strftime("%Y-%m", time.gmtime()))
        whole = sum(round(one.replicas_cost * NANO) for one in costs.values())
        assert f"replicas cost {whole / NANO:.9f} USD in all" in shown.stderr
        both = ingle(fresh.home, "cost", "--month", "2026-11", "--since", "1d")
        assert (both.returncode, "not both" in both.stderr) == (2, True)
        assert "write it as 2026-11" in ingle(fresh.home, "cost", "--month", "November").stderr
        assert "on record for 400 days" in ingle(fresh.home, "cost", "--since", "401d", "--until", "400d").stderr
        admin.create_endpoint({"name": "again", "region": "local-eu", "model": "fast"})
        until(lambda: state_of(admin, "again") == "paused", "stopped from the first")


async def test_what_has_ended_is_added_up_once_an_hour(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    books = [PriceBook(1, 0.0, "USD", {}, {"*": 1.0})]
    one = await make_endpoint(store)
    ends = {"long_ago": HOUR, "of_late": 9.5 * HOUR, "lives": None}
    async with store.write() as session:
        for name, end in ends.items():
            await replicas.add_intent(session, name, one, 1, Rung.HOT, 0.5 * HOUR)
            if end is not None:
                await replicas.write_replica(session, name, {"state": "terminated", "terminated_at": end})
    read: list[str] = []
    stories = spending.stories

    async def noting(*arguments: Any, **options: Any) -> list[tuple[Endpoint, Story]]:
        found = await stories(*arguments, **options)
        read.extend(story.replica_id for _, story in found)
        return found

    monkeypatch.setattr(spending, "stories", noting)
    spent = Spent()
    for now, looked_at in (
        (10.1 * HOUR, {"long_ago", "of_late", "lives"}),
        (10.9 * HOUR, {"of_late", "lives"}),
        (11.0 * HOUR, {"long_ago", "of_late", "lives"}),
        (11.5 * HOUR, {"lives"}),
    ):
        async with store.read() as session:
            read.clear()
            total = await spent.of(session, one, books, 0.0, now)
            assert set(read) == looked_at
            assert (
                total
                == await spending.spent(session, one, books, 0.0, now)
                == round((now - 0.5 * HOUR + 9.5 * HOUR) / HOUR * NANO)
            )
    spent.keep(set())
    async with store.read() as session:
        read.clear()
        await spent.of(session, one, books, 0.0, 11.5 * HOUR)
    assert "long_ago" in read


async def test_what_deleted_endpoints_cost_is_told_page_by_page(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spending, "STORIES", 2)
    books = [PriceBook(1, 0.0, "USD", {}, {"*": 1.0})]
    gone = await make_endpoint(store)
    async with store.write() as session:
        for number in range(5):
            await replicas.add_intent(session, f"old_{number}", gone, 1, Rung.HOT, HOUR * number)
            ended = {"state": "terminated", "terminated_at": HOUR * (number + 1)}
            await replicas.write_replica(session, f"old_{number}", ended)
        await endpoints.write_observed(session, gone, {"deleted_at": 6 * HOUR}, 6 * HOUR)
        lives = await endpoints.create_endpoint(session, gone.tenant_id, SPEC, 7 * HOUR)
        await replicas.add_intent(session, "new", lives, 1, Rung.HOT, 7 * HOUR)

    async def told(since: float, until_: float) -> dict[str, float]:
        async with store.read() as session:
            after, amounts = "", dict[str, float]()
            while page := await spending.stories(session, since, until_, name=gone.name, after=after):
                assert len(page) <= 2
                for owner, one in page:
                    cost = _total(bill([one], books, since, until_))
                    amounts[owner.id] = amounts.get(owner.id, 0) + cost / NANO
                after = page[-1][1].replica_id
            for owner in await spending.billed_endpoints(session, since, until_):
                total = await spending.spent(session, owner, books, since, until_)
                assert total == round(amounts.get(owner.id, 0) * NANO)
        return amounts

    assert await told(0.0, 9 * HOUR) == {gone.id: 5.0, lives.id: 2.0}
    assert await told(2.5 * HOUR, 4 * HOUR) == {gone.id: 1.5}
    assert await told(6.5 * HOUR, 9 * HOUR) == {lives.id: 2.0}, "gone before that"
    async with store.read() as session:
        first = await spending.billed_endpoints(session, 0.0, 9 * HOUR, limit=1)
        second = await spending.billed_endpoints(session, 0.0, 9 * HOUR, after=(first[0].name, first[0].id))
    assert {one.id: one.deleted_at for one in (*first, *second)} == {gone.id: 6 * HOUR, lives.id: None}


async def test_costs_come_in_pages_and_say_where_idle_hours_are_not_known(store: Store) -> None:
    day = 86_400.0
    for name, retention in (("kept", 90 * day), ("forgot", day)):
        one = await make_endpoint(store, name=name, retention=retention)
        async with store.write() as session:
            await replicas.add_intent(session, f"rep_{name}", one, 1, Rung.HOT, 28 * day)
    costs = MeteringOperations(store)

    async def page(**query: str) -> tuple[list[tuple[str, bool]], str | None]:
        given = {"limit": "1", "since": str(27 * day), **query}
        call = replace(call_of("-", 30 * day), query=given)
        found = await costs.cost(call)
        return [(one.endpoint, one.idle_hours is None) for one in map(_cost, found.items)], found.next

    first, cursor = await page()
    assert first == [("forgot", True)], "its single requests are gone, which would tell"
    assert cursor is not None
    second, cursor = await page(after=cursor)
    assert second == [("kept", False)]
    assert cursor is not None
    assert await page(after=cursor) == ([], None)
    assert (await page(since=str(29.5 * day)))[0] == [("forgot", False)]
    for since, until_ in ((30 * day, 31 * day), (29 * day, 28 * day)):
        with pytest.raises(Unprocessable, match="since must be before"):
            await page(since=str(since), until=str(until_))


def _cost(item: BaseModel) -> money.Cost:
    assert isinstance(item, money.Cost)
    return item


async def test_a_replica_is_billed_by_what_it_ran_on_however_long_ago(store: Store) -> None:
    endpoint = await make_endpoint(store, gpu="l4", gpus=1)
    async with store.write() as session:
        await replicas.add_intent(session, "rep_1", endpoint, 1, Rung.HOT, 0.0)
        for number in range(generations.GENERATIONS_KEPT + 1):
            await endpoints.update_endpoint(session, endpoint.name, {"gpu": f"h{number}"}, 1.0)
        asked = [row.generation for row in await generations.history(session, endpoint.id, 1000)]
        ((_, one),) = await spending.stories(session, 0.0, HOUR)
    assert one.accelerator == "l4"
    assert (min(asked), 2 in asked, len(asked)) == (1, False, generations.GENERATIONS_KEPT + 1)
