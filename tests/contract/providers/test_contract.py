"""What every provider keeps, whatever it runs replicas on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from control_plane.domain import Phase
from control_plane.errors import ProviderRefused
from control_plane.providers.processes import start_time
from tests.contract.providers.common import becomes, gone, spec
from tests.contract.providers.conftest import LOG_BYTES, Ground


async def test_it_offers_what_it_can_start(ground: Ground) -> None:
    offers = await ground.make().offers()
    assert ("eu-1", "cpu") in {(offer.region, offer.accelerator) for offer in offers}
    assert all(offer.max_per_replica >= 1 for offer in offers)


async def test_a_replica_starts_answers_drains_and_goes(ground: Ground, one: str) -> None:
    provider = ground.make()
    await provider.ensure(spec(one))
    running = await becomes(provider, one, Phase.RUNNING)
    assert running.phases.keys() == {"load"}
    assert running.startup_ms is not None
    assert await provider.list_owned() == [one]
    url = f"http://{running.address}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {ground.token(one)}"}
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json=body) as response:
            assert response.status == 401
        async with session.post(url, json=body, headers=headers) as response:
            assert response.status == 200
        await provider.drain(one)
        async with session.post(url, json=body, headers=headers) as response:
            assert response.status == 503
    await gone(provider, one)
    assert ground.processes(one) == []
    assert await provider.list_owned() == []
    await provider.terminate(one)
    await provider.ensure(spec(one))  # an id is started once, ever
    assert (await provider.describe(one)).phase is Phase.ABSENT
    assert ground.processes(one) == []


async def test_it_names_the_region_it_runs_in_and_since_when(ground: Ground, one: str) -> None:
    provider = ground.make()
    before = time.time()
    await provider.ensure(spec(one))
    running = await becomes(provider, one, Phase.RUNNING)
    assert running.region == "eu-1"
    assert running.began_at is not None
    assert before - 2 < running.began_at < time.time() + 2, "some tell whole seconds"
    await gone(provider, one)
    assert (await provider.describe(one)).region is None


async def test_one_that_runs_elsewhere_is_said_to_whatever_is_on_record(ground: Ground, one: str) -> None:
    await ground.make().ensure(spec(one))
    await becomes(ground.make(), one, Phase.RUNNING)
    found = await ground.make(elsewhere=True).describe(one)
    assert found.phase is Phase.RUNNING
    assert found.region not in (None, "eu-1")
    await gone(ground.make(), one)


async def test_one_that_never_was_is_absent_and_may_be_drained_and_terminated(ground: Ground, one: str) -> None:
    provider = ground.make()
    assert (await provider.describe(one)).phase is Phase.ABSENT
    await provider.drain(one)
    await provider.terminate(one)
    assert await provider.list_owned() == []
    await provider.ensure(spec(one))  # a late call of a controller that lost its lease
    assert (await provider.describe(one)).phase is Phase.ABSENT
    assert ground.processes(one) == []


async def test_ensure_starts_one_however_often_and_by_whomever(ground: Ground, one: str) -> None:
    providers = [ground.make(), ground.make()]
    await asyncio.gather(*(provider.ensure(spec(one)) for provider in providers * 4))
    found = await asyncio.gather(*(becomes(provider, one, Phase.RUNNING) for provider in providers))
    assert found[0] == found[1]
    await providers[0].ensure(spec(one))
    assert len(ground.processes(one)) == 1


async def test_a_call_whose_answer_was_lost_is_repeated_without_harm(ground: Ground, one: str) -> None:
    provider = ground.make()
    lost = asyncio.create_task(provider.ensure(spec(one)))
    done, _ = await asyncio.wait([lost], timeout=0.05)
    if not done:
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
    later = ground.make()
    await later.ensure(spec(one))
    await becomes(later, one, Phase.RUNNING)
    assert len(ground.processes(one)) == 1
    ending = asyncio.create_task(later.terminate(one))
    await asyncio.wait([ending], timeout=0.01)
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    await gone(ground.make(), one)
    assert ground.processes(one) == []


async def test_a_control_plane_that_starts_anew_finds_replicas_again(ground: Ground, one: str) -> None:
    first = ground.make()
    await first.ensure(spec(one, "child"))
    before = await becomes(first, one, Phase.RUNNING)
    later = ground.make()
    assert await later.list_owned() == [one]
    assert await later.describe(one) == before
    assert len(ground.processes(one)) == 2
    await gone(later, one)
    assert ground.processes(one) == []  # its child too


async def test_what_cannot_be_started_is_refused_with_its_code(ground: Ground, one: str) -> None:
    provider = ground.make()
    with pytest.raises(ProviderRefused, match="moon-1") as refused:
        await provider.ensure(spec(one, region="moon-1"))
    assert (refused.value.code, refused.value.permanent) == ("unknown_region", True)
    with pytest.raises(ProviderRefused, match="H999") as refused:
        await provider.ensure(spec(one, gpu="H999"))
    assert refused.value.code in ("accelerator_not_offered", "no_capacity")
    assert (await provider.describe(one)).phase is Phase.ABSENT
    assert await provider.list_owned() == []


async def test_a_failed_start_says_why(ground: Ground, one: str) -> None:
    provider = ground.make()
    await provider.ensure(spec(one, "bad"))
    failed = await becomes(provider, one, Phase.FAILED)
    assert failed.code == "model_not_found"
    assert "name one that exists" in failed.message
    assert await provider.list_owned() == [one]
    await gone(provider, one)


async def test_a_leader_that_dies_is_seen_and_its_children_go_too(ground: Ground, one: str) -> None:
    provider = ground.make()
    await provider.ensure(spec(one, "child"))
    await becomes(provider, one, Phase.RUNNING)
    leader, child = sorted(ground.processes(one))
    os.kill(leader, signal.SIGKILL)
    exited = await becomes(provider, one, Phase.EXITED)
    assert exited.code == "replica_exited"
    assert "signal 9" in exited.message
    assert start_time(child) is not None
    assert await provider.list_owned() == [one]
    await gone(provider, one)
    assert start_time(child) is None


async def test_one_that_ignores_sigterm_is_killed_after_its_grace(ground: Ground, one: str) -> None:
    stubborn = (
        "import json, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(json.dumps({'event': 'ready', 'host': '127.0.0.1', 'port': 9}), flush=True); time.sleep(600)"
    )
    provider = ground.make((sys.executable, "-c", stubborn), grace=0.3)
    await provider.ensure(spec(one))
    await becomes(provider, one, Phase.RUNNING)
    await provider.terminate(one)
    await gone(provider, one)
    assert ground.processes(one) == []


async def test_logs_are_bounded(ground: Ground, one: str) -> None:
    chatty = (
        "import json, sys, time\n"
        "print(json.dumps({'event': 'ready', 'host': '127.0.0.1', 'port': 9}), flush=True)\n"
        "for n in range(10**9):\n"
        "    print(f'line {n}', file=sys.stderr, flush=True); time.sleep(0.001)\n"
    )
    provider = ground.make((sys.executable, "-c", chatty))
    await provider.ensure(spec(one))
    await becomes(provider, one, Phase.RUNNING)
    async with asyncio.timeout(30):
        while not list(ground.home.rglob("stderr.log.1")):
            await becomes(provider, one, Phase.RUNNING)
    await provider.describe(one)
    assert sum(ground.log_sizes()) < 2 * LOG_BYTES
    await gone(provider, one)


async def test_what_a_region_sets_for_its_replicas_reaches_them(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, one: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://canary:4318")
    provider = ground.make(variables={"OTEL_EXPORTER_OTLP_ENDPOINT": "", "OTEL_OWN": "a b"})
    await provider.ensure(spec(one))
    await becomes(provider, one, Phase.RUNNING)
    (pid,) = ground.processes(one)
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert {b"OTEL_EXPORTER_OTLP_ENDPOINT=", b"OTEL_OWN=a b"} <= set(environment)
    assert not [entry for entry in environment if b"canary" in entry]


async def test_secrets_of_the_control_plane_do_not_reach_a_replica(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, one: str
) -> None:
    monkeypatch.setenv("INGLE_DATABASE_URL", "postgresql+psycopg://u:canary@h/d")
    provider = ground.make()
    await provider.ensure(spec(one))
    await becomes(provider, one, Phase.RUNNING)
    (pid,) = ground.processes(one)
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"canary" not in environment
    assert b"RAY_AUTH" not in environment
    assert b"INGLE_REGION=eu-1" in environment
