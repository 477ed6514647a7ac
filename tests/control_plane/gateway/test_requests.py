"""The gateway's promises to tenants, row by row, over real TLS."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator

import httpx
import pytest

from control_plane.client import AdminClient
from tests.control_plane.gateway.common import CHAT, error_of, replica_address
from tests.control_plane.harness import Installation, chat, until


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
