"""Keys over two gateways: rotation with overlap, revocation, scopes, limits that gateways share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from typing import Any

import httpx
import psycopg
import pytest

from control_plane.api import schemas
from control_plane.client import AdminClient
from control_plane.errors import Unprocessable
from tests.control_plane.harness import Installation, chat, create, installed, until

CHAT = "/v1/chat/completions"
KINDS = ("requests", "tokens")


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Installation, str]]:
    """An installation on each kind of database, and the root of a second gateway in a process of its own."""
    if request.param == "sqlite":
        yield request.getfixturevalue("platform"), request.getfixturevalue("second_gateway")
        return
    server: str = request.getfixturevalue("postgres_url")
    with psycopg.connect(server.replace("+psycopg", "") + "postgres", autocommit=True) as connection:
        connection.execute("CREATE DATABASE two_gateways")
    with installed(tmp_path_factory.mktemp("two") / "home", INGLE_DATABASE_URL=f"{server}two_gateways") as installation:
        installation.up()
        second = installation.start("serve", "gateway", "-r", "local-eu", "--gateway", "127.0.0.1:0")
        yield installation, second.facts["gateways"]["local-eu"]


@pytest.fixture(scope="module")
def installation(both: tuple[Installation, str]) -> Installation:
    return both[0]


@pytest.fixture(scope="module")
def admin(installation: Installation) -> Iterator[AdminClient]:
    with installation.admin() as client:
        yield client


@pytest.fixture(scope="module")
def endpoint(admin: AdminClient) -> str:
    create(admin, "keys", "fast")
    return "keys"


@pytest.fixture(scope="module")
def roots(both: tuple[Installation, str]) -> list[str]:
    return [both[0].programs[0].facts["gateways"]["local-eu"], both[1]]


@pytest.fixture
def ask(installation: Installation, roots: list[str], endpoint: str) -> Iterator[Any]:
    """`ask(secret, gateway, **body)` → the reply."""
    with ExitStack() as stack:
        clients = [stack.enter_context(installation.tenant(root, "")) for root in roots]

        def post(secret: str, gateway: int, model: str = endpoint, **body: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {secret}"}
            return clients[gateway].post(CHAT, json=chat(model=model, **body), headers=headers)

        yield post


def by_id(admin: AdminClient) -> dict[str, schemas.Key]:
    return {key.id: key for key in admin.keys(None)}


def code(reply: httpx.Response) -> tuple[int, str | None]:
    return reply.status_code, reply.json().get("error", {}).get("code")


def test_rotation_with_overlap_and_revocation_on_every_gateway(admin: AdminClient, ask: Any) -> None:
    a = admin.create_key({"name": "a"})
    seen: list[list[tuple[float, int, float]]] = [[], []]
    stop = threading.Event()

    def watch(gateway: int) -> None:
        while not stop.is_set():
            began = time.time()
            seen[gateway].append((began, ask(a.secret, gateway).status_code, time.time()))
            stop.wait(0.05)

    threads = [threading.Thread(target=watch, args=(gateway,)) for gateway in (0, 1)]
    try:
        for thread in threads:
            thread.start()
        b = admin.rotate_key(a.id, 3.0)
        rotated = by_id(admin)[a.id]
        assert rotated.expires_at
        c = admin.rotate_key(b.id, 600.0)
        assert by_id(admin)[a.id].expires_at == rotated.expires_at
        for gateway in (0, 1):
            assert [ask(key.secret, gateway).status_code for key in (b, c)] == [200, 200]
        end = datetime.fromisoformat(rotated.expires_at).timestamp()
        until(lambda: all(own[-1][0] > end for own in seen if own), "the overlap ends")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for own in seen:
        assert {status for _, status, ended in own if ended < end} == {200}
        assert {status for began, status, _ in own if began >= end} == {401}
    admin.revoke_key(b.id)  # in the midst of its grace
    revoked = time.time()
    for gateway in (0, 1):
        until(lambda: ask(b.secret, gateway).status_code == 401, "revoked", patience=5)  # noqa: B023
    assert time.time() - revoked < 5
    for gateway in (0, 1):
        assert [ask(b.secret, gateway).status_code for _ in range(5)] == [401] * 5
        assert ask(c.secret, gateway).status_code == 200
    until(lambda: by_id(admin)[c.id].last_used_at is not None, "its last use is known")


@pytest.mark.parametrize("grace", [-1.0, 10.0**9])
def test_a_grace_out_of_bounds_is_refused(admin: AdminClient, grace: float) -> None:
    made = admin.create_key({"name": "grace"})
    with pytest.raises(Unprocessable):
        admin.rotate_key(made.id, grace)
    assert admin.rotate_key(made.id, 0.0).secret != made.secret


def test_a_key_may_use_what_its_scope_says(
    admin: AdminClient, ask: Any, installation: Installation, roots: list[str], endpoint: str
) -> None:
    create(admin, "keys-other", "fast")
    here = admin.create_key({"name": "here", "endpoints": [endpoint], "routes": [CHAT], "networks": ["127.0.0.0/8"]})
    assert ask(here.secret, 0).status_code == 200
    assert code(ask(here.secret, 0, model="keys-other")) == (404, "model_not_found")
    with installation.tenant(roots[0], here.secret) as client:
        assert code(client.get("/v1/models")) == (403, "permission_denied")
        assert code(client.post("/v1/completions", json={"model": endpoint, "prompt": "x"})) == (
            403,
            "permission_denied",
        )
        assert code(client.post(f"/e/keys-other{CHAT}", json=chat())) == (404, "model_not_found")
    admin.update_key(here.id, {"routes": None, "networks": ["10.0.0.0/8"]})
    until(lambda: code(ask(here.secret, 0)) == (403, "permission_denied"), "it may not be used from here")
    admin.update_key(here.id, {"networks": None})
    until(lambda: ask(here.secret, 0).status_code == 200, "it may again")
    with installation.tenant(roots[0], here.secret) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [endpoint]
    admin.delete_endpoint("keys-other")


def test_requests_a_minute_hold_over_two_gateways_and_retry_after_is_true(admin: AdminClient, ask: Any) -> None:
    key = admin.create_key({"name": "rpm", "requests_per_minute": 5, "tokens_per_minute": 100_000}).secret
    replies: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda n=n: replies.append(ask(key, n % 2, stream=n % 4 < 2, max_tokens=4)))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(reply.status_code for reply in replies) == [200] * 5 + [429] * 3
    for reply in replies:
        for kind in KINDS:
            limit, remaining = (int(reply.headers[f"x-ratelimit-{part}-{kind}"]) for part in ("limit", "remaining"))
            assert 0 <= remaining <= limit
            assert reply.headers[f"x-ratelimit-reset-{kind}"].endswith("s")
        if reply.status_code == 429:
            error = reply.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert 1 <= int(reply.headers["retry-after"]) <= 60
    assert sorted(int(r.headers["x-ratelimit-remaining-requests"]) for r in replies if r.status_code == 200)[0] == 0


def test_streams_and_cancelled_streams_are_charged_and_refused_requests_are_not(
    admin: AdminClient, ask: Any, installation: Installation, roots: list[str], endpoint: str
) -> None:
    key = admin.create_key({"name": "tpm", "tokens_per_minute": 400})
    left = []
    for _ in range(3):  # a body that its replica refuses burns no tokens
        assert ask(key.secret, 0, messages=7).status_code == 500
    for gateway in (0, 1, 0):
        reply = ask(key.secret, gateway, stream=True, max_tokens=60)
        assert reply.status_code == 200
        left.append(int(reply.headers["x-ratelimit-remaining-tokens"]))
    assert left == sorted(left, reverse=True)
    with (
        installation.tenant(roots[0], key.secret) as client,
        client.stream("POST", CHAT, json=chat(model=endpoint, stream=True, max_tokens=150)) as reply,
    ):
        assert reply.status_code == 200
        next(reply.iter_raw())
    refused = until(
        lambda: (r := ask(key.secret, 1, stream=True, max_tokens=60)).status_code == 429 and r, "the tokens run out"
    )
    assert "tokens a minute" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 60


def test_limits_of_a_tenant_and_an_endpoint_bind_all_their_keys(
    installation: Installation, admin: AdminClient, ask: Any, roots: list[str]
) -> None:
    admin.create_tenant("limited")
    create(admin, "limited-endpoint", "fast", tenant="limited")
    keys = [admin.create_key({"tenant": "limited", "name": f"k{number}"}).secret for number in range(2)]
    assert admin.limit_tenant("limited", {"requests_per_minute": 3}).limits.requests_per_minute == 3
    until(
        lambda: ask(keys[0], 1, model="limited-endpoint").headers["x-ratelimit-limit-requests"] == "3",
        "the gateway knows the limit",
    )

    def refused(gateway: int) -> bool:
        return bool(ask(keys[1], gateway, model="limited-endpoint").status_code == 429)

    until(lambda: refused(0) and refused(1), "the tenant's limit binds its other key on both gateways")
    admin.limit_tenant("limited", {"requests_per_minute": None})
    until(lambda: not refused(0), "without a limit")
    admin.update_endpoint("limited-endpoint", {"monthly_budget": 0.000001})
    until(lambda: refused(0), "the endpoint's budget is used up")
    message = ask(keys[0], 0, model="limited-endpoint").json()["error"]["message"]
    assert "endpoint has 1e-06 of budget a month" in message
    admin.delete_endpoint("limited-endpoint")
