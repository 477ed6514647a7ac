from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, select, text, update

from control_plane.domain import Demand, Endpoint, ReplicaState, Rung, UsageEvent
from control_plane.errors import ConfigError, Conflict, LeaseLost, NotFound, PreconditionFailed, StoreUnavailable
from control_plane.store import audit, endpoints, leases, replicas, tenants, traffic
from control_plane.store import usage as usages
from control_plane.store.database import Store, sync_url
from control_plane.store.models import Base, ColdStartRow, EndpointRow
from control_plane.store.schema import require_schema, schema_status, upgrade_schema

SPEC: dict[str, Any] = {
    "name": "chat",
    "region": "local-eu",
    "model": "m",
    "gpu": None,
    "gpus": 0,
    "engine_args": ["--a", "b"],
    "min_replicas": 0,
    "max_replicas": 2,
    "idle_timeout": 300.0,
    "max_wait": 60.0,
    "warmth": "cold",
}


async def make_endpoint(store: Store, **changes: Any) -> Endpoint:
    async with store.write() as session:
        try:
            tenant = await tenants.get_tenant(session, "acme")
        except NotFound:
            tenant = await tenants.create_tenant(session, "acme", 1.0)
        return await endpoints.create_endpoint(session, tenant.id, SPEC | changes, 100.0)


def usage(request_id: str, **changes: Any) -> UsageEvent:
    values: dict[str, Any] = {
        "request_id": request_id,
        "tenant_id": "t",
        "key_id": "k",
        "endpoint_id": "e",
        "endpoint_name": "chat",
        "replica_id": "r",
        "region": "local-eu",
        "route": "/v1/chat/completions",
        "started_at": 100.0,
        "duration_ms": 10.0,
        "ttft_ms": None,
        "held_ms": 0.0,
        "status": 200,
        "outcome": "ok",
        "streamed": False,
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cached_tokens": 1,
    }
    return UsageEvent(**(values | changes))


def test_migrations_make_what_the_models_say(database_url: str) -> None:
    assert not schema_status(database_url).up_to_date
    assert upgrade_schema(database_url).up_to_date
    assert upgrade_schema(database_url).up_to_date  # again changes nothing
    engine = create_engine(sync_url(database_url))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_an_unknown_or_missing_revision_is_refused(database_url: str) -> None:
    with pytest.raises(ConfigError, match="ingle db upgrade"):
        require_schema(database_url)
    upgrade_schema(database_url)
    require_schema(database_url)
    engine = create_engine(sync_url(database_url))
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    for refuses in (require_schema, upgrade_schema):
        with pytest.raises(ConfigError, match="9999"):
            refuses(database_url)


async def test_a_name_is_unique_until_its_endpoint_is_gone(store: Store) -> None:
    first = await make_endpoint(store)
    assert first.desired_replicas == 1
    assert first.engine_args == ("--a", "b")
    with pytest.raises(Conflict, match="choose another name"):
        await make_endpoint(store)
    async with store.write() as session:
        await endpoints.write_observed(session, first, {"state": "deleted", "deleted_at": 5.0}, 5.0)
    second = await make_endpoint(store)
    assert second.id != first.id


async def test_an_update_counts_generations_and_runtime_generations(store: Store) -> None:
    await make_endpoint(store)
    async with store.write() as session:
        same = await endpoints.update_endpoint(session, "chat", {"model": "m"}, 101.0)
        idle = await endpoints.update_endpoint(session, "chat", {"idle_timeout": 9.0}, 102.0, if_generation=1)
        model = await endpoints.update_endpoint(session, "chat", {"model": "n"}, 103.0)
    assert [same.generation, idle.generation, model.generation] == [1, 2, 3]
    assert [same.runtime_generation, idle.runtime_generation, model.runtime_generation] == [1, 1, 3]
    async with store.write() as session:
        with pytest.raises(PreconditionFailed, match="generation 3"):
            await endpoints.update_endpoint(session, "chat", {"model": "o"}, 104.0, if_generation=2)


