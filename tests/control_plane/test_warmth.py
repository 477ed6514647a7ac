"""Rungs of warmth: what is kept at zero, how it comes back, and which rung meets a wait."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping

import pytest

from control_plane.client import AdminClient
from control_plane.domain import Rung
from control_plane.metering.prices import PriceBook
from control_plane.store import usage as usages
from control_plane.store import warmth
from control_plane.store.database import Store
from control_plane.warmth import FirstTokens, Way, choose, figures, price_per_hour
from tests.control_plane.harness import Installation, chat, create, replica_pids, state_of, until
from tests.control_plane.test_store import usage

CHAT = "/chat/completions"
BOOK = PriceBook(1, 0.0, "USD", {}, {"l4": 1.0, "l4/asleep": 0.15, "*": 2.0})
COLD = Way(4000.0, {"import": 1500.0, "open": 100.0, "load": 2000.0})


@pytest.mark.parametrize(
    ("accelerator", "count", "rung", "price"),
    [
        ("l4", 1, Rung.HOT, 1.0),
        ("l4", 2, Rung.ASLEEP, 0.3),  # the price book's own word
        ("l4", 1, Rung.EMBER, 0.02),  # a share, where it has none
        ("h100", 1, Rung.ASLEEP, 0.2),
        ("h100", 1, Rung.COLD, 0.0),
        (None, 0, Rung.HOT, 2.0),
    ],
)
def test_what_a_rung_costs(accelerator: str | None, count: int, rung: Rung, price: float) -> None:
    assert price_per_hour(BOOK, accelerator, count, rung) == pytest.approx(price)


@pytest.mark.parametrize(
    ("ways", "hot", "wait", "rung", "said"),
    [
        ({}, [], 1.0, Rung.COLD, "nothing was measured"),
        ({Rung.COLD: [COLD]}, [], 5.0, Rung.COLD, "p95 of 1"),
        ({Rung.COLD: [COLD]}, [], 3.0, Rung.EMBER, "estimated"),
        ({Rung.COLD: [COLD]}, [], 1.0, Rung.ASLEEP, "estimated"),
        ({Rung.COLD: [COLD]}, [], 2.3, Rung.EMBER, "estimated"),
        ({Rung.COLD: [COLD]}, [], 2.2, Rung.ASLEEP, "estimated"),
        ({Rung.COLD: [COLD]}, [], 0.1, Rung.HOT, "no colder rung"),
        # what was measured replaces an estimate, either way
        ({Rung.COLD: [COLD], Rung.EMBER: [Way(900.0, {})]}, [], 1.0, Rung.EMBER, "p95 of 1"),
        ({Rung.COLD: [COLD], Rung.EMBER: [Way(3500.0, {})]}, [], 3.0, Rung.ASLEEP, "estimated"),
        # the first step counts
        ({Rung.COLD: [COLD]}, [900.0], 4.5, Rung.EMBER, "estimated"),
        ({Rung.COLD: [COLD]}, [900.0], 3.0, Rung.ASLEEP, "estimated"),
        # one slow way of few is believed; of many, the percentile
        ({Rung.COLD: [Way(500.0, {}), Way(9000.0, {})]}, [], 1.0, Rung.EMBER, "estimated"),
        ({Rung.COLD: [Way(500.0, {})] * 100 + [Way(9000.0, {})]}, [], 1.0, Rung.COLD, "p95 of 101"),
    ],
)
def test_the_cheapest_rung_that_meets_a_wait(
    ways: Mapping[Rung, list[Way]], hot: list[float], wait: float, rung: Rung, said: str
) -> None:
    chosen, why = choose(figures(ways, FirstTokens(hot), BOOK, "l4", 1), wait)
    assert chosen is rung, why
    assert said in why


def test_phases_add_up_to_the_time_to_a_first_token() -> None:
    way = Way(300.0, {"open": 30.0, "load": 20.0, "total": 200.0})
    cold, ember, asleep, hot = figures({Rung.COLD: [COLD], Rung.EMBER: [way]}, FirstTokens([40.0]), BOOK, "l4", 1)
    assert ember.phases == {"schedule": 100.0, "open": 30.0, "load": 20.0, "first_step": 40.0}
    assert (ember.first_token_ms, ember.measured) == (340.0, 1)
    assert cold.phases == {"schedule": 400.0, "import": 1500.0, "open": 100.0, "load": 2000.0, "first_step": 40.0}
    assert (asleep.first_token_ms, asleep.measured) == (240.0, 0)
    assert (hot.first_token_ms, hot.price_per_hour) == (40.0, 1.0)


@pytest.mark.parametrize(
    ("tokens", "proofs", "first_token", "high", "measured"),
    [
        (FirstTokens(), [], None, None, 0),
        # nothing was asked yet: as long as the replica's own proof took
        (FirstTokens(), [90.0], 90.0, 90.0, 0),
        # who was held had to wait for the rest, and not for that
        (FirstTokens([], [50.0, 70.0, 60.0]), [90.0], 60.0, 70.0, 0),
        (FirstTokens([20.0], [60.0]), [90.0], 20.0, 20.0, 1),
    ],
)
def test_hot_is_estimated_until_a_request_found_a_replica_ready(
    tokens: FirstTokens, proofs: list[float], first_token: float | None, high: float | None, measured: int
) -> None:
    proved = [Way(COLD.total_ms + ms, {**COLD.phases, "first_step": ms}) for ms in proofs] or [COLD]
    cold, ember, _, hot = figures({Rung.COLD: proved}, tokens, BOOK, "l4", 1)
    assert (hot.first_token_ms, hot.p95_ms, hot.measured) == (first_token, high, measured)
    assert cold.first_token_ms == 4000.0 + (first_token or 0.0), "a proof is counted once"
    assert ember.first_token_ms == 2300.0 + (first_token or 0.0)
    for rung in (cold, hot):
        assert rung.phases.get("first_step") == first_token


async def test_first_tokens_are_from_when_there_was_a_replica(store: Store) -> None:
    async with store.write() as session:
        events = [
            usage("a", endpoint_id="e", ttft_ms=30.0, held_ms=0.5),
            usage("b", endpoint_id="e", ttft_ms=930.0, held_ms=900.0),
            usage("c", endpoint_id="e", ttft_ms=None, held_ms=0.0),
            usage("d", endpoint_id="other", ttft_ms=5.0, held_ms=0.0),
        ]
        await usages.add_usage(session, events)
        found = await warmth.first_tokens(session, "e")
    assert (found.ready, found.held) == ([29.5], [30.0])


@pytest.fixture(scope="module")
def admin(platform: Installation) -> Iterator[AdminClient]:
    with platform.admin() as client:
        yield client


@pytest.fixture(scope="module")
def key(admin: AdminClient) -> str:
    return admin.create_key({"name": "warmth"}).secret


def ask(platform: Installation, admin: AdminClient, name: str, key: str) -> None:
    with platform.tenant(admin.endpoint(name).url, key) as tenant:
        answer = tenant.post(CHAT, json=chat())
        assert answer.status_code == 200, answer.text


def resting(admin: AdminClient, name: str, rung: str) -> str | None:
    """The id of the one replica, once it rests at `rung`."""
    endpoint = admin.endpoint(name)
    states = [(replica.state, replica.rung) for replica in endpoint.replicas]
    return endpoint.replicas[0].id if endpoint.state == "zero" and states == [("resting", rung)] else None


@pytest.mark.parametrize("rung", ["ember", "asleep"])
def test_a_replica_rests_and_the_next_request_wakes_it(
    platform: Installation, admin: AdminClient, key: str, rung: str
) -> None:
    name = f"warm-{rung}"
    create(admin, name, "fast", warmth=rung, idle_timeout=600)
    (first,) = (replica.id for replica in admin.endpoint(name).replicas)
    admin.sleep_endpoint(name)
    assert until(lambda: resting(admin, name, rung), "it rests") == first
    assert f"rests at {rung}" in admin.endpoint(name).reason.message
    ask(platform, admin, name, key)
    assert [(replica.id, replica.rung) for replica in admin.endpoint(name).replicas] == [(first, "hot")]
    found = {item.rung: item for item in admin.rungs(name)}
    assert found["hot"].first_token_ms is not None, "its proof tells"
    assert found["hot"].measured == 0
    assert found[rung].measured == 1
    assert found[rung].chosen
    assert found["cold"].measured == 1

    # one that dies at rest is followed by another, which never was hot
    admin.sleep_endpoint(name)
    until(lambda: resting(admin, name, rung), "it rests")
    os.killpg(replica_pids(platform)[first], signal.SIGKILL)
    other = until(lambda: (new := resting(admin, name, rung)) != first and new, "another rests")
    ask(platform, admin, name, key)
    assert [replica.id for replica in admin.endpoint(name).replicas] == [other]

    # cold: nothing is kept
    admin.update_endpoint(name, {"warmth": "cold"})
    admin.sleep_endpoint(name)
    until(lambda: state_of(admin, name) == "zero" and not admin.endpoint(name).replicas, "nothing runs")
    admin.delete_endpoint(name)


def test_a_wait_chooses_the_rung_and_says_so(platform: Installation, admin: AdminClient) -> None:
    create(admin, "patient", "start-300ms", max_wait=60.0)
    create(admin, "hasty", "start-300ms+child", max_wait=0.05)
    assert (admin.endpoint("patient").warmth, admin.endpoint("patient").warmth_by_wait) == ("cold", True)
    until(lambda: admin.endpoint("hasty").warmth != "cold", "it was looked at again")
    said = [event.message for event in admin.events("hasty") if event.kind == "warmth"]
    assert "nothing was measured yet" in said[0]
    assert admin.endpoint("hasty").warmth in said[-1]
    generation = admin.endpoint("hasty").generation
    assert generation == 1, "a choice is no change of what was asked"
    after = admin.update_endpoint("hasty", {"warmth": "ember"})
    assert (after.warmth, after.warmth_by_wait) == ("ember", False)
    for name in ("patient", "hasty"):
        admin.delete_endpoint(name)
