"""Endpoints sleep, wake and survive: with real processes that are really killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import time

import aiohttp
import httpx
import psycopg
import pytest

from control_plane.client import AdminClient
from control_plane.errors import Unavailable
from control_plane.store.schema import upgrade_schema
from tests.control_plane.harness import (
    Installation,
    chat,
    create,
    free_port,
    ingle,
    installed,
    replica_pids,
    starts,
    state_of,
    until,
)

CHAT = "/v1/chat/completions"


async def burst(installation: Installation, url: str, key: str, body: dict[str, object], count: int) -> list[int]:
    """`count` requests at once; their statuses."""
    context = ssl.create_default_context(cafile=installation.ca_file)
    connector = aiohttp.TCPConnector(limit=count, ssl=context)
    headers = {"Authorization": f"Bearer {key}"}

    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def one() -> int:
            async with session.post(f"{url}/chat/completions", json=body) as reply:
                await reply.read()
                return reply.status

        return await asyncio.gather(*(one() for _ in range(count)))


def sleep(client: AdminClient, name: str) -> None:
    client.sleep_endpoint(name)
    until(lambda: state_of(client, name) == "zero", f"{name} at zero")


def test_a_thousand_requests_at_zero_make_one_start_and_a_thousand_answers(fresh: Installation) -> None:
    key = fresh.up().facts["key"]
    with fresh.admin() as client:
        url = create(client, "chat", "fast+start-300ms", idle_timeout=600)
        sleep(client, "chat")
        before = starts(fresh)
        statuses = asyncio.run(burst(fresh, url, key, chat(), 1000))
        assert statuses == [200] * 1000
        assert starts(fresh) == before + 1
        until(lambda: [u.requests for u in client.usage(endpoint="chat")] == [1000], "each is metered once")


def test_clients_that_gave_up_run_nothing_and_keep_nothing_awake(fresh: Installation) -> None:
    key = fresh.up().facts["key"]
    with fresh.admin() as client:
        url = create(client, "chat", "fast+start-1000ms", idle_timeout=1)
        until(lambda: state_of(client, "chat") == "zero", "asleep")

        async def give_up() -> None:
            context = ssl.create_default_context(cafile=fresh.ca_file)
            async with httpx.AsyncClient(verify=context, timeout=0.5, trust_env=False) as tenant:
                headers = {"Authorization": f"Bearer {key}"}
                asked = [tenant.post(f"{url}/chat/completions", json=chat(), headers=headers) for _ in range(10)]
                replies = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(reply, httpx.ReadTimeout) for reply in replies)

        asyncio.run(give_up())
        until(lambda: state_of(client, "chat") == "ready", "what was begun is finished")
        (address,) = [r.address for r in client.endpoint("chat").replicas if r.state == "ready"]
        assert httpx.get(f"http://{address}/health").json()["served"] == 0
        until(lambda: state_of(client, "chat") == "zero", "asleep again")
        assert client.usage() == []
        assert starts(fresh) == 2


def test_a_full_queue_is_refused_at_once(fresh: Installation) -> None:
    fresh.more = {"INGLE_LIMITS__MAX_HELD": "3"}
    key = fresh.up().facts["key"]
    with fresh.admin() as client:
        url = create(client, "chat", "fast+start-1500ms", idle_timeout=600)
        sleep(client, "chat")
        statuses = asyncio.run(burst(fresh, url, key, chat(), 20))
        assert sorted(statuses) == [200] * 3 + [503] * 17


def test_a_hold_ends_after_max_wait_with_a_measured_retry_after(fresh: Installation) -> None:
    program = fresh.up()
    with fresh.admin() as client:
        create(client, "chat", "fast+start-2500ms", idle_timeout=600, max_wait=0.5, warmth="cold")
        sleep(client, "chat")
        with fresh.tenant(program.facts["gateways"]["local-eu"], program.facts["key"]) as tenant:
            reply = tenant.post(CHAT, json=chat(model="chat"))
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "endpoint_starting")
            assert int(reply.headers["retry-after"]) >= 3


def test_a_held_stream_may_ask_for_comments_meanwhile(fresh: Installation) -> None:
    key = fresh.up().facts["key"]
    with fresh.admin() as client:
        url = create(client, "chat", "fast+start-1500ms", idle_timeout=600)
        sleep(client, "chat")
        with fresh.tenant(url, key) as tenant:
            comments = {"x-ingle-keepalive": "0.2"}
            body = chat(stream=True, max_tokens=2)
            early = tenant.post("/chat/completions", json=body, headers={**comments, "x-ingle-wait": "0.5"})
            assert early.status_code == 200
            *before, last = early.text.rstrip().split("\n\n")
            assert set(before) == {": held"}
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "endpoint_starting"
            held = tenant.post("/chat/completions", json=body, headers=comments)
            frames = held.text.rstrip().split("\n\n")
            assert frames[0] == ": held"
            assert frames[-1] == "data: [DONE]"
            assert len([frame for frame in frames if frame.startswith("data: {")]) == 2
            until(lambda: [u.completion_tokens for u in client.usage()] == [2], "metered like any other")
            refused = tenant.post("/chat/completions", json=body, headers={"x-ingle-keepalive": "0"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-ingle-keepalive")


def test_a_killed_replica_is_replaced_without_a_human(fresh: Installation) -> None:
    key = fresh.up().facts["key"]
    with fresh.admin() as client:
        url = create(client, "chat", "fast+child", idle_timeout=600)
        ((first, pid),) = replica_pids(fresh).items()
        os.kill(pid, signal.SIGKILL)
        until(lambda: first not in replica_pids(fresh), "the kernel is done with it")
        with fresh.tenant(url, key) as tenant:
            assert tenant.post("/chat/completions", json=chat()).status_code == 200  # held, then answered by the next
        until(lambda: state_of(client, "chat") == "ready", "ready again")
        assert set(replica_pids(fresh)) != {first}
        until(lambda: len(replica_pids(fresh)) == 1, "the first one's children are gone")
        events = client.events("chat", limit=200)
        assert any(e.replica == first and e.code == "replica_exited" and "signal 9" in e.message for e in events)


def test_a_hung_replica_leaves_rotation_and_is_replaced(fresh: Installation) -> None:
    fresh.more = {"INGLE_TIMING__PROBE_TIMEOUT": "0.3", "INGLE_TIMING__LIVENESS_GRACE": "0.5"}
    fresh.up()
    with fresh.admin() as client:
        create(client, "chat", idle_timeout=600)
        ((first, pid),) = replica_pids(fresh).items()
        os.kill(pid, signal.SIGSTOP)

        def replaced() -> bool:
            return [r.id for r in client.endpoint("chat").replicas if r.state == "ready"] not in ([], [first])

        until(replaced, "another replica is ready")
        until(lambda: first not in replica_pids(fresh), "the hung one is gone")
        codes = {event.code for event in client.events("chat", limit=200) if event.replica == first}
        assert {"unhealthy", "unresponsive"} <= codes


def test_passing_failures_are_retried_with_patience_and_then_given_up(fresh: Installation) -> None:
    fresh.more = {"INGLE_TIMING__MAX_FAILURES": "3"}
    fresh.up()
    with fresh.admin() as client:
        client.create_endpoint({"name": "chat", "region": "local-eu", "model": "unknown-code"})
        until(lambda: client.endpoint("chat").given_up, "given up")
        failed = client.endpoint("chat")
        assert (failed.state, failed.reason.code) == ("failed", "out_of_memory")
        assert starts(fresh) == 3
        client.update_endpoint("chat", {"model": "fast"})
        until(lambda: state_of(client, "chat") == "ready", "a new generation is tried")


def test_idle_is_counted_from_the_last_finished_request(fresh: Installation) -> None:
    key = fresh.up().facts["key"]
    with fresh.admin() as client:
        url = create(client, "chat", "fast+pace-100ms", idle_timeout=1)
        with (
            fresh.tenant(url, key) as tenant,
            tenant.stream("POST", "/chat/completions", json=chat(stream=True, max_tokens=30)) as reply,
        ):
            for _ in reply.iter_raw():  # three idle time-outs long
                assert state_of(client, "chat") == "ready"
        finished = time.time()
        until(lambda: state_of(client, "chat") == "zero", "asleep")
        scaled = [e for e in client.events("chat", limit=200) if e.kind == "scaled"][-1]
        assert "no request for 1 s" in scaled.message
        assert scaled.at >= time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(finished))
        assert replica_pids(fresh) == {}


def test_killing_the_control_plane_leaves_replicas_serving_and_nothing_orphaned(fresh: Installation) -> None:
    fresh.more = {
        "INGLE_GATEWAY": f"127.0.0.1:{free_port()}",
        "INGLE_ADMIN": f"127.0.0.1:{free_port()}",
    }
    assert ingle(fresh.home, "db", "upgrade").returncode == 0
    api, controller = fresh.start("serve", "api"), fresh.start("serve", "controller")
    gateway = fresh.start("serve", "gateway", "--region", "local-eu")
    with fresh.admin() as client:
        key = client.create_key({"name": "k"}).secret
        url = create(client, "chat", "fast+pace-20ms", idle_timeout=600)
        assert url.startswith(gateway.facts["gateways"]["local-eu"])
        before = replica_pids(fresh)
        with fresh.tenant(url, key) as tenant:
            with tenant.stream("POST", "/chat/completions", json=chat(stream=True, max_tokens=20)) as reply:
                chunks = reply.iter_raw()
                next(chunks)
                api.kill()
                controller.kill()
                assert b"".join(chunks).endswith(b"data: [DONE]\n\n")
            assert tenant.post("/chat/completions", json=chat()).status_code == 200
    fresh.start("serve", "api")
    controller = fresh.start("serve", "controller")
    with fresh.admin() as client:
        sleep(client, "chat")
        assert starts(fresh) == len(before) == 1
        assert replica_pids(fresh) == {}
        with fresh.tenant(url, key) as tenant:  # and the gateway still wakes it
            assert tenant.post("/chat/completions", json=chat()).status_code == 200
        assert starts(fresh) == 2


def test_killed_amid_a_start_nothing_is_started_twice(fresh: Installation) -> None:
    program = fresh.up()
    with fresh.admin() as client:
        client.create_endpoint({"name": "chat", "region": "local-eu", "model": "fast+start-700ms"})
        until(lambda: starts(fresh) == 1, "the replica was started")
        program.kill()
    before = replica_pids(fresh)
    fresh.up()
    with fresh.admin() as client:
        until(lambda: state_of(client, "chat") == "ready", "ready")
        assert replica_pids(fresh) == before
        assert starts(fresh) == 1


def test_what_runs_without_a_row_is_ended(fresh: Installation) -> None:
    program = fresh.up()
    with fresh.admin() as client:
        create(client, "chat")
    program.kill()
    for path in fresh.home.glob("ingle.db*"):
        path.unlink()
    assert len(replica_pids(fresh)) == 1
    fresh.up()
    until(lambda: replica_pids(fresh) == {}, "the orphan is gone")


def test_a_clean_stop_ends_replicas_unless_told_to_keep_them(fresh: Installation) -> None:
    program = fresh.up("--keep-replicas")
    with fresh.admin() as client:
        create(client, "chat", idle_timeout=600)
    before = replica_pids(fresh)
    assert program.stop() == 0
    assert replica_pids(fresh) == before
    program = fresh.up()
    with fresh.admin() as client:
        until(lambda: state_of(client, "chat") == "ready", "found again")
        assert starts(fresh) == 1
    assert program.stop() == 0
    assert replica_pids(fresh) == {}


def test_a_home_has_one_up_and_a_port_one_owner(fresh: Installation) -> None:
    program = fresh.up()
    second = ingle(fresh.home, "up", "--gateway", "127.0.0.1:0", "--admin", "127.0.0.1:0")
    assert second.returncode == 2
    assert second.stderr == f"ingle: another `ingle up` runs on {fresh.home}: stop it or choose another --home\n"
    taken = program.facts["admin"].removeprefix("https://")
    other = fresh.home.parent / "other"
    for flag in ("--admin", "--gateway"):
        flags = {"--admin": "127.0.0.1:0", "--gateway": "127.0.0.1:0"} | {flag: taken}
        clash = ingle(other, "up", *(part for pair in flags.items() for part in pair))
        assert clash.returncode == 2
        assert f"{taken} is in use: stop what listens there or choose another {flag}" in clash.stderr
        assert "Traceback" not in clash.stderr


@pytest.mark.postgres
def test_on_postgres_nobody_waits_for_a_poll(postgres_url: str, fresh: Installation) -> None:
    """Polls come once in ten minutes here: what happens before that was told by the database."""
    with psycopg.connect(postgres_url.replace("+psycopg", "") + "postgres", autocommit=True) as connection:
        connection.execute("CREATE DATABASE told")
    slow = {f"INGLE_TIMING__{name}": "600" for name in ("TICK", "SNAPSHOT_POLL")}
    fresh.more = {"INGLE_DATABASE_URL": f"{postgres_url}told", **slow}
    upgrade_schema(fresh.more["INGLE_DATABASE_URL"])
    fresh.start("serve", "controller")
    fresh.start("serve", "api", "--admin", f"127.0.0.1:{free_port()}")
    gateway = fresh.start("serve", "gateway", "-r", "local-eu", "--gateway", f"127.0.0.1:{free_port()}")
    with fresh.admin() as client:
        key = client.create_key({"name": "k"}).secret
        create(client, "chat", idle_timeout=600)
        with fresh.tenant(gateway.facts["gateways"]["local-eu"], key) as tenant:
            assert tenant.post(CHAT, json=chat(model="chat")).status_code == 200
            sleep(client, "chat")
            assert tenant.post(CHAT, json=chat(model="chat")).status_code == 200
        client.delete_endpoint("chat")
        until(lambda: not client.endpoints(), "it is gone")


@pytest.mark.postgres
def test_a_database_that_goes_away_and_comes_back(postgres_url: str, fresh: Installation) -> None:
    plain = postgres_url.replace("+psycopg", "") + "postgres"

    def run(*statements: str) -> None:
        with psycopg.connect(plain, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    run("CREATE DATABASE outage")
    fresh.more = {"INGLE_DATABASE_URL": f"{postgres_url}outage", "INGLE_GATEWAY": f"127.0.0.1:{free_port()}"}
    upgrade_schema(fresh.more["INGLE_DATABASE_URL"])
    fresh.start("serve", "controller")
    fresh.start("serve", "api", "--admin", f"127.0.0.1:{free_port()}")
    gateway = fresh.start("serve", "gateway", "-r", "local-eu")
    with fresh.admin() as client:
        key = client.create_key({"name": "k"}).secret
        create(client, "chat", idle_timeout=600)
        root = gateway.facts["gateways"]["local-eu"]
        with fresh.tenant(root, key) as tenant, fresh.tenant(root, f"ingle_{'a' * 16}_{'b' * 43}") as unknown:
            assert tenant.post(CHAT, json=chat(model="chat")).status_code == 200
            until(lambda: [u.requests for u in client.usage()] == [1], "metered")
            run(
                "ALTER DATABASE outage WITH ALLOW_CONNECTIONS false",
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'outage'",
            )
            until(lambda: tenant.get("/readyz").status_code == 503, "the gateway notices")
            assert tenant.get("/livez").status_code == 200
            assert [tenant.post(CHAT, json=chat(model="chat")).status_code for _ in range(5)] == [200] * 5
            refused = unknown.post(CHAT, json=chat(model="chat"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
            assert "retry-after" in refused.headers
            # A gateway that starts now serves from the last word that its home holds.
            gateway.stop()
            gateway = fresh.start("serve", "gateway", "-r", "local-eu")
            assert tenant.post(CHAT, json=chat(model="chat")).status_code == 200
            with pytest.raises(Unavailable):
                client.create_key({"name": "k2"})
            run("ALTER DATABASE outage WITH ALLOW_CONNECTIONS true")
            until(lambda: tenant.get("/readyz").status_code == 200, "the gateway is back without a restart")
            until(lambda: [u.requests for u in client.usage()] == [7], "what was kept is written once")
            assert unknown.post(CHAT, json=chat(model="chat")).status_code == 401
            sleep(client, "chat")
            assert starts(fresh) == 1


def test_usage_that_could_not_be_written_is_written_once_later(fresh: Installation) -> None:
    program = fresh.up()
    with fresh.admin() as client:
        url = create(client, "chat", idle_timeout=600)
        with fresh.tenant(url, program.facts["key"]) as tenant:
            assert tenant.post("/chat/completions", json=chat()).status_code == 200
        until(lambda: [u.requests for u in client.usage()] == [1], "metered")
    program.kill()
    # What a crash leaves: one event that is in the store already, one that isn't, and half a line.
    with (fresh.home / "gateway" / "local-eu-0.usage").open("ab") as journal:
        event = {
            "tenant_id": "t", "key_id": "k", "endpoint_id": "e", "endpoint_name": "chat", "replica_id": None,
            "region": "local-eu", "route": CHAT, "started_at": time.time(), "duration_ms": 1.0, "ttft_ms": None,
            "held_ms": 0.0, "status": 200, "outcome": "ok", "streamed": False, "prompt_tokens": 1,
            "completion_tokens": 1, "cached_tokens": 0,
        }  # fmt: skip
        for request_id in ("req_x", "req_x", "req_y"):
            journal.write(json.dumps({"request_id": request_id, **event}).encode() + b"\n")
        journal.write(b'{"request_id": "req_z", "tena')
    fresh.up()
    with fresh.admin() as client:
        until(lambda: sum(u.requests for u in client.usage()) == 3, "the journal is written, each request once")


def test_an_installation_keeps_its_key_and_profile(fresh: Installation) -> None:
    first = fresh.up()
    assert first.facts["key"].startswith("ingle_")
    profile = (fresh.home / "profile.toml").read_text()
    first.stop()
    second = fresh.up()
    assert second.facts["key"] is None
    assert profile.split("token")[1] == (fresh.home / "profile.toml").read_text().split("token")[1]
    with installed(fresh.home.parent / "another") as other:
        assert other.up().facts["key"] != first.facts["key"]
