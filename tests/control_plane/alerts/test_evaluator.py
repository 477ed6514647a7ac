"""The controller's own watch, with a real database, real receivers on the loopback interface and a clock of ours."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import update

from control_plane.alerts.evaluator import Evaluator
from control_plane.alerts.facts import Facts
from control_plane.alerts.scrape import Scraper
from control_plane.config import AlertSettings, ReceiverSettings, describe_validation, load_settings
from control_plane.domain import HistoryPoint
from control_plane.errors import LeaseLost
from control_plane.observe import metrics
from control_plane.security.audit import AuditSigner
from control_plane.security.secret import Secret
from control_plane.store import alerts, audit, endpoints, facts, history, tenants
from control_plane.store.database import Store
from control_plane.store.models import ApiKeyRow, AuditRow, UsageHourRow
from tests.control_plane.alerts.mail import mail_server
from tests.control_plane.alerts.monitoring import Listener, listening

SECRET = Secret(b"s" * 32)
START = 1_800_000_000.0
TOKEN = "CANARY-token-of-a-hook"


@dataclass
class Clock:
    now: float = START

    def __call__(self) -> float:
        return self.now


@dataclass
class Watch:
    store: Store
    clock: Clock
    settings: AlertSettings
    made: list[Evaluator]

    def evaluator(self, owner: str = "one") -> Evaluator:
        scraper = Scraper(self.store, SECRET, clock=self.clock)
        made = Evaluator(
            self.store, scraper, Facts(self.store, AuditSigner(SECRET)), self.settings, owner=owner, clock=self.clock
        )
        self.made.append(made)
        return made

    async def look(self, evaluator: Evaluator, seconds: float = 15.0) -> None:
        self.clock.now += seconds
        await evaluator.tick()


@pytest.fixture
def listener() -> Iterator[Listener]:
    with listening() as made:
        made.url += f"?token={TOKEN}"
        yield made


@pytest.fixture
async def watch(store: Store, listener: Listener) -> AsyncIterator[Watch]:
    hook = {"name": "ops", "kind": "webhook", "url": listener.url}
    made = Watch(store, Clock(), AlertSettings.model_validate({"receivers": [hook]}), [])
    # of this process, which has no gateway: without it its absence would be told
    metrics.snapshot_age.labels("r1").set(0)
    yield made
    for evaluator in made.made:
        await evaluator._session.close()
        await evaluator._scraper.close()
    metrics.forget("r1", "troubled")
    metrics.snapshot_age.remove("r1")


def given_up(failed: bool) -> None:
    metrics.endpoint_failed.labels("r1", "troubled").set(failed)


def statuses(listener: Listener) -> list[str]:
    return [body["status"] for _, _, body in listener.posts]


async def test_it_fires_is_told_once_and_is_told_to_be_over(watch: Watch, listener: Listener) -> None:
    evaluator = watch.evaluator()
    await watch.look(evaluator)
    assert listener.posts == []
    given_up(True)
    for _ in range(3):
        await watch.look(evaluator)
    ((path, _, body),) = listener.posts
    assert path.endswith(TOKEN)
    (told,) = body["alerts"]
    assert told["labels"] == {
        "alertname": "ColdStartFails",
        "severity": "critical",
        "endpoint": "troubled",
        "region": "r1",
    }
    assert told["annotations"]["runbook"] == "infra/runbooks/cold-start-fails.md"
    assert told["startsAt"].startswith("2027-01-15T08:00:30")
    given_up(False)
    for _ in range(4):
        await watch.look(evaluator)
    assert statuses(listener) == ["firing", "resolved"]
    assert listener.posts[1][2]["alerts"][0]["fingerprint"] == told["fingerprint"]


async def test_another_process_takes_over_and_repeats_nothing(watch: Watch, listener: Listener) -> None:
    first, second = watch.evaluator("one"), watch.evaluator("two")
    given_up(True)
    await watch.look(first)
    with pytest.raises(LeaseLost):
        await watch.look(second)
    assert statuses(listener) == ["firing"]
    given_up(False)
    await watch.look(second, 120)  # the first one's lease is over
    with pytest.raises(LeaseLost):
        await watch.look(first)
    # what it took over it ends only once it has seen as much of the past as the alert looks at
    for _ in range(20):
        await watch.look(second, 30)
    assert statuses(listener) == ["firing"]
    for _ in range(11):
        await watch.look(second, 30)
    assert statuses(listener) == ["firing", "resolved"]


async def test_what_is_long_over_is_forgotten(watch: Watch) -> None:
    evaluator = watch.evaluator()
    given_up(True)
    await watch.look(evaluator)
    given_up(False)
    for _ in range(4):
        await watch.look(evaluator)
    async with watch.store.write() as session:
        await alerts.forget_alerts(session, watch.clock.now - 3600)
        assert [one.state for one in await alerts.list_alerts(session)] == ["resolved"]
        await alerts.forget_alerts(session, watch.clock.now + 3600)
        assert await alerts.list_alerts(session) == []


async def test_a_silence_keeps_it_quiet_and_it_is_still_listed(watch: Watch, listener: Listener) -> None:
    evaluator = watch.evaluator()
    async with watch.store.write() as session:
        row = await alerts.add_silence(session, {"endpoint": "troubled"}, "known", "me", START, START + 100)
    given_up(True)
    await watch.look(evaluator)
    await watch.look(evaluator)
    assert listener.posts == []
    async with watch.store.read() as session:
        (state,) = await alerts.list_alerts(session)
    assert (state.state, state.alert, state.told) == ("firing", "ColdStartFails", {})
    async with watch.store.write() as session:
        await alerts.end_silence(session, row.id, watch.clock.now)
    await watch.look(evaluator)
    assert statuses(listener) == ["firing"]


async def test_who_could_not_be_told_is_told_later(
    watch: Watch, listener: Listener, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    evaluator = watch.evaluator()
    listener.answer = 500
    given_up(True)
    for _ in range(3):
        await watch.look(evaluator)
    assert listener.posts == []
    listener.answer = 200
    await watch.look(evaluator, 600)
    assert statuses(listener) == ["firing"]
    said = capsys.readouterr().err + caplog.text + repr(watch.settings)
    assert TOKEN not in said


async def test_slack_pagerduty_and_mail_have_their_own_words(watch: Watch, listener: Listener) -> None:
    with mail_server() as box:
        hook = listener.url
        watch.settings = AlertSettings.model_validate(
            {
                "receivers": [
                    {"name": "slack", "kind": "slack", "url": hook},
                    {"name": "pager", "kind": "pagerduty", "url": hook, "routing_key": "CANARY-key"},
                    {"name": "mail", "kind": "email", "smtp": box.address, "sender": "ingle@example.com",
                     "to": ["a@example.com", "b@example.com"], "tls": "never", "username": "u", "password": "p"},
                    {"name": "calm", "kind": "webhook", "url": hook, "severities": ["warning"]},
                ]
            }
        )  # fmt: skip
        evaluator = watch.evaluator()
        given_up(True)
        await watch.look(evaluator)
        given_up(False)
        for _ in range(3):
            await watch.look(evaluator)
        bodies: list[dict[str, Any]] = [body for _, _, body in listener.posts]
        slack = [body for body in bodies if "attachments" in body]
        assert [body["attachments"][0]["title"] for body in slack] == [
            "Firing: ColdStartFails",
            "Resolved: ColdStartFails",
        ]
        assert slack[0]["text"].startswith("[critical] ColdStartFails: troubled in r1")
        trigger, resolve = (body for body in bodies if "routing_key" in body)
        assert (trigger["event_action"], resolve["event_action"]) == ("trigger", "resolve")
        assert trigger["routing_key"] == "CANARY-key"
        assert trigger["dedup_key"] == resolve["dedup_key"]
        assert trigger["payload"]["severity"] == "critical"
        assert trigger["payload"]["source"] == "troubled"
        assert [message["Subject"].strip().split(":")[0] for message in box.messages] == [
            "[critical] ColdStartFails",
            "[resolved] ColdStartFails",
        ]
        assert box.recipients == ["a@example.com", "b@example.com"] * 2
        assert base64.b64decode(box.logins[0]) == b"\0u\0p"
        assert len(bodies) == 4  # nothing for those who hear warnings only


async def test_history_is_written_by_the_minute_and_by_the_hour(watch: Watch) -> None:
    async with watch.store.write() as session:
        tenant = (await tenants.create_tenant(session, "t", START)).id
        spec: dict[str, Any] = {"name": "troubled", "region": "r1", "model": "m", "gpu": None, "gpus": 0}
        spec |= {"engine_args": [], "min_replicas": 0, "max_replicas": 1, "idle_timeout": 60.0, "max_wait": 10.0}
        spec |= {"warmth": "cold"}
        endpoint = await endpoints.create_endpoint(session, tenant, spec, START)
    evaluator = watch.evaluator()
    metrics.replicas_ready.labels("r1", "troubled").set(2)
    for _ in range(4 * 61):
        await watch.look(evaluator)
    async with watch.store.read() as session:
        minutes = await history.list_points(session, endpoint.id, 60, START, START + 7200)
        hours = await history.list_points(session, endpoint.id, 3600, START - 3600, START + 7200)
    assert len(minutes) >= 59
    assert [point.at for point in minutes] == [minutes[0].at + 60 * index for index in range(len(minutes))]
    assert {point.replicas for point in minutes[1:]} == {2.0}
    assert [point.at for point in hours] == [START]


async def test_history_is_forgotten_and_bounded(store: Store) -> None:
    async with store.write() as session:
        for at in range(0, 4000):
            await history.add_points(session, 60, at * 60, {"ep": HistoryPoint(at * 60, replicas=1.0)})
            if at == 0:
                await history.add_points(session, 60, 0, {"ep": HistoryPoint(0, replicas=5.0)})
        await history.add_points(session, 3600, 0, {"ep": HistoryPoint(0)})
        found = await history.list_points(session, "ep", 60, 0, 1e9)
        assert len(found) == history.MOST_POINTS
        assert found[0].replicas == 1.0
        await history.forget_points(session, 4000 * 60.0)
        assert (await history.list_points(session, "ep", 60, 0, 1e9))[0].at == 4000 * 60 - history.KEPT[60]
        assert await history.last_point(session, 3600) == 0
        assert await history.last_point(session, 60) == 3999 * 60


async def test_facts_that_only_the_database_tells(store: Store) -> None:
    day = 86_400.0
    async with store.write() as session:
        tenant = await tenants.create_tenant(session, "acme", START)
        tenant.monthly_budget = 2.0
        for index, (ends, used, rotated) in enumerate(
            [(3, 1, None), (30, 1, None), (3, 20, None), (3, 1, "other"), (-1, 1, None)]
        ):
            session.add(
                ApiKeyRow(
                    id=f"k{index}", tenant_id=tenant.id, name="k", hash=bytes([index]), prefix="p", created_at=0.0,
                    expires_at=START + ends * day, last_used_at=START - used * day, rotated_to=rotated,
                )
            )  # fmt: skip
        session.add(
            UsageHourRow(
                hour=int(START) // 3600 * 3600, tenant_id=tenant.id, key_id="k", endpoint_id="e", price_version=1,
                endpoint_name="e", region="r", requests=1, prompt_tokens=1, completion_tokens=1, cached_tokens=0,
                wasted_tokens=0, cost_nano=1_500_000_000, duration_ms=1.0, ttft_ms=1.0, streams=1,
            )
        )  # fmt: skip
    async with store.read() as session:
        assert await facts.keys_expiring(session, START, 7 * day) == 1
        assert await facts.budgets_used(session, START) == {"acme": 0.75}
        assert await facts.budgets_used(session, START + 40 * day) == {"acme": 0.0}


async def test_a_changed_audit_record_is_found(store: Store) -> None:
    signer = AuditSigner(SECRET)
    async with store.write() as session:
        for index in range(3):
            await audit.add_audit(
                session, signer.seal, at=START, actor="a", role="owner", action="x", target=str(index),
                request_id="r", detail={},
            )  # fmt: skip
    watcher = Facts(store, signer)
    await watcher.look(START)
    assert metrics.audit_faults._value.get() == 0
    async with store.write() as session:
        await session.execute(update(AuditRow).where(AuditRow.seq == 2).values(target="forged"))
    await watcher.look(START + 30)  # not walked again so soon
    assert metrics.audit_faults._value.get() == 0
    await watcher.look(START + 700)
    assert metrics.audit_faults._value.get() > 0
    metrics.audit_faults.set(0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"name": "x", "kind": "webhook"}, "url"),
        ({"name": "x", "kind": "pagerduty"}, "routing_key"),
        ({"name": "x", "kind": "email", "smtp": "h:25", "sender": "a@b"}, "to"),
        ({"name": "x", "kind": "carrier-pigeon"}, "kind"),
        ({"name": "X Y", "kind": "slack", "url": "u"}, "name"),
    ],
)
def test_a_receiver_that_lacks_something_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ReceiverSettings.model_validate(given)
    assert named in describe_validation(caught.value)


def test_receivers_come_from_the_environment_too(tmp_path: Path) -> None:
    receivers = f'[{{"name": "ops", "kind": "slack", "url": "https://example.com/{TOKEN}"}}]'
    settings = load_settings({"home": tmp_path}, {**os.environ, "INGLE_ALERTS__RECEIVERS": receivers})
    assert settings.alerts.receivers[0].reached_by.endswith(TOKEN)
    assert TOKEN not in repr(settings)