async def test_a_lease_is_one_owners_until_it_expires_and_fences_its_writes(store: Store) -> None:
    endpoint = await make_endpoint(store)

    async def take(owner: str) -> leases.Lease | None:
        async with store.write() as session:
            return await leases.take_lease(session, endpoint.id, owner, 100.0, 10.0)

    first = await take("a")
    assert first is not None
    assert await take("b") is None
    await let_leases_end(store)
    second = await take("b")
    assert second is not None
    assert second.token > first.token
    with pytest.raises(LeaseLost):
        await _write_under(store, first, endpoint)
    async with store.read() as session:
        assert await replicas.live_replicas(session) == []  # the refused transaction left nothing
    async with store.write() as session:
        await leases.guard(session, second, 100.0)
        await replicas.add_intent(session, "rep_2", endpoint, endpoint.generation, Rung.HOT, 112.0)
    await let_leases_end(store)
    with pytest.raises(LeaseLost):
        async with store.write() as session:
            await leases.guard(session, second, 100.0)
    async with store.write() as session:
        assert await leases.owners(session) == ["b"]
        await leases.release_leases(session, "b")
    assert await take("c") is not None


async def let_leases_end(store: Store) -> None:
    """As if their time were over, by whichever clock."""
    async with store.write() as session:
        await session.execute(update(EndpointRow).values(lock_expires_at=EndpointRow.lock_expires_at - 10.0))


