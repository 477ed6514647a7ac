"""The gateway's promises to tenants, row by row, over real TLS."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import pytest

from control_plane.client import AdminClient
from tests.control_plane.harness import Installation, chat, create, until

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def admin(platform: Installation) -> Iterator[AdminClient]:
    with platform.admin() as client:
        yield client


@pytest.fixture(scope="module")
def gateways(platform: Installation) -> dict[str, str]:
    found: dict[str, str] = platform.programs[0].facts["gateways"]
    return found


@pytest.fixture(scope="module")
def eu(gateways: dict[str, str]) -> str:
    return gateways["local-eu"]


@pytest.fixture(scope="module")
def key(admin: AdminClient) -> str:
    return admin.create_key({"name": "gateway-tests"}).secret


@pytest.fixture(scope="module")
def endpoint(admin: AdminClient) -> str:
    create(admin, "gw", "fast+pace-5ms")
    return "gw"


@pytest.fixture
def tenant(platform: Installation, eu: str, key: str) -> Iterator[httpx.Client]:
    with platform.tenant(eu, key) as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"error"}
    detail: dict[str, Any] = body["error"]
    assert detail.keys() == {"message", "type", "param", "code"}
    assert detail["message"]
    assert "x-request-id" in response.headers
    return detail


def ready_addresses(admin: AdminClient, name: str, count: int) -> list[str] | None:
    found = [one.address for one in admin.endpoint(name).replicas if one.state == "ready" and one.address]
    return found if len(found) == count else None


def replica_address(admin: AdminClient, name: str) -> str:
    (address,) = [r.address for r in admin.endpoint(name).replicas if r.state == "ready"]
    assert address
    return address


def test_a_plain_reply_passes_unchanged_and_is_metered_once(
    tenant: httpx.Client, admin: AdminClient, endpoint: str
) -> None:
    def requests() -> tuple[int, int]:
        found = admin.usage(endpoint=endpoint)
        return (found[0].requests, found[0].completion_tokens) if found else (0, 0)

    before = requests()
    response = tenant.post(CHAT, json=chat("hello world", model=endpoint, max_tokens=4))
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "echo hello world"
    assert response.json()["usage"]["completion_tokens"] == 4
    assert not [name for name in response.headers if name.startswith("x-ingle")]
    assert int(response.headers["x-ratelimit-remaining-requests"]) >= 0
    until(lambda: requests() == (before[0] + 1, before[1] + 4), "the usage event is in the store")


def test_a_stream_comes_frame_by_frame_without_our_comment(tenant: httpx.Client, endpoint: str) -> None:
    body = chat(model=endpoint, stream=True, max_tokens=6)
    with tenant.stream("POST", CHAT, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = list(response.iter_raw())
    text = b"".join(chunks)
    assert len(chunks) > 3  # not buffered
    frames = text.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    assert len(frames) == 8
    assert all(frame.startswith("data: ") for frame in frames[:-1])


def test_what_the_replica_is_told(platform: Installation, admin: AdminClient, endpoint: str, eu: str, key: str) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with platform.tenant(eu, key) as client:
        sent = {
            "x-ingle-cache-salt": "mine",
            "x-ingle-model": "override",
            "x-request-id": "label",
            "traceparent": trace,
        }
        response = client.post(CHAT, json=chat(model=endpoint), headers=sent)
        assert response.status_code == 200
        via_path = client.post(f"/e/{endpoint}{CHAT}", json=chat(model="whatever"))
        assert via_path.status_code == 200
    seen = httpx.get(f"http://{replica_address(admin, endpoint)}/requests").json()
    by_name, by_path = seen[-2:]
    assert by_name["x-ingle-cache-salt"] == by_path["x-ingle-cache-salt"] != "mine"
    assert "x-ingle-model" not in by_name
    assert by_path["x-ingle-model"] == "override"
    assert by_name["x-request-id"] == response.headers["x-request-id"] != "label"
    assert by_name["traceparent"] == trace
    assert key not in json.dumps(seen)


def test_every_kind_of_wrong_key_gets_the_same_answer(
    platform: Installation, admin: AdminClient, eu: str, endpoint: str
) -> None:
    revoked = admin.create_key({"name": "revoked"})
    expired = admin.create_key({"name": "expired", "expires_in": 1.0})
    with platform.tenant(eu, revoked.secret) as client:
        assert client.post(CHAT, json=chat(model=endpoint)).status_code == 200
    admin.revoke_key(revoked.id)
    until(lambda: (expired.id, "expired") in {(k.id, k.state) for k in admin.keys()}, "the key expires")  # noqa: SIM118
    unknown = f"ingle_{'a' * 16}_{'b' * 43}"
    half = revoked.secret.rpartition("_")[0] + "_" + "c" * 43
    headers: list[dict[str, str]] = [{}, {"Authorization": "Basic eDp5"}, {"Authorization": "Bearer"}]
    headers += [{"Authorization": f"Bearer {text}"} for text in ("x", unknown, half, expired.secret)]
    headers += [{"Authorization": revoked.secret}, {"Authorization": f"Bearer {revoked.secret}"}]

    def revoked_everywhere() -> bool:
        with platform.tenant(eu, revoked.secret) as client:
            return client.post(CHAT, json=chat(model=endpoint)).status_code == 401

    until(revoked_everywhere, "the revocation arrives")
    answers = set()
    with platform.tenant(eu, "") as client:
        del client.headers["Authorization"]
        for header in headers:
            for path, body in ((CHAT, chat(model=endpoint)), (CHAT, chat(model="absent")), ("/v1/nonsense", {})):
                response = client.post(path, json=body, headers=header)
                assert response.headers["www-authenticate"] == "Bearer"
                answers.add((response.status_code, response.text))
    assert len(answers) == 1
    status, text = answers.pop()
    assert (status, json.loads(text)["error"]["code"]) == (401, "invalid_api_key")


def test_a_new_key_works_at_once(platform: Installation, admin: AdminClient, eu: str, endpoint: str) -> None:
    for _ in range(3):
        made = admin.create_key({"name": "new"})
        with platform.tenant(eu, made.secret) as client:
            assert client.post(CHAT, json=chat(model=endpoint)).status_code == 200


def test_an_absent_endpoint_and_another_tenants_look_alike(
    platform: Installation, admin: AdminClient, eu: str, endpoint: str, tenant: httpx.Client
) -> None:
    admin.create_tenant("stranger")
    stranger = admin.create_key({"tenant": "stranger", "name": "s"}).secret
    answers = []
    with platform.tenant(eu, stranger) as client:
        for name in (endpoint, "gx"):
            for response in (
                client.post(CHAT, json=chat(model=name)),
                client.post(f"/e/{name}{CHAT}", json=chat()),
                client.get(f"/v1/models/{name}"),
            ):
                assert response.status_code == 404
                assert error_of(response)["code"] == "model_not_found"
                answers.append(response.text.replace(name, "?"))
        assert client.get("/v1/models").json() == {"object": "list", "data": []}
    assert len(set(answers)) == 1
    listed = tenant.get("/v1/models").json()["data"]
    assert endpoint in {model["id"] for model in listed}
    assert tenant.get(f"/v1/models/{endpoint}").json()["object"] == "model"
    own = tenant.get(f"/e/{endpoint}/v1/models").json()["data"]
    assert [model["id"] for model in own] == [endpoint]
    assert tenant.get("/e/gx/v1/models").status_code == 404


def test_an_endpoint_answers_in_its_region_only(
    platform: Installation, gateways: dict[str, str], key: str, endpoint: str
) -> None:
    with platform.tenant(gateways["local-me"], key) as client:
        response = client.post(CHAT, json=chat(model=endpoint))
        assert response.status_code == 403
        assert error_of(response)["code"] == "residency_mismatch"
        assert client.get("/v1/models").json()["data"] == []


@pytest.mark.parametrize(
    ("content", "status", "code", "param"),
    [
        (b"", 400, "invalid_json", None),
        (b"{", 400, "invalid_json", None),
        (b"[]", 400, "invalid_json", None),
        (b"[" * 100_000, 400, "invalid_json", None),
        (b'{"messages": []}', 400, "missing_required_parameter", "model"),
        (b'{"model": 5}', 400, "missing_required_parameter", "model"),
        (b'{"model": ""}', 400, "missing_required_parameter", "model"),
        (b'{"model": null}', 400, "missing_required_parameter", "model"),
    ],
)
def test_bodies_that_name_no_endpoint(
    tenant: httpx.Client, content: bytes, status: int, code: str, param: str | None
) -> None:
    response = tenant.post(CHAT, content=content)
    assert response.status_code == status
    detail = error_of(response)
    assert (detail["type"], detail["code"], detail["param"]) == ("invalid_request_error", code, param)


def test_a_number_that_json_does_not_have_reaches_the_replica(tenant: httpx.Client, endpoint: str) -> None:
    body = json.dumps(chat(model=endpoint)).replace("}", ', "temperature": NaN}', 1)
    assert tenant.post(CHAT, content=body.encode()).status_code == 200


def test_unknown_paths_and_methods(tenant: httpx.Client) -> None:
    assert error_of(tenant.post("/v1/nonsense", json={}))["code"] == "unknown_url"
    wrong = tenant.get(CHAT)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert tenant.get("/").status_code == 404
    assert tenant.post("/v1/models", json={}).status_code == 405


@pytest.mark.parametrize("wait", ["x", "-1", "nan", "inf"])
def test_a_wait_that_is_no_number(tenant: httpx.Client, endpoint: str, wait: str) -> None:
    response = tenant.post(CHAT, json=chat(model=endpoint), headers={"x-ingle-wait": wait})
    assert response.status_code == 400
    assert error_of(response)["param"] == "x-ingle-wait"


def test_a_body_too_large(tenant: httpx.Client, endpoint: str) -> None:
    big = b'{"model": "' + endpoint.encode() + b'", "pad": "' + b"x" * (33 * 1024 * 1024) + b'"}'

    def pieces() -> Iterator[bytes]:
        for at in range(0, len(big), 65536):
            yield big[at : at + 65536]

    for content in (big, pieces()):
        try:
            response = tenant.post(CHAT, content=content)
        except (httpx.WriteError, httpx.ReadError):
            continue  # refused before all of it was sent
        assert response.status_code == 413
        assert error_of(response)["code"] == "request_too_large"
    assert tenant.post(CHAT, json=chat("x" * 2_000_000, model=endpoint)).status_code == 200


def test_a_long_body_that_asks_first_is_told_to_go_on(platform: Installation, eu: str, key: str, endpoint: str) -> None:
    url = httpx.URL(eu)
    context = ssl.create_default_context(cafile=platform.ca_file)
    body = json.dumps(chat(model=endpoint)).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nExpect: 100-continue\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    with (
        socket.create_connection((url.host, url.port or 443), timeout=20) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as wrapped,
    ):
        wrapped.sendall(head.encode())
        assert wrapped.recv(4096).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        wrapped.sendall(body)
        assert wrapped.recv(4096).startswith(b"HTTP/1.1 200")


def test_one_key_has_so_many_requests_open(platform: Installation, admin: AdminClient, eu: str, endpoint: str) -> None:
    narrow = admin.create_key({"name": "narrow", "concurrency": 1}).secret
    with platform.tenant(eu, narrow) as client, platform.tenant(eu, narrow) as other:
        with client.stream("POST", CHAT, json=chat(model=endpoint, stream=True, max_tokens=200)) as response:
            chunks = response.iter_raw()
            assert next(chunks)
            refused = other.post(CHAT, json=chat(model=endpoint))
            assert refused.status_code == 429
            assert error_of(refused)["code"] == "rate_limit_exceeded"
            assert int(refused.headers["retry-after"]) >= 1
            assert "x-ratelimit-limit-requests" in refused.headers
        until(lambda: other.post(CHAT, json=chat(model=endpoint)).status_code == 200, "the place is free again")


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


def test_certificates_are_replaced_under_way(platform: Installation, admin: AdminClient, eu: str) -> None:
    url = httpx.URL(eu)
    path = platform.home / "certs" / "gateway-local-eu.pem"

    def served() -> str:
        context = ssl.create_default_context(cafile=platform.ca_file)
        with (
            socket.create_connection((url.host, url.port or 443), timeout=20) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as wrapped,
        ):
            certificate = wrapped.getpeercert()
            assert certificate is not None
            return str(certificate["serialNumber"]).lower().lstrip("0")

    before = served()
    (renewed,) = [c for c in admin.rotate_certificates(None) if c.name == "gateway-local-eu"]
    assert renewed.serial != before
    until(lambda: served() == renewed.serial, "the new certificate is served")
    path.write_bytes(path.read_bytes()[:400])
    until(lambda: served() != renewed.serial, "our own authority replaces a damaged one")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_tls_and_plain_http_are_refused(eu: str) -> None:
    url = httpx.URL(eu)
    where = (url.host, url.port or 443)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version, context.maximum_version = ssl.TLSVersion.MINIMUM_SUPPORTED, ssl.TLSVersion.TLSv1_1
    with socket.create_connection(where, timeout=20) as raw, pytest.raises((ssl.SSLError, OSError)):
        context.wrap_socket(raw, server_hostname="localhost")
    with socket.create_connection(where, timeout=20) as raw:
        raw.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        raw.settimeout(20)
        assert b"200 OK" not in raw.recv(4096)


def test_the_gateways_own_pages(tenant: httpx.Client, endpoint: str) -> None:
    assert tenant.get("/livez").json()["status"] == "ok"
    assert tenant.get("/openapi.json").json()["openapi"] == "3.1.0"
    assert tenant.get("/readyz").status_code == 200
    assert tenant.post(CHAT, json=chat(model=endpoint, stream=True)).status_code == 200
    text = tenant.get("/metrics").text
    for name in (
        "gen_ai_server_request_duration_seconds_bucket",
        "gen_ai_server_time_to_first_token_seconds_bucket",
        "ingle_requests_running",
        "ingle_tokens_total",
        "ingle_certificate_not_after_seconds",
        "ingle_replicas_ready",
        "ingle_cold_start_seconds_bucket",
    ):
        assert name in text
