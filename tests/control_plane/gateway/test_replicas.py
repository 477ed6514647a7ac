"""What becomes of a request when replicas are lost, absent, replaced or ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import aiohttp
import httpx
import pytest

from control_plane.client import AdminClient
from tests.control_plane.gateway.common import CHAT, error_of, replica_address
from tests.control_plane.harness import Installation, chat, create, serving, until


def ready_addresses(admin: AdminClient, name: str, count: int) -> list[str] | None:
    found = [one.address for one in admin.endpoint(name).replicas if one.state == "ready" and one.address]
    return found if len(found) == count else None


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_goes_away_cancels_the_replicas_work(
    platform: Installation, admin: AdminClient, eu: str, key: str, endpoint: str, streaming: bool
) -> None:
    health = f"http://{replica_address(admin, endpoint)}/health"

    def running() -> int:
        return int(httpx.get(health).json()["running"])

    cancelled = httpx.get(health).json()["cancelled"]

    async def leave() -> None:
        context = ssl.create_default_context(cafile=platform.ca_file)
        async with httpx.AsyncClient(base_url=eu, verify=context, timeout=60, trust_env=False) as client:
            body = chat(model=endpoint, stream=streaming, max_tokens=10_000)
            task = asyncio.create_task(client.post(CHAT, json=body, headers={"Authorization": f"Bearer {key}"}))
            async with asyncio.timeout(20):
                while await asyncio.to_thread(running) == 0:
                    await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    until(lambda: running() == 0, "the replica stops working")
    assert httpx.get(health).json()["cancelled"] == cancelled + 1


def test_a_replica_lost_in_mid_stream_ends_in_an_error_frame(admin: AdminClient, tenant: httpx.Client) -> None:
    create(admin, "cut", "cut")
    with tenant.stream("POST", CHAT, json=chat(model="cut", stream=True, max_tokens=9)) as response:
        text = b"".join(response.iter_raw()).decode()
    frames = text.rstrip("\n").split("\n\n")
    assert len(frames) == 3  # two tokens, then the error: no half frame, no finish
    assert json.loads(frames[-1].removeprefix("data: "))["error"]["code"] == "upstream_error"
    assert "[DONE]" not in text
    assert '"stop"' not in text
    admin.delete_endpoint("cut")


@pytest.mark.parametrize(
    ("model", "status", "code"),
    [
        ("early", 502, "upstream_error"),  # the connection broke
        ("engine", 502, "upstream_error"),  # its engine died
        ("full", 503, "overloaded"),
        ("fault", 500, "internal_error"),  # its own answer
    ],
)
def test_what_a_replica_that_gives_no_reply_becomes_where_there_is_no_other(
    admin: AdminClient, tenant: httpx.Client, model: str, status: int, code: str
) -> None:
    create(admin, model, model)
    response = tenant.post(CHAT, json=chat(model=model), headers={"x-ingle-wait": "0.5"})
    assert response.status_code == status
    assert error_of(response)["code"] == code
    assert ("retry-after" in response.headers) == (status == 503)
    admin.delete_endpoint(model)


def test_a_request_that_lost_its_replica_is_tried_once_elsewhere(admin: AdminClient, tenant: httpx.Client) -> None:
    create(admin, "pair", "fast", min_replicas=2, max_replicas=2)
    until(lambda: len([r for r in admin.endpoint("pair").replicas if r.state == "ready"]) == 2, "two replicas")
    addresses = [r.address for r in admin.endpoint("pair").replicas]
    for _ in range(8):
        assert tenant.post(CHAT, json=chat(model="pair")).status_code == 200
    victim = httpx.get(f"http://{addresses[0]}/health").json()["pid"]
    os.kill(victim, signal.SIGKILL)
    for _ in range(8):
        assert tenant.post(CHAT, json=chat(model="pair")).status_code == 200
    admin.delete_endpoint("pair")


def test_who_came_to_a_lost_replicas_port_is_not_taken_for_it(admin: AdminClient, tenant: httpx.Client) -> None:
    create(admin, "moved", "fast", idle_timeout=600)
    asked: list[str] = []

    class Stranger(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_error(401)

        def log_message(self, *_: object) -> None:
            pass

    for _ in range(10):  # until the gateway asks before it has heard that the replica is gone
        host, port = until(lambda: ready_addresses(admin, "moved", 1), "a replica")[0].split(":")
        os.kill(httpx.get(f"http://{host}:{port}/health").json()["pid"], signal.SIGKILL)
        until(partial(is_free, host, int(port)), "its port is free")
        with HTTPServer((host, int(port)), Stranger) as server, serving(server):
            assert tenant.post(CHAT, json=chat(model="moved")).status_code == 200
        if asked:
            break
    assert asked == ["/v1/chat/completions"]
    admin.delete_endpoint("moved")


def is_free(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return False
    return True


def test_a_kept_connection_that_closes_as_a_request_goes_out_costs_nothing(
    admin: AdminClient, tenant: httpx.Client
) -> None:
    create(admin, "closing", "once")
    assert [tenant.post(CHAT, json=chat(model="closing")).status_code for _ in range(10)] == [200] * 10
    until(lambda: [row.requests for row in admin.usage(endpoint="closing")] == [10], "each is metered once")
    admin.delete_endpoint("closing")


def test_a_replica_whose_streams_all_left_at_once_gets_its_share_again(
    platform: Installation, admin: AdminClient, eu: str, key: str
) -> None:
    create(admin, "crowd", "fast+pace-50ms", min_replicas=2, max_replicas=2)
    addresses = until(lambda: ready_addresses(admin, "crowd", 2), "two replicas")

    def look() -> list[dict[str, int]]:
        return [httpx.get(f"http://{address}/health").json() for address in addresses]

    async def crowd() -> None:
        context = ssl.create_default_context(cafile=platform.ca_file)
        connector = aiohttp.TCPConnector(limit=0, ssl=context)
        headers = {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            body = chat(model="crowd", stream=True, max_tokens=4000)
            replies = await asyncio.gather(*(session.post(f"{eu}{CHAT}", json=body) for _ in range(200)))
            await asyncio.gather(*(reply.content.readline() for reply in replies))
            assert sum(one["running"] for one in look()) == 200
            for reply in replies:
                reply.close()

    asyncio.run(crowd())
    until(lambda: [one["running"] for one in look()] == [0, 0], "nothing runs on", patience=5)
    with platform.tenant(eu, key) as client:
        gauge = 'ingle_requests_running{endpoint="crowd",region="local-eu"} 0.0'
        until(lambda: gauge in client.get("/metrics").text, "the gateway says so without new traffic", patience=5)
    before = [one["served"] for one in look()]

    async def share() -> None:
        context = ssl.create_default_context(cafile=platform.ca_file)
        connector = aiohttp.TCPConnector(limit=10, ssl=context)
        headers = {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

            async def one() -> int:
                async with session.post(f"{eu}{CHAT}", json=chat(model="crowd", max_tokens=1)) as reply:
                    await reply.read()
                    return reply.status

            assert await asyncio.gather(*(one() for _ in range(100))) == [200] * 100

    asyncio.run(share())
    served = [after["served"] - old for after, old in zip(look(), before, strict=True)]
    assert sum(served) == 100
    assert min(served) >= 40
    admin.delete_endpoint("crowd")


def test_at_zero_without_a_hold_is_a_503_that_starts_it_all_the_same(admin: AdminClient, tenant: httpx.Client) -> None:
    create(admin, "asleep", "fast+start-300ms", idle_timeout=600)
    admin.sleep_endpoint("asleep")
    until(lambda: admin.endpoint("asleep").state == "zero", "asleep")
    response = tenant.post(CHAT, json=chat(model="asleep"), headers={"x-ingle-wait": "0"})
    assert response.status_code == 503
    assert error_of(response)["code"] == "endpoint_starting"
    assert int(response.headers["retry-after"]) >= 1
    until(lambda: admin.endpoint("asleep").state == "ready", "woken by a request that didn't wait")
    assert tenant.post(CHAT, json=chat(model="asleep")).status_code == 200
    admin.delete_endpoint("asleep")


def test_a_failed_and_a_paused_endpoint_say_so_at_once(admin: AdminClient, tenant: httpx.Client) -> None:
    admin.create_endpoint({"name": "broken", "region": "local-eu", "model": "bad"})
    held = tenant.post(CHAT, json=chat(model="broken"))  # held until it is known to be in vain
    again = tenant.post(CHAT, json=chat(model="broken"))
    for response in (held, again):
        assert response.status_code == 503
        assert error_of(response)["code"] == "model_not_found"
    create(admin, "paused")
    admin.update_endpoint("paused", {"paused": True})
    until(lambda: admin.endpoint("paused").state == "paused", "paused")
    until(
        lambda: error_of(tenant.post(CHAT, json=chat(model="paused"))).get("code") == "endpoint_paused",
        "the gateway knows",
    )
    admin.update_endpoint("paused", {"paused": False})
    until(lambda: tenant.post(CHAT, json=chat(model="paused")).status_code == 200, "serves again")
    for name in ("broken", "paused"):
        admin.delete_endpoint(name)


def test_a_deleted_endpoint_is_gone_for_tenants_and_its_name_is_free(admin: AdminClient, tenant: httpx.Client) -> None:
    for _ in range(2):
        create(admin, "brief")
        admin.delete_endpoint("brief")
        until(lambda: tenant.post(CHAT, json=chat(model="brief")).status_code == 404, "gone for tenants")
        until(lambda: "brief" not in {e.name for e in admin.endpoints()}, "gone altogether")


def test_an_update_replaces_replicas_without_one_failed_request(admin: AdminClient, tenant: httpx.Client) -> None:
    create(admin, "rolling", "fast")
    admin.update_endpoint("rolling", {"model": "fast+start-200ms"})
    answers = []
    while admin.endpoint("rolling").observed_generation != 2:
        answers.append(tenant.post(CHAT, json=chat(model="rolling")).status_code)
        assert len(answers) < 2000
    assert set(answers) <= {200}
    until(lambda: [r.generation for r in admin.endpoint("rolling").replicas] == [2], "the old one is gone")
    admin.delete_endpoint("rolling")
