from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.domain import Description, Offer, Phase, ReplicaSpec
from control_plane.errors import ProviderError, ProviderRefused
from control_plane.providers.local import LocalProvider
from control_plane.providers.processes import marked, start_time
from control_plane.security.secret import load_secret
from tests.control_plane.harness import REPLICA


def make(
    home: Path,
    *,
    command: tuple[str, ...] = (sys.executable, str(REPLICA)),
    grace: float = 5.0,
    accelerators: int | None = None,
) -> LocalProvider:
    return LocalProvider(
        home,
        load_secret(home),
        regions=["local-eu"],
        command=command,
        terminate_grace=grace,
        log_bytes=8192,
        accelerators=accelerators,
    )


def spec(replica_id: str, model: str = "fast", gpu: str | None = None) -> ReplicaSpec:
    return ReplicaSpec(replica_id, "chat", "local-eu", model, gpu=gpu)


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    made = make(tmp_path)
    yield made
    for replica_id in await made.list_owned():
        for pid in marked("INGLE_REPLICA", replica_id):
            os.kill(pid, signal.SIGKILL)


async def becomes(provider: LocalProvider, replica_id: str, phase: Phase) -> Description:
    async with asyncio.timeout(30):
        while True:
            description = await provider.describe(replica_id)
            if description.phase is phase:
                return description
            await asyncio.sleep(0.02)


async def gone(provider: LocalProvider, replica_id: str) -> None:
    async with asyncio.timeout(30):
        while (await provider.describe(replica_id)).phase is not Phase.ABSENT:
            await provider.terminate(replica_id)
            await asyncio.sleep(0.02)


async def test_a_start_that_was_not_written_down_is_adopted(provider: LocalProvider, tmp_path: Path) -> None:
    await provider.ensure(spec("rep_l_a"))
    await becomes(provider, "rep_l_a", Phase.RUNNING)
    (tmp_path / "replicas" / "rep_l_a" / "process.json").unlink()
    later = make(tmp_path)
    assert (await later.describe("rep_l_a")).phase is Phase.STARTING
    await later.ensure(spec("rep_l_a"))
    assert len(marked("INGLE_REPLICA", "rep_l_a")) == 1
    await becomes(later, "rep_l_a", Phase.RUNNING)


async def test_one_whose_folder_was_removed_is_found_again(provider: LocalProvider, tmp_path: Path) -> None:
    await provider.ensure(spec("rep_l_a"))
    await becomes(provider, "rep_l_a", Phase.RUNNING)
    shutil.rmtree(tmp_path / "replicas" / "rep_l_a")
    later = make(tmp_path)
    await later.ensure(spec("rep_l_a"))
    assert len(marked("INGLE_REPLICA", "rep_l_a")) == 1
    assert (await later.describe("rep_l_a")).phase is Phase.STARTING  # where it listens was lost
    await gone(later, "rep_l_a")
    assert marked("INGLE_REPLICA", "rep_l_a") == []


async def test_a_reused_pid_is_not_taken_for_the_replica(provider: LocalProvider, tmp_path: Path) -> None:
    await provider.ensure(spec("rep_l_a"))
    await becomes(provider, "rep_l_a", Phase.RUNNING)
    path = tmp_path / "replicas" / "rep_l_a" / "process.json"
    (real,) = marked("INGLE_REPLICA", "rep_l_a")
    path.write_text(json.dumps({"pid": os.getpid(), "start_time": 1}))
    assert (await make(tmp_path).describe("rep_l_a")).phase is Phase.EXITED
    await gone(provider, "rep_l_a")
    assert start_time(os.getpid()) is not None
    assert start_time(real) is None


async def test_one_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}', flush=True); time.sleep(99)"
    )
    provider = make(tmp_path, command=(sys.executable, "-c", stubborn), grace=0.3)
    await provider.ensure(spec("rep_l_a"))
    output = tmp_path / "replicas" / "rep_l_a" / "stdout.log"
    async with asyncio.timeout(10):
        while not output.read_bytes():
            await asyncio.sleep(0.02)
    await provider.terminate("rep_l_a")
    assert marked("INGLE_REPLICA", "rep_l_a")
    await gone(provider, "rep_l_a")
    assert marked("INGLE_REPLICA", "rep_l_a") == []