@pytest.mark.parametrize("store", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
async def test_clocks_that_differ_agree_on_leases(store: Store) -> None:
    """By the server's clock: one that runs five minutes ahead takes nothing early, one behind waits no longer."""
    endpoint = await make_endpoint(store)
    for early, late in ((0.0, 300.0), (300.0, 0.0)):
        async with store.write() as session:
            assert await leases.take_lease(session, endpoint.id, "a", early, 10.0) is not None
        async with store.write() as session:
            assert await leases.take_lease(session, endpoint.id, "b", late, 10.0) is None
        await let_leases_end(store)
        async with store.write() as session:
            assert await leases.take_lease(session, endpoint.id, "b", late, 10.0) is not None
        await let_leases_end(store)


async def _write_under(store: Store, lease: leases.Lease, endpoint: Endpoint) -> None:
    async with store.write() as session:
        await replicas.add_intent(session, "rep_1", endpoint, endpoint.generation, Rung.HOT, 111.0)
        await leases.guard(session, lease, 100.0)


async def test_one_of_many_takes_a_lease(store: Store) -> None:
    endpoint = await make_endpoint(store)

    async def take(owner: str) -> leases.Lease | None:
        async with store.write() as session:
            return await leases.take_lease(session, endpoint.id, owner, 100.0, 10.0)

    taken = await asyncio.gather(*(take(f"o{number}") for number in range(8)))
    assert sum(lease is not None for lease in taken) == 1


async def test_a_request_is_billed_once(store: Store) -> None:
    for _ in range(2):
        async with store.write() as session:
            await usages.add_usage(session, [usage("a"), usage("b", ttft_ms=2.0)])
    async with store.write() as session:
        await usages.add_usage(session, [usage("a", prompt_tokens=99), usage("c")])
    async with store.read() as session:
        rows = await usages.usage_summary(session, since=0, until=1000)
        none = await usages.usage_summary(session, since=3700, until=9000)
    assert none == []
    assert len(rows) == 1
    assert rows[0] == {
        "tenant_id": "t",
        "endpoint_name": "chat",
        "region": "local-eu",
        "requests": 3,
        "prompt_tokens": 9,
        "completion_tokens": 12,
        "cached_tokens": 3,
        "wasted_tokens": 0,
        "cost_nano": 0,
        "mean_duration_ms": 10.0,
        "mean_ttft_ms": 2.0,
    }
    assert isinstance(rows[0]["prompt_tokens"], int)


async def test_the_time_of_the_last_finish_never_goes_back(store: Store) -> None:
    endpoint = await make_endpoint(store)
    for demand in (Demand("g", 1, 2, 50.0, 60.0), Demand("g", 0, 0, 40.0, 61.0)):
        async with store.write() as session:
            await traffic.report_demand(session, "g", {endpoint.id: demand})
    async with store.read() as session:
        assert await traffic.demand_by_endpoint(session) == {endpoint.id: [Demand("g", 0, 0, 50.0, 61.0)]}


async def test_a_gateway_beats_and_the_last_one_heard_counts(store: Store) -> None:
    for gateway, now in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        async with store.write() as session:
            await traffic.beat(session, gateway, "local-eu", f"https://{gateway}", 1.0, now)
    async with store.write() as session:
        assert await traffic.gateway_urls(session) == {"local-eu": ("https://a", 3.0)}
        await traffic.forget_old_gateways(session, 2.5)
        assert await traffic.gateway_urls(session) == {"local-eu": ("https://a", 3.0)}


async def test_replicas_are_live_until_terminated(store: Store) -> None:
    endpoint = await make_endpoint(store)
    async with store.write() as session:
        await replicas.add_intent(session, "rep_1", endpoint, endpoint.generation, Rung.HOT, 1.0)
        await replicas.add_intent(session, "rep_2", endpoint, endpoint.generation, Rung.HOT, 2.0)
        await replicas.write_replica(session, "rep_1", {"state": ReplicaState.TERMINATED, "terminated_at": 3.0})
    async with store.read() as session:
        assert [item.id for item in await replicas.live_replicas(session)] == ["rep_2"]
        assert [item.id for item in await replicas.recent_replicas(session, endpoint.id)] == ["rep_2", "rep_1"]
        states = await replicas.replica_states(session, ["rep_1", "rep_2", "rep_3"])
    assert states == {"rep_1": ReplicaState.TERMINATED, "rep_2": ReplicaState.INTENDED}


async def test_cold_starts_are_estimated_from_the_last_five(store: Store) -> None:
    endpoint = await make_endpoint(store)
    async with store.write() as session:
        for number, took in enumerate([9000.0, 100.0, 200.0, 300.0, 400.0, 500.0]):
            await endpoints.add_cold_start(session, endpoint, f"r{number}", took, {"load": took}, float(number))
    async with store.read() as session:
        assert await endpoints.cold_start_estimates(session) == {endpoint.id: 300.0}


async def test_history_is_bounded(store: Store) -> None:
    endpoint = await make_endpoint(store)
    async with store.write() as session:
        for number in range(endpoints.COLD_STARTS_KEPT + 3):
            await endpoints.add_cold_start(session, endpoint, f"r{number}", 1.0, {}, float(number))
            await replicas.add_intent(session, f"rep_{number}", endpoint, endpoint.generation, Rung.HOT, float(number))
        changes = {"state": ReplicaState.TERMINATED, "terminated_at": 50.0}
        await replicas.write_replica(session, "rep_0", changes)
        starts = (await session.scalars(select(ColdStartRow.replica_id))).all()
        assert set(starts) == {f"r{number}" for number in range(3, endpoints.COLD_STARTS_KEPT + 3)}
        for name in ("rep_0", "rep_1"):
            endpoints.add_event(session, endpoint, 40.0, "replica", None, "up", state="ready", replica_id=name)
        await endpoints.tidy(session, 200.0 + 90 * 86_400)
        assert (await session.scalars(select(ColdStartRow.replica_id))).all() == []
        assert len(await replicas.replica_states(session, ["rep_0", "rep_1"])) == 2, "what it cost is still asked for"
        await endpoints.tidy(session, 60.0 + endpoints.REPLICAS_KEPT_SECONDS)
        assert await replicas.replica_states(session, ["rep_0", "rep_1"]) == {"rep_1": ReplicaState.INTENDED}
        left = [row.replica_id for row in await endpoints.list_events(session) if row.kind == "replica"]
        assert left == ["rep_1"], "of one that lives all is kept"


async def test_rotation_never_lengthens_a_keys_life(store: Store) -> None:
    async with store.write() as session:
        tenant = await tenants.create_tenant(session, "acme", 1.0)
        row = await tenants.add_key(
            session, key_id="k1", tenant_id=tenant.id, name="n", digest=b"x", prefix="p",
            expires_at=50.0, now=1.0,
        )  # fmt: skip
        await tenants.end_key_at(session, row, 90.0, "k2")
        assert row.expires_at == 50.0
        assert [key.id for key in await tenants.usable_keys(session, 49.0)] == ["k1"]
        assert await tenants.usable_keys(session, 50.0) == []
        await tenants.revoke_key(session, "k1", 10.0)
        assert await tenants.usable_keys(session, 11.0) == []


async def test_a_clash_at_the_end_of_a_transaction_is_a_conflict(store: Store) -> None:
    for expected in (None, Conflict):
        answer: dict[str, Any] = {"actor": "a", "key": "k", "fingerprint": "f", "status": 201}
        answer |= {"response": {}, "now": 1.0}
        if expected is None:
            async with store.write() as session:
                audit.remember_answer(session, **answer)
        else:
            with pytest.raises(expected, match="look again"):
                async with store.write() as session:
                    audit.remember_answer(session, **answer)


async def test_changes_wake_those_who_subscribed(store: Store) -> None:
    routes, demand = store.subscribe("routes"), store.subscribe("demand")
    async with store.read() as session:
        before = await endpoints.routes_revision(session)
    await make_endpoint(store)
    await routes.wait(5.0)
    async with store.read() as session:
        assert await endpoints.routes_revision(session) == before + 1
    assert not demand._event.is_set()


async def test_a_database_that_is_away_is_unavailable_and_not_something_else() -> None:
    store = Store("postgresql+psycopg://nobody@127.0.0.1:1/none")
    with pytest.raises(StoreUnavailable):
        async with store.read() as session:
            await endpoints.routes_revision(session)
    await store.close()


@pytest.mark.parametrize("url", ["mysql://x/y", "nonsense", "sqlite:///x.db"])
def test_other_databases_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="database_url"):
        Store(url)


