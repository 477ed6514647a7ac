"""A change grows beside what serves, and what fails is never seen by a tenant."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from control_plane.client import AdminClient
from control_plane.errors import Conflict, IngleError, NotFound
from tests.control_plane.harness import Installation, chat, create, ingle, state_of, until

CHAT = "/chat/completions"


@pytest.fixture(scope="module")
def key(admin: AdminClient) -> str:
    return admin.create_key({"name": "rollouts"}).secret


@pytest.fixture
def name(admin: AdminClient, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"r{abs(hash(request.node.name)) % 10**8}"
    yield name
    admin.delete_endpoint(name)


def tokens(platform: Installation, admin: AdminClient, name: str, key: str) -> int:
    """How long a reply is: that tells the model."""
    with platform.tenant(admin.endpoint(name).url, key) as tenant:
        answer = tenant.post(CHAT, json=chat())
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["completion_tokens"])


def outcomes(admin: AdminClient, name: str) -> list[tuple[int, str]]:
    return [(item.generation, item.outcome) for item in admin.generations(name)]


def ids(admin: AdminClient, name: str) -> set[str]:
    return {replica.id for replica in admin.endpoint(name).replicas if replica.state == "ready"}


@pytest.mark.parametrize(("model", "code"), [("bad", "model_not_found"), ("mute", "generation_failed")])
def test_a_change_that_fails_leaves_what_serves(
    platform: Installation, admin: AdminClient, key: str, name: str, model: str, code: str
) -> None:
    create(admin, name, "tokens-4", idle_timeout=600)
    before = ids(admin, name)
    admin.update_endpoint(name, {"model": model})
    until(lambda: admin.endpoint(name).given_up, "it is given up on")
    assert tokens(platform, admin, name, key) == 4
    until(lambda: len(admin.endpoint(name).replicas) == 1, "only what served is left")
    broken = admin.endpoint(name)
    assert (broken.state, broken.reason.code, broken.generation) == ("degraded", code, 2)
    assert "generation 1 serves on" in broken.reason.message
    failed, served = admin.generations(name)
    assert (failed.outcome, failed.code, failed.changed) == ("failed", code, ["model"])
    assert served.outcome == "serving"

    # asleep it forgets nothing: the next request starts what served, not what failed
    admin.sleep_endpoint(name)
    until(lambda: state_of(admin, name) == "zero", "at zero")
    assert tokens(platform, admin, name, key) == 4
    again = ids(admin, name)
    assert again.isdisjoint(before)

    # back to what served: it runs already
    ran = ran_as(admin, name)
    back = admin.roll_back(name)
    assert (back.model, back.generation) == ("tokens-4", 3)
    assert {replica: generation for replica, generation in ran_as(admin, name).items() if replica not in again} == {
        replica: generation for replica, generation in ran.items() if replica not in again
    }, "what has ended ran as what it was"
    until(lambda: state_of(admin, name) == "ready", "ready")
    assert ids(admin, name) == again, "nothing was started anew"
    until(lambda: outcomes(admin, name) == [(3, "serving"), (2, "failed"), (1, "served")], "told so")


def ran_as(admin: AdminClient, name: str) -> dict[str, int]:
    """By evidence: each replica's generation."""
    contents = [json.loads(line)["content"] for line in admin.evidence(name)]
    return {content["replica"]: content["generation"] for content in contents if content["kind"] == "replica"}


def test_rolling_back_to_any_generation(platform: Installation, admin: AdminClient, key: str, name: str) -> None:
    create(admin, name, "tokens-4", idle_timeout=600)
    with pytest.raises(NotFound, match="that served before"):
        admin.roll_back(name)
    for number in (5, 6):
        admin.update_endpoint(name, {"model": f"tokens-{number}", "max_replicas": number})
        until(lambda: admin.endpoint(name).stable_generation == admin.endpoint(name).generation, "rolled out")
    assert tokens(platform, admin, name, key) == 6
    after = admin.roll_back(name, 1)
    assert (after.model, after.max_replicas) == ("tokens-4", 1)
    until(lambda: outcomes(admin, name)[0] == (4, "serving"), "rolled back")
    assert tokens(platform, admin, name, key) == 4

    # what a rollback undoes is told, what came just before it too
    admin.update_endpoint(name, {"max_wait": 7.0})
    undone = ingle(platform.home, "endpoint", "rollback", name, "--to", "4", **platform.more)
    assert "generation 6: max_wait, as in generation 4; undone: 5 (" in undone.stderr, undone.stderr
    again = ingle(platform.home, "endpoint", "rollback", name, "--to", "4", **platform.more)
    assert "nothing differs" in again.stderr
    assert "undone" not in again.stderr
    with pytest.raises(NotFound, match="generation 9"):
        admin.roll_back(name, 9)


