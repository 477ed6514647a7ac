"""Trying an endpoint through the admin API, and how endpoints are right now."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from control_plane.client import AdminClient, trust
from control_plane.domain import Role
from control_plane.errors import NotFound
from control_plane.profile import read_profile
from control_plane.security.keyring import open_keyring
from control_plane.security.keys import make_admin_token
from control_plane.security.secret import load_secret
from control_plane.store import tenants
from control_plane.store.database import Store
from tests.control_plane.harness import Installation, chat, create, until

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def admin(platform: Installation) -> Iterator[AdminClient]:
    with platform.admin() as client:
        create(client, "tried", "tokens-3+pace-5ms")
        yield client
        client.delete_endpoint("tried")


@pytest.fixture(scope="module")
def http(platform: Installation) -> Iterator[httpx.Client]:
    profile = read_profile(platform.home / "profile.toml")
    with httpx.Client(
        base_url=f"{profile.admin_url}/admin/v1",
        headers={"Authorization": f"Bearer {profile.token}"},
        verify=trust(profile.ca_file),
        trust_env=False,
        timeout=30,
    ) as client:
        yield client


def trial_keys(admin: AdminClient) -> list[Any]:
    mine = ("trial by profile", ["tried"])
    return [key for key in admin.keys(tenant="default") if (key.name, key.endpoints) == mine]


def words(text: str) -> str:
    frames = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for frame in frames for choice in frame["choices"])


def test_a_reply_is_streamed_by_a_key_of_its_own(http: httpx.Client, admin: AdminClient) -> None:
    for _ in range(2):
        answer = http.post("/endpoints/tried/chat", json={"messages": MESSAGES})
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert words(answer.text) == "t0 t1 t2 "
        assert answer.text.endswith("data: [DONE]\n\n")
    (key,) = trial_keys(admin)
    assert key.routes == ["/v1/chat/completions"]
    assert key.expires_at is not None
    assert [item.detail["for"] for item in admin.audit(100) if item.target == key.id] == ["trial"]
    assert key.prefix not in answer.text

    admin.revoke_key(key.id)
    until(lambda: next(one for one in trial_keys(admin) if one.id == key.id).state == "revoked", "it is revoked")
    assert words(http.post("/endpoints/tried/chat", json={"messages": MESSAGES}).text) == "t0 t1 t2 "


@pytest.mark.parametrize(
    ("name", "body", "status", "param"),
    [
        ("tried", {"messages": MESSAGES, "model": "another"}, 400, "model"),
        ("tried", {"messages": MESSAGES, "stream": False}, 400, "stream"),
        ("none", {"messages": MESSAGES}, 404, "name"),
    ],
)
def test_what_it_refuses(http: httpx.Client, name: str, body: dict[str, Any], status: int, param: str) -> None:
    answer = http.post(f"/endpoints/{name}/chat", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_a_viewer_spends_nothing(platform: Installation, http: httpx.Client, admin: AdminClient) -> None:
    token = asyncio.run(viewer(platform))
    answer = http.post(
        "/endpoints/tried/chat", json={"messages": MESSAGES}, headers={"Authorization": f"Bearer {token}"}
    )
    assert answer.status_code == 403


async def viewer(platform: Installation) -> str:
    secret = load_secret(platform.home, open_keyring(platform.home, kms_key=None, kms_client=None, file=None))
    token, digest = make_admin_token(secret)
    store = Store(f"sqlite+aiosqlite:///{platform.home / 'ingle.db'}")
    async with store.write() as session:
        await tenants.add_admin_token(session, "looker", digest, Role.VIEWER, 0.0)
    await store.close()
    return token


def test_who_leaves_ends_the_work(http: httpx.Client, admin: AdminClient) -> None:
    def in_flight() -> int:
        return admin.live("long")[0].in_flight

    create(admin, "long", "tokens-10000+pace-20ms")
    with http.stream("POST", "/endpoints/long/chat", json={"messages": MESSAGES}) as answer:
        lines = answer.iter_lines()  # kept, since the stream is closed with it
        first = next(lines)
        assert '"t0 "' in first, first
        until(lambda: in_flight() == 1, "it is seen under way")
    until(lambda: in_flight() == 0, "it ended")
    admin.delete_endpoint("long")


def test_live_tells_of_all_or_one(platform: Installation, admin: AdminClient) -> None:
    (one,) = admin.live("tried")
    assert (one.state, one.replicas, one.desired, one.region) == ("ready", 1, 1, "local-eu")
    assert one.cost_per_hour > 0
    assert "tried" in {item.endpoint for item in admin.live()}
    with pytest.raises(NotFound):
        admin.live("none")
    (start, *_) = admin.cold_starts("tried")
    assert start.total_ms >= start.phases["load"]

    key = admin.create_key({"name": "for live"})
    with platform.tenant(admin.endpoint("tried").url, key.secret) as tenant:
        assert tenant.post("/chat/completions", json=chat(stream=True)).status_code == 200
        until(lambda: admin.live("tried")[0].ttft_p50, "its first token was seen")


def test_streams_through_a_gateway_of_another_process_are_seen(
    platform: Installation, admin: AdminClient, second_gateway: str
) -> None:
    create(admin, "far", "tokens-3+pace-5ms")
    admin.live("far")
    key = admin.create_key({"name": "elsewhere"})
    with platform.tenant(f"{second_gateway}/e/far/v1", key.secret) as tenant:
        assert tenant.post("/chat/completions", json=chat(stream=True)).status_code == 200
    until(lambda: admin.live("far")[0].ttft_p50, "its first token was seen")
    admin.delete_endpoint("far")


def test_the_event_stream_tells_how_one_is(http: httpx.Client, admin: AdminClient) -> None:
    with http.stream("GET", "/events", params={"live": "tried"}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: live"
        assert json.loads(next(lines)[6:])["endpoint"] == "tried"
    with http.stream("GET", "/events", params={"live": "none"}) as answer:
        assert next(answer.iter_lines()) == "event: gone"
