"""The admin API: roles, shapes, repeats, conditions, pages, events."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from control_plane.client import AdminClient, trust
from control_plane.domain import Role
from control_plane.errors import NotFound, PreconditionFailed
from control_plane.profile import read_profile
from control_plane.security.keyring import open_keyring
from control_plane.security.keys import make_admin_token
from control_plane.security.secret import load_secret
from control_plane.store import tenants
from control_plane.store.database import Store
from tests.control_plane.harness import Installation, create, until


@pytest.fixture(scope="module")
def http(platform: Installation) -> Iterator[httpx.Client]:
    profile = read_profile(platform.home / "profile.toml")
    headers = {"Authorization": f"Bearer {profile.token}"}
    verify = trust(profile.ca_file)
    with httpx.Client(
        base_url=profile.admin_url, headers=headers, verify=verify, trust_env=False, timeout=30
    ) as client:
        yield client


def code_of(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return response.status_code, error["code"], error["param"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"name": "No Capitals"}, "name"),
        ({"name": "-x"}, "name"),
        ({"name": "x" * 64}, "name"),
        ({"region": "mars"}, "region"),
        ({"model": ""}, "model"),
        ({"model": "a\x00b"}, "model"),
        ({"gpu": ""}, "gpu"),
        ({"gpu": "H100"}, "gpu"),
        ({"gpu": "cuda"}, "gpu"),
        ({"gpu": "cpu", "gpus": 2}, "gpu"),
        ({"engine_args": ["--x\n"]}, "engine_args.0"),
        ({"min_replicas": -1}, "min_replicas"),
        ({"min_replicas": 2, "max_replicas": 1}, None),
        ({"max_replicas": 0}, "max_replicas"),
        ({"idle_timeout": 0}, "idle_timeout"),
        ({"idle_timeout": "soon"}, "idle_timeout"),
        ({"max_wait": -1}, "max_wait"),
        ({"max_wait": 1e9}, "max_wait"),
        ({"warmth": "tepid"}, "warmth"),
        ({"warmth": "hot"}, None),
        ({"preset": "turbo"}, "preset"),
        ({"engine_args": "x"}, "engine_args"),
        ({"gpus": 65}, "gpus"),
    ],
)
def test_a_bad_endpoint_is_refused_by_field(http: httpx.Client, changes: dict[str, Any], param: str | None) -> None:
    spec = {"name": "bad", "region": "local-eu", "model": "fast"} | changes
    status, _, named = code_of(http.post("/admin/v1/endpoints", json=spec))
    assert (status, named) == (422, param)
    assert code_of(http.post("/admin/v1/endpoints/check", json=spec))[::2] == (422, param)
    assert http.get("/admin/v1/endpoints/bad").status_code == 404


def test_a_good_endpoint_is_accepted_and_not_made(http: httpx.Client) -> None:
    spec = {"name": "good", "region": "local-eu", "model": "fast", "preset": "chat", "gpu": "cpu", "tenant": "nobody"}
    accepted = http.post("/admin/v1/endpoints/check", json=spec).json()
    assert (accepted["name"], accepted["region"]) == ("good", "local-eu")
    assert "--max-num-seqs=64" in accepted["engine_args"]
    assert http.get("/admin/v1/endpoints/good").status_code == 404


@pytest.mark.parametrize("content", [b"{", b"[]", b'"x"', b"[" * 100_000])
def test_a_body_that_is_no_object(http: httpx.Client, content: bytes) -> None:
    assert code_of(http.post("/admin/v1/tenants", content=content))[:2] == (400, "invalid_json")


def test_unknown_things_and_methods(http: httpx.Client) -> None:
    assert code_of(http.get("/admin/v1/endpoints/none"))[0] == 404
    assert code_of(http.get("/admin/v1/nonsense"))[:2] == (404, "unknown_url")
    assert code_of(http.put("/admin/v1/endpoints", json={}))[:2] == (405, "method_not_allowed")
    assert code_of(http.post("/admin/v1/keys", json={"tenant": "none"}))[0] == 404
    assert code_of(http.get("/admin/v1/endpoints?limit=0"))[0] == 422
    assert code_of(http.get("/admin/v1/endpoints?limit=x"))[0] == 422
    assert code_of(http.post("/admin/v1/tenants", content=b"x" * 2_000_000))[0] == 413


def test_roles_include_those_below(platform: Installation, http: httpx.Client) -> None:
    secret = load_secret(platform.home, open_keyring(platform.home))
    tokens = {role: make_admin_token(secret) for role in Role}

    async def write() -> None:
        store = Store(f"sqlite+aiosqlite:///{platform.home / 'ingle.db'}")
        async with store.write() as session:
            for role, (_, digest) in tokens.items():
                await tenants.add_admin_token(session, f"test-{role}", digest, role, 1.0)
        await store.close()

    asyncio.run(write())
    calls: list[tuple[Role, str, str, Any]] = [
        (Role.VIEWER, "GET", "/admin/v1/endpoints", None),
        (Role.VIEWER, "GET", "/admin/v1/usage", None),
        (Role.OPERATOR, "POST", "/admin/v1/keys", {"name": "by role"}),
        (Role.OPERATOR, "POST", "/admin/v1/certs/rotate", {"name": "admin"}),
        (Role.OWNER, "GET", "/admin/v1/audit", None),
    ]
    for needed, method, path, body in calls:
        for role, (token, _) in tokens.items():
            reply = http.request(method, path, json=body, headers={"Authorization": f"Bearer {token}"})
            if role.includes(needed):
                assert reply.status_code < 300, (role, path)
            else:
                assert code_of(reply)[:2] == (403, "permission_denied"), (role, path)
    for header in ("", "Bearer", "Bearer x", f"Basic {tokens[Role.OWNER][0]}"):
        reply = http.get("/admin/v1/endpoints", headers={"Authorization": header})
        assert code_of(reply)[:2] == (401, "invalid_admin_token")


def test_a_create_that_is_repeated_happens_once(http: httpx.Client, admin: AdminClient) -> None:
    spec = {"name": "once", "region": "local-eu", "model": "fast"}
    headers = {"Idempotency-Key": "k-1"}
    first = http.post("/admin/v1/endpoints", json=spec, headers=headers)
    again = http.post("/admin/v1/endpoints", json=spec, headers=headers)
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json() == again.json()
    other = http.post("/admin/v1/endpoints", json=spec | {"model": "x"}, headers=headers)
    assert code_of(other)[:2] == (409, "idempotency_key_reused")
    assert code_of(http.post("/admin/v1/endpoints", json=spec))[:2] == (409, "name_taken")
    made = http.post("/admin/v1/keys", json={"name": "once"}, headers={"Idempotency-Key": "k-2"}).json()
    repeat = http.post("/admin/v1/keys", json={"name": "once"}, headers={"Idempotency-Key": "k-2"})
    assert code_of(repeat)[:2] == (409, "already_created")
    assert made["id"] in repeat.json()["error"]["message"]
    assert made["secret"] not in repeat.text
    admin.delete_endpoint("once")


def test_an_update_can_be_made_conditional(http: httpx.Client, admin: AdminClient) -> None:
    create(admin, "etag")
    shown = http.get("/admin/v1/endpoints/etag")
    assert shown.headers["etag"] == '"1"'
    done = http.patch("/admin/v1/endpoints/etag", json={"max_wait": 5}, headers={"If-Match": '"1"'})
    assert (done.status_code, done.headers["etag"]) == (202, '"2"')
    late = http.patch("/admin/v1/endpoints/etag", json={"max_wait": 6}, headers={"If-Match": '"1"'})
    assert code_of(late)[:2] == (412, "precondition_failed")
    assert code_of(http.patch("/admin/v1/endpoints/etag", json={}, headers={"If-Match": "x"}))[0] == 400
    assert code_of(http.patch("/admin/v1/endpoints/etag", json={"max_wait": None}))[2] == "max_wait"
    assert code_of(http.patch("/admin/v1/endpoints/etag", json={"min_replicas": 3}))[2] == "min_replicas"
    with pytest.raises(PreconditionFailed):
        admin.update_endpoint("etag", {"max_wait": 6}, if_generation=1)
    # Bounds alone need no new replica, and a change that changes nothing is no generation.
    assert len({replica.id for replica in admin.endpoint("etag").replicas}) == 1
    assert admin.update_endpoint("etag", {"max_wait": 5}).generation == 2
    admin.delete_endpoint("etag")


def test_what_is_paused_or_being_deleted_is_not_woken(http: httpx.Client, admin: AdminClient) -> None:
    create(admin, "pausing", "fast+pace-50ms")
    admin.update_endpoint("pausing", {"paused": True})
    assert code_of(http.post("/admin/v1/endpoints/pausing/wake"))[:2] == (409, "paused")
    admin.update_endpoint("pausing", {"paused": False, "min_replicas": 1})
    assert code_of(http.post("/admin/v1/endpoints/pausing/sleep"))[:2] == (409, "min_replicas")
    admin.delete_endpoint("pausing")
    late = http.patch("/admin/v1/endpoints/pausing", json={"max_wait": 1})
    assert code_of(late)[:2] in ((409, "deleting"), (404, "not_found"))


def test_lists_come_in_pages(http: httpx.Client, admin: AdminClient) -> None:
    for number in range(5):
        admin.create_tenant(f"page-{number}")
    names: list[str] = []
    cursor: str | None = ""
    pages = 0
    while cursor is not None:
        page = http.get("/admin/v1/tenants", params={"limit": 2, "after": cursor}).json()
        names += [item["name"] for item in page["data"]]
        cursor = page["next"]
        pages += 1
    assert names == sorted(names)
    assert names == [tenant.name for tenant in admin.tenants()]
    assert pages >= 3


def test_a_key_is_rotated_with_grace_and_once(admin: AdminClient, http: httpx.Client) -> None:
    old = admin.create_key({"name": "r", "expires_in": 1000.0, "concurrency": 7})
    new = admin.rotate_key(old.id, 60.0)
    assert (new.name, new.limits.concurrency, new.tenant) == ("r", 7, "default")
    assert new.expires_at
    listed = {key.id: key for key in admin.keys("default")}
    assert listed[old.id].rotated_to == new.id
    assert listed[old.id].state == "active"
    assert "secret" not in listed[new.id].model_dump()
    path = f"/admin/v1/keys/{old.id}/rotate"
    assert code_of(http.post(path, json={"grace_seconds": 600}))[:2] == (409, "key_rotated")
    for grace in (-1, 10**9, "x"):
        assert code_of(http.post(f"/admin/v1/keys/{new.id}/rotate", json={"grace_seconds": grace}))[0] == 422
    assert admin.revoke_key(old.id).state == "revoked"
    assert admin.revoke_key(old.id).state == "revoked"
    with pytest.raises(NotFound):
        admin.revoke_key("none")


def test_what_is_changed_is_audited_without_secrets(admin: AdminClient) -> None:
    made = admin.create_key({"name": "audited"})
    admin.revoke_key(made.id)
    revoked, created = admin.audit(2)
    assert (revoked.action, created.action) == ("key.revoke", "key.create")
    assert created.actor == "profile"
    assert created.target == made.id
    assert made.secret not in str(created)
    assert revoked.id > created.id


def test_events_stream_as_they_happen(admin: AdminClient, platform: Installation) -> None:
    seen: list[tuple[str, str]] = []
    done = threading.Event()
    create(admin, "streamed")
    last = max(event.id for event in admin.events("streamed"))

    def follow() -> None:
        with platform.admin() as client:
            for event in client.stream_events(after=last):
                if event.endpoint == "streamed":
                    seen.append((event.kind, event.state))
                    if event.state == "deleted":
                        break
        done.set()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    admin.delete_endpoint("streamed")
    assert done.wait(30)
    assert seen[0][0] == "delete_requested"
    assert ("replica", "terminated") in seen


def test_the_document_describes_what_is_there(http: httpx.Client, admin: AdminClient) -> None:
    document = http.get("/admin/openapi.json", headers={"Authorization": ""}).json()
    assert document["openapi"].startswith("3.1")
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    for path, methods in document["paths"].items():
        for method in methods:
            real = path.replace("{name}", "none").replace("{id}", "none")
            reply = http.request(method, real, json={} if method != "get" else None)
            assert reply.status_code not in (405, 500), (method, path)
            assert reply.status_code != 404 or reply.json()["error"]["code"] != "unknown_url"

    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            for name, value in node.items():
                if name == "$ref":
                    yield value
                else:
                    yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]


def test_regions_status_logs_and_pages_of_its_own(http: httpx.Client, admin: AdminClient) -> None:
    until(lambda: {region.gateway for region in admin.regions()} == {"up"}, "gateways are heard")
    assert [region.name for region in admin.regions()] == ["local-eu", "local-me"]
    assert admin.region("local-me").provider == "local"
    assert admin.status().regions == ["local-eu", "local-me"]
    create(admin, "logged")
    assert any("starting" in line for logs in admin.logs("logged", lines=5) for line in logs.lines)
    admin.delete_endpoint("logged")
    assert http.get("/livez").status_code == http.get("/readyz").status_code == 200
    assert "ingle_replicas_desired" in http.get("/metrics").text
    assert code_of(http.post("/admin/v1/certs/rotate", json={"name": "none"}))[0] == 404
    assert code_of(http.post("/admin/v1/certs/rotate", json={"name": "../x"}))[0] == 404