def test_a_canary_gets_its_share_and_then_all(platform: Installation, admin: AdminClient, key: str, name: str) -> None:
    create(admin, name, "tokens-4", idle_timeout=600)
    for changes, said in (
        ({"canary": 20}, "canary is of a change"),
        ({"canary": 0}, "canary"),
        ({"canary": 100}, "canary"),
    ):
        with pytest.raises(IngleError, match=said):
            admin.update_endpoint(name, changes)
    with pytest.raises(Conflict, match="no canary"):
        admin.promote(name)
    waited = ("--canary", "30", "--wait", "--timeout", "60s")
    done = ingle(platform.home, "endpoint", "update", name, "--model", "tokens-7", *waited, **platform.more)
    assert done.returncode == 0, done.stderr
    assert len(ids(admin, name)) == 2, "both serve"
    assert admin.endpoint(name).stable_generation == 1
    lengths = _many(platform, admin, name, key, 200)
    # 60 are expected, and a deviation of six and a half
    assert 25 <= lengths[7] <= 95
    assert lengths[4] + lengths[7] == 200
    admin.promote(name)
    until(lambda: len(ids(admin, name)) == 1 and admin.endpoint(name).stable_generation == 2, "rolled out")
    assert set(_many(platform, admin, name, key, 10)) == {7}


def test_a_canary_that_failed_is_not_promoted(platform: Installation, admin: AdminClient, name: str) -> None:
    create(admin, name, "tokens-4", idle_timeout=600)
    admin.update_endpoint(name, {"model": "bad", "canary": 20})
    until(lambda: outcomes(admin, name)[0] == (2, "failed"), "it is given up on")
    with pytest.raises(Conflict, match="the canary failed: "):
        admin.promote(name)
    assert outcomes(admin, name) == [(2, "failed"), (1, "serving")]


def test_a_canary_that_dies_costs_nobody_an_answer(
    platform: Installation, admin: AdminClient, key: str, name: str
) -> None:
    create(admin, name, "tokens-4", idle_timeout=600)
    admin.update_endpoint(name, {"model": "fault", "canary": 50})
    until(lambda: len(ids(admin, name)) == 2, "both serve")
    with platform.tenant(admin.endpoint(name).url, key) as tenant:
        statuses = Counter(tenant.post(CHAT, json=chat()).status_code for _ in range(40))
    assert statuses[200] >= 10, "the half that isn't the canary's"
    admin.roll_back(name)
    until(lambda: len(ids(admin, name)) == 1, "the canary is gone")
    assert set(_many(platform, admin, name, key, 10)) == {4}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"schedule": [{"days": [7], "start": 0, "end": 60, "min_replicas": 1}]}, "schedule.0.days.0"),
        (
            {"schedule": [{"days": [1], "start": 0, "end": 60, "min_replicas": 1, "zone": "Mars/Base"}]},
            "schedule.0.zone",
        ),
        ({"target": 0}, "target"),
        ({"ttft_slo": -1}, "ttft_slo"),
        ({"warmth": "tepid"}, "warmth"),
        ({"canary": 5}, "canary"),
    ],
)
def test_what_is_off_is_named(platform: Installation, admin: AdminClient, changes: dict[str, Any], param: str) -> None:
    spec = {"name": "never", "region": "local-eu", "model": "fast"} | changes
    with pytest.raises(IngleError) as caught:
        admin.create_endpoint(spec)
    assert caught.value.param == param


def _many(platform: Installation, admin: AdminClient, name: str, key: str, count: int) -> Counter[int]:
    with platform.tenant(admin.endpoint(name).url, key) as tenant:
        answers: list[httpx.Response] = [tenant.post(CHAT, json=chat()) for _ in range(count)]
    assert {answer.status_code for answer in answers} == {200}
    return Counter(answer.json()["usage"]["completion_tokens"] for answer in answers)
