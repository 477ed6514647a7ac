"""Faults on a real platform, seen by a real Prometheus, told by a real Alertmanager, and told when they are over."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from control_plane.security.certificates import CertificateAuthority
from tests.control_plane.alerts.monitoring import Listener, Prometheus, listening, needs_prometheus, watching
from tests.control_plane.harness import Installation, create, installed, replica_pids, until
from tests.data_plane import tiny
from tests.data_plane.text.tokenizers_made import byte_level_fields

SCALE = 1 / 100
"""Five minutes are three seconds."""
FAULTY = Path(__file__).with_name("faulty_replica.py")


@dataclass
class Scene:
    folder: Path
    platform: Installation
    faults: Path
    listener: Listener
    prometheus: Prometheus
    base: str
    key: str

    def inject(self, *words: str) -> None:
        made = self.faults.with_suffix(".new")
        made.write_text(" ".join(words))
        made.replace(self.faults)

    def told(self, alert: str, status: str) -> dict[str, Any]:
        return until(lambda: self.listener.told(alert, status), f"{alert} {status}")

    @contextmanager
    def load(self, streams: int) -> Iterator[None]:
        """So many streams at once, one after another."""
        stop = threading.Event()
        body = {"model": "m", "messages": [{"role": "user", "content": "go on"}], "max_tokens": 200, "stream": True}

        def run() -> None:
            with self.platform.tenant(self.base, self.key) as tenant:
                while not stop.is_set():
                    try:
                        with tenant.stream("POST", "/chat/completions", json={**body, "ignore_eos": True}) as reply:
                            for _ in reply.iter_bytes():
                                if stop.is_set():
                                    return
                    except httpx.HTTPError:
                        time.sleep(0.1)

        threads = [threading.Thread(target=run) for _ in range(streams)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def write_pair(folder: Path, life: float, age: float) -> None:
    """`pair.pem`: a certificate with `life` seconds, `age` of which are over, and its key."""
    pem = CertificateAuthority(folder / "authority", 90).issue(
        "gateway", ["127.0.0.1"], usage=ExtendedKeyUsageOID.SERVER_AUTH, lifetime=life, now=time.time() - age
    )
    made = folder / "pair.new"
    made.write_bytes(pem)
    made.replace(folder / "pair.pem")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("scene")
    model = folder / "model.gguf"
    tiny.write_gguf(tiny.make("llama"), model, **byte_level_fields(tiny.VOCABULARY))
    faults = folder / "faults"
    faults.write_text("slow-5ms")
    write_pair(folder, life=3600, age=0)
    pair = str(folder / "pair.pem")
    more = {
        "INGLE_REGIONS": json.dumps([{"name": "local-eu"}, {"name": "local-me", "certificate": pair, "key": pair}]),
        "INGLE_REPLICA_COMMAND": json.dumps([sys.executable, str(FAULTY)]),
        "INGLE_FAULTS": str(faults),
        "INGLE_TIMING__MAX_FAILURES": "50",
    }
    with installed(folder / "home", **more) as platform, listening() as listener:
        program = platform.up()
        with platform.admin() as client:
            base = create(client, "chat", str(model), min_replicas=1, engine_args=["--threads", "1"])
        with watching(
            folder / "prometheus", program.facts["admin"], platform.ca_file, listener.url, scale=SCALE
        ) as prometheus:
            yield Scene(folder, platform, faults, listener, prometheus, base, program.facts["key"])


@needs_prometheus
def test_a_slowed_engine_and_one_out_of_memory(scene: Scene) -> None:
    with scene.load(3):
        # half an hour of steady load
        until(
            lambda: scene.prometheus.ask('rate(ingle_tokens_generated_total{replica!=""}[3s] offset 18s) > 0') or None,
            "a past to compare with",
        )
        scene.inject("slow-40ms")
        firing = scene.told("ThroughputDropped", "firing")
        assert firing["labels"]["endpoint"] == "chat"
        assert firing["labels"]["region"] == "local-eu"
        assert firing["labels"]["severity"] == "warning"
        assert firing["annotations"]["summary"].startswith("chat in local-eu makes ")
        assert Path(firing["annotations"]["runbook"]).exists()
        scene.inject("slow-5ms")
        scene.told("ThroughputDropped", "resolved")
        scene.inject("slow-5ms", "oom-1")
        scene.told("OutOfMemory", "firing")
        scene.told("OutOfMemory", "resolved")


@needs_prometheus
def test_replicas_that_are_killed_again_and_again(scene: Scene) -> None:
    for _ in range(4):
        (pid,) = until(lambda: list(replica_pids(scene.platform).values()) or None, "a replica")
        os.kill(pid, signal.SIGKILL)
        with scene.platform.admin() as client:
            until(lambda: client.endpoint("chat").state != "ready", "its loss is seen")
            until(lambda: client.endpoint("chat").state == "ready", "another one serves")
    scene.told("ReplicasFlap", "firing")
    scene.told("ReplicasFlap", "resolved")


@needs_prometheus
def test_a_certificate_that_nobody_renews(scene: Scene) -> None:
    write_pair(scene.folder, life=3600, age=3000)
    firing = scene.told("CertificateEnds", "firing")
    assert firing["labels"]["name"] == "gateway-local-me"
    assert firing["labels"]["severity"] == "critical"
    write_pair(scene.folder, life=3600, age=0)
    scene.told("CertificateEnds", "resolved")


@needs_prometheus
def test_what_is_well_is_silent(scene: Scene) -> None:
    told = {item["labels"]["alertname"] for _, _, body in scene.listener.posts for item in body["alerts"]}
    assert told <= {"ThroughputDropped", "OutOfMemory", "ReplicasFlap", "CertificateEnds", "RequestsFail"}
    assert scene.key not in (scene.folder / "prometheus" / "log").read_text()