async def test_other_processes_hear_of_a_commit(store: Store) -> None:
    """Two stores on one PostgreSQL, as of two processes; SQLite's is one process, and has nothing to hear."""
    other = Store(store.engine.url.render_as_string(hide_password=False))
    listening = asyncio.create_task(other.listen())
    poke, quiet = other.subscribe("endpoints"), other.subscribe("usage")
    try:
        if store.sqlite:
            await listening
            return
        await poke.wait(20)  # it listens now, and doesn't know what it missed
        await quiet.wait(20)
        await make_endpoint(store)
        assert await poke.wait(20)
        assert not await quiet.wait(0.2)

        # one that is cut off listens again, and looks at everything
        async with store.read() as session:
            await session.execute(
                text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query = 'LISTEN ingle'")
            )
        assert await quiet.wait(20)
        await poke.wait(20)
        await make_endpoint(store, name="second")
        assert await poke.wait(20)
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await other.close()


async def test_a_write_that_is_cancelled_anywhere_keeps_nobody_out(store: Store) -> None:
    """As a time-out, a client that leaves or a stop cancels it; what it leaves behind is collected late or never."""
    endpoint = await make_endpoint(store)
    other = Store(store.engine.url.render_as_string(hide_password=False))

    async def write() -> None:
        async with store.write() as session:
            await leases.take_lease(session, endpoint.id, "me", 100.0, 5.0)
            await endpoints.bump_routes(session)
            await leases.take_lease(session, endpoint.id, "me", 100.0, 5.0)

    gc.collect()
    gc.disable()
    try:
        for steps in range(160):
            task = asyncio.create_task(write())
            for _ in range(steps % 40):
                await asyncio.sleep(0)
            await asyncio.sleep(steps // 40 * 0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with other.write() as session:
                await endpoints.bump_routes(session)
    finally:
        gc.enable()
        await other.close()
