"""The ledger: what was replied, counted and billed is the same, whoever dies in between."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from control_plane.client import AdminClient
from control_plane.domain import UsageEvent
from control_plane.errors import StoreUnavailable
from control_plane.gateway.meter import Meter
from control_plane.store import usage as usages
from control_plane.store.database import Store
from tests.control_plane.harness import Installation, chat, create, ingle, until

CHAT = "/v1/chat/completions"


def event(request_id: str, **changes: Any) -> UsageEvent:
    values: dict[str, Any] = {
        "request_id": request_id, "tenant_id": "t", "key_id": "k", "endpoint_id": "e", "endpoint_name": "chat",
        "replica_id": "r", "region": "eu", "route": CHAT, "started_at": 7300.0, "duration_ms": 10.0, "ttft_ms": None,
        "held_ms": 0.0, "status": 200, "outcome": "ok", "streamed": False, "prompt_tokens": 3, "completion_tokens": 4,
        "cached_tokens": 1, "cost_nano": 5, "price_version": 1,
    }  # fmt: skip
    return UsageEvent(**values | changes)


async def summary(store: Store) -> list[tuple[int, int]]:
    async with store.read() as session:
        rows = await usages.usage_summary(session, since=0, until=10_000)
    return [(row["requests"], row["completion_tokens"]) for row in rows]


async def test_a_crash_at_any_moment_bills_each_request_once(store: Store, tmp_path: Path) -> None:
    def meter() -> Meter:
        return Meter(store, tmp_path, "eu", interval=60.0, max_bytes=100_000)

    first = meter()
    first.begin(event("a", outcome="gateway_lost", completion_tokens=0))
    first.record(event("a"))
    await first.flush()
    first.begin(event("b", outcome="gateway_lost", completion_tokens=0))
    first.begin(event("c", outcome="gateway_lost", completion_tokens=0))
    await first.flush()
    first.record(event("c"))
    second = meter()  # another gateway beside it: a journal of its own, and none of the first one's events
    await second.flush()
    assert await summary(store) == [(1, 4)]
    second.record(event("d"))
    # The first dies now. What takes over finds b open and c ended; d is its own.
    first._journal.close()
    third = meter()
    await third.flush()
    assert await summary(store) == [(3, 8)]
    await second.close()
    assert await summary(store) == [(4, 12)]
    await third.close()
    assert [path.read_bytes() for path in sorted(tmp_path.glob("*.usage"))] == [b"", b""]
    await meter().close()
    assert await summary(store) == [(4, 12)]


async def test_a_full_journal_drops_and_a_store_that_is_away_loses_nothing(store: Store, tmp_path: Path) -> None:
    meter = Meter(store, tmp_path, "eu", interval=60.0, max_bytes=1200)
    away = Store("sqlite+aiosqlite:////nonexistent/x.db")
    meter._store = away
    for number in range(10):
        meter.record(event(f"r{number}"))
    try:
        await meter.flush()
        raise AssertionError("a store that isn't there was written to")
    except StoreUnavailable:
        pass
    meter._store = store
    await meter.close()
    ((requests, _),) = await summary(store)
    assert 1 <= requests < 10
    await away.close()


async def test_the_last_flush_may_come_while_another_is_under_way(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = Meter(store, tmp_path, "eu", interval=60.0, max_bytes=100_000)
    add = usages.add_usage

    async def slowly(*arguments: Any) -> None:
        await asyncio.sleep(0.05)
        await add(*arguments)

    monkeypatch.setattr(usages, "add_usage", slowly)
    for name in "abc":
        meter.record(event(name))
    await asyncio.gather(meter.flush(), meter.close())
    assert await summary(store) == [(3, 12)]


async def test_hours_are_summed_as_events_arrive(store: Store) -> None:
    async with store.write() as session:
        await usages.add_usage(session, [event("a"), event("b", started_at=3600.0), event("c", ttft_ms=8.0)])
    async with store.write() as session:
        await usages.add_usage(session, [event("c"), event("d", ttft_ms=4.0)])
    async with store.read() as session:
        hours = await usages.usage_summary(session, since=0, until=10_000, by_hour=True)
        assert [(row["hour"], row["requests"], row["cost_nano"]) for row in hours] == [(3600, 1, 5), (7200, 3, 15)]
        assert hours[1]["mean_ttft_ms"] == 6.0
        assert await usages.tokens_cost(session, "e", 7200, 8000) == (3, 21, 15)
    async with store.write() as session:
        assert await usages.delete_events(session, "e", 8000.0, 3) == 3
        assert await usages.delete_events(session, None, 8000.0, 3) == 1
    assert await summary(store) == [(4, 16)]


def counted(root: str, installation: Installation, endpoint: str) -> dict[str, int]:
    with installation.tenant(root, "none") as client:
        text = client.get("/metrics").text
    found = re.findall(rf'ingle_tokens_total{{endpoint="{endpoint}",kind="(\w+)",region="local-eu"}} (\S+)', text)
    return {kind: int(float(value)) for kind, value in found}


def test_ledger_counters_and_replies_agree(platform: Installation, second_gateway: str) -> None:
    roots = [platform.programs[0].facts["gateways"]["local-eu"], second_gateway]
    with platform.admin() as admin:
        create(admin, "ledger", "fast")
        before = admin.prices()[0]
        book = {"models": {"fast": {"prompt": 1, "cached": 1, "completion": 2}}, "accelerators": {"cpu": 3}}
        version = admin.set_prices(book).version
        assert version == before.version + 1
        key = admin.create_key({"name": "ledger"}).secret
        until(lambda: _priced(admin, roots, platform, key), "both gateways know the prices")
        base = totals(admin)
        replied: list[tuple[int, int]] = []

        def work(root: str, number: int) -> None:
            with platform.tenant(root, key) as client:
                for index in range(10):
                    count = 1 + (number + index) % 5
                    body = chat("one two three", model="ledger", max_tokens=count, stream=index % 2 == 0)
                    reply = client.post(CHAT, json=body)
                    assert reply.status_code == 200
                    made = (
                        reply.text.count('"content"') if index % 2 == 0 else reply.json()["usage"]["completion_tokens"]
                    )
                    replied.append((3, made))
                assert client.post(CHAT, content=b'{"model": "ledger", "messages": 5}').status_code >= 400

        threads = [threading.Thread(target=work, args=(root, n)) for n, root in enumerate(roots * 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(replied) == 40
        prompt, completion = (sum(part) for part in zip(*replied, strict=True))

        def billed() -> tuple[int, ...]:
            return tuple(now - then for now, then in zip(totals(admin), base, strict=True))

        until(lambda: billed()[0] == 44, "all are in the ledger")
        assert billed()[1:3] == (prompt, completion)
        assert billed()[3] == prompt * 1000 + completion * 2000
        counters = [counted(root, platform, "ledger") for root in roots]
        assert sum(each["completion"] for each in counters) == totals(admin)[2]
        (cost,) = admin.cost(endpoint="ledger")
        assert cost.replica_hours > 0
        assert cost.idle_hours is not None
        assert cost.warmth_cost is not None
        assert 0 <= cost.idle_hours <= cost.replica_hours
        assert cost.tokens == sum(totals(admin)[1:3])
        assert cost.replicas_cost >= cost.warmth_cost
        table = ingle(platform.home, "cost", "--endpoint", "ledger", "-o", "json")
        assert json.loads(table.stdout)[0]["endpoint"] == "ledger"
        assert ingle(platform.home, "usage", "--endpoint", "ledger", "--by-hour").stdout.startswith("hour")
        admin.delete_endpoint("ledger")


def _priced(admin: AdminClient, roots: list[str], platform: Installation, key: str) -> bool:
    before = totals(admin)
    for root in roots:
        with platform.tenant(root, key) as client:
            assert client.post(CHAT, json=chat("x", model="ledger", max_tokens=1)).status_code == 200
    until(lambda: totals(admin)[0] == before[0] + 2, "billed")
    return totals(admin)[3] - before[3] == 2 * 3000


def totals(admin: AdminClient) -> tuple[int, int, int, int]:
    """Requests, prompt and completion tokens, and billionths of the endpoint `ledger`."""
    rows = admin.usage(endpoint="ledger")
    fields = ("requests", "prompt_tokens", "completion_tokens")
    requests, prompt, completion = (sum(getattr(row, name) for row in rows) for name in fields)
    return requests, prompt, completion, round(sum(row.price for row in rows) * 1e9)


def test_a_stream_that_its_client_cut_is_billed_for_what_came(platform: Installation) -> None:
    root = platform.programs[0].facts["gateways"]["local-eu"]
    with platform.admin() as admin:
        create(admin, "cutoff", "fast+pace-20ms")
        key = admin.create_key({"name": "cutoff"}).secret
        with (
            platform.tenant(root, key) as client,
            client.stream("POST", CHAT, json=chat("a b c", model="cutoff", stream=True, max_tokens=500)) as reply,
        ):
            chunks = reply.iter_raw()
            for _ in range(5):
                next(chunks)
        until(lambda: [row.requests for row in admin.usage(endpoint="cutoff")] == [1], "metered")
        (row,) = admin.usage(endpoint="cutoff")
        assert 5 <= row.completion_tokens < 500
        assert row.prompt_tokens > 0
        admin.delete_endpoint("cutoff")


def test_a_gateway_that_is_killed_amid_requests_loses_none_of_them(fresh: Installation) -> None:
    fresh.more = {"INGLE_TIMING__USAGE_FLUSH": "60"}  # nothing reaches the store before the end
    fresh.up("--keep-replicas")
    gateway = fresh.start("serve", "gateway", "-r", "local-eu", "--gateway", "127.0.0.1:0")
    root = gateway.facts["gateways"]["local-eu"]
    with fresh.admin() as admin:
        create(admin, "chat", "fast+pace-50ms", idle_timeout=600)
        key = admin.create_key({"name": "k"}).secret
        with fresh.tenant(root, key) as client:
            for _ in range(3):
                assert client.post(CHAT, json=chat(model="chat", max_tokens=2)).status_code == 200
            with client.stream("POST", CHAT, json=chat(model="chat", max_tokens=100, stream=True)) as reply:
                chunks = reply.iter_raw()
                next(chunks)
                gateway.kill()
        assert admin.usage() == []
        fresh.more = {}
        fresh.start("serve", "gateway", "-r", "local-eu", "--gateway", "127.0.0.1:0")
        until(lambda: [row.requests for row in admin.usage()] == [4], "all four, the cut one too")
        assert admin.usage()[0].completion_tokens == 6