async def test_what_cannot_be_started_is_said(provider: LocalProvider, tmp_path: Path) -> None:
    with pytest.raises(ProviderRefused, match="offers cpu") as refused:
        await provider.ensure(spec("rep_l_a", gpu="H999"))
    assert refused.value.permanent
    assert (await provider.describe("rep_l_a")).phase is Phase.ABSENT
    with pytest.raises(ProviderError, match="/none/such"):
        await make(tmp_path, command=("/none/such",)).ensure(spec("rep_l_b"))
    assert (await provider.describe("rep_l_b")).phase is Phase.ABSENT


async def test_replicas_get_accelerators_that_the_fewest_have(tmp_path: Path) -> None:
    provider = make(tmp_path, accelerators=3)
    assert Offer("local-eu", "cuda", 3, 0.0) in await provider.offers()
    for name, gpus, expected in (
        ("rep_l_a", 2, "0,1"),
        ("rep_l_b", 1, "2"),
        ("rep_l_c", 2, "0,1"),
        ("rep_l_d", 1, "2"),
    ):
        await provider.ensure(replace(spec(name, gpu="cuda"), gpus=gpus))
        (pid,) = marked("INGLE_REPLICA", name)
        assert f"CUDA_VISIBLE_DEVICES={expected}".encode() in environment(pid)
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert (b"--stages" in command) is (gpus > 1)
    await gone(provider, "rep_l_b")
    await gone(provider, "rep_l_d")
    await make(tmp_path, accelerators=3).ensure(replace(spec("rep_l_e", gpu="cuda"), gpus=1))  # one that starts anew
    assert b"CUDA_VISIBLE_DEVICES=2" in environment(marked("INGLE_REPLICA", "rep_l_e")[0])
    with pytest.raises(ProviderRefused, match="offers cpu, 3 cuda, not 4 cuda") as refused:
        await provider.ensure(replace(spec("rep_l_f", gpu="cuda"), gpus=4))
    assert refused.value.permanent
    for name in ("rep_l_a", "rep_l_c", "rep_l_e"):
        await gone(provider, name)


def environment(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


async def test_logs_are_bounded(tmp_path: Path) -> None:
    chatty = (
        "import json, sys, time\n"
        "print(json.dumps({'event': 'ready', 'host': '127.0.0.1', 'port': 9, 'startup_ms': 1}), flush=True)\n"
        "for n in range(10**9):\n"
        "    print(f'line {n}', file=sys.stderr, flush=True); time.sleep(0.0005)\n"
    )
    provider = make(tmp_path, command=(sys.executable, "-c", chatty))
    await provider.ensure(spec("rep_l_a"))
    await becomes(provider, "rep_l_a", Phase.RUNNING)
    folder = tmp_path / "replicas" / "rep_l_a"
    async with asyncio.timeout(20):
        while not (folder / "stderr.log.1").exists():
            await provider.describe("rep_l_a")
            await asyncio.sleep(0.02)
    await provider.describe("rep_l_a")
    assert (folder / "stderr.log").stat().st_size < 8192
    assert (await provider.describe("rep_l_a")).phase is Phase.RUNNING
    assert len(provider.logs("rep_l_a", 5)[0]) == 5
    await gone(provider, "rep_l_a")


async def test_secrets_of_the_control_plane_do_not_reach_a_replica(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGLE_DATABASE_URL", "postgresql+psycopg://u:canary@h/d")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    await provider.ensure(spec("rep_l_a"))
    (pid,) = marked("INGLE_REPLICA", "rep_l_a")
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"canary" not in environment
    assert b"http://collector:4318" in environment
    assert b"INGLE_REGION=local-eu" in environment
