"""Traces of a whole platform with a real engine, at a real collector over HTTP and over gRPC."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics

from control_plane.client import trust
from control_plane.config import RegionSettings
from control_plane.errors import ConfigError
from control_plane.observe.exports import exports_of
from control_plane.observe.tracing import Tracing
from control_plane.profile import read_profile
from tests.control_plane.harness import Installation, chat, create, ingle, installed, until
from tests.control_plane.otlp import Collector, attributes, collecting
from tests.data_plane import tiny
from tests.data_plane.text.tokenizers_made import byte_level_fields

FAULTY = Path(__file__).parent / "alerts" / "faulty_replica.py"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    tiny.write_gguf(tiny.make("llama"), path, **byte_level_fields(tiny.VOCABULARY))
    return path


def platform(home: Path, endpoint: str, protocol: str, **more: str) -> Any:
    return installed(
        home,
        INGLE_REPLICA_COMMAND=json.dumps([sys.executable, str(FAULTY)]),
        INGLE_FAULTS=str(home.parent / "faults"),
        OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
        OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        OTEL_BSP_SCHEDULE_DELAY="100",
        OTEL_METRIC_EXPORT_INTERVAL="500",
        **more,
    )


def exemplars(installation: Installation) -> set[str]:
    """Traces that the gateway's histograms lead to."""
    admin = read_profile(installation.home / "profile.toml").admin_url
    headers = {"Accept": "application/openmetrics-text"}
    text = httpx.get(f"{admin}/metrics", headers=headers, verify=trust(installation.ca_file), trust_env=False).text
    families = list(open_metrics(text))  # type: ignore[no-untyped-call]
    return {sample.exemplar.labels["trace_id"] for family in families for sample in family.samples if sample.exemplar}


def send(installation: Installation, url: str, key: str, **fields: Any) -> httpx.Response:
    with installation.tenant(url, key) as tenant:
        return tenant.post("/chat/completions", json=chat(max_tokens=6, ignore_eos=True, **fields))


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_requests_starts_and_rollouts_are_traces(
    protocol: str, collector: Collector, model: Path, tmp_path: Path
) -> None:
    endpoint = collector.grpc if protocol == "grpc" else collector.http
    with platform(tmp_path / "home", endpoint, protocol) as installation:
        key = installation.up().facts["key"]
        with installation.admin() as client:
            arguments = ["--max-batched-tokens", "32"]
            url = create(client, "chat", str(model), min_replicas=1, engine_args=arguments)
            assert send(installation, url, key, messages=[{"role": "user", "content": "w " * 80}]).status_code == 200
            start = until(lambda: collector.nth("cold_start chat"), "the start is a trace")
            first = until(lambda: collector.nth("rollout chat"), "what was created stands")
            client.update_endpoint("chat", {"engine_args": [*arguments, "--max-num-seqs", "8"]})
            second = until(lambda: collector.nth("rollout chat", 1), "the change is a trace")
            client.create_endpoint({"name": "broken", "region": "local-eu", "model": "no-such-model"})
            failed = until(lambda: collector.nth("rollout broken"), "so is one that failed")
        replica = until(lambda: collector.nth("chat chat"), "the replica's span")
        gateway = until(lambda: collector.nth("POST /e/"), "the gateway's span")
        assert gateway.trace_id.hex() in exemplars(installation)
        until(lambda: "ingle.tokens.generated" in collector.metrics, "the replica's metrics")
    assert replica.trace_id == gateway.trace_id
    assert replica.parent_span_id == gateway.span_id
    assert len({start.trace_id, first.trace_id, second.trace_id, failed.trace_id, gateway.trace_id}) == 5
    for span in (start, first, second, failed):
        assert not span.parent_span_id
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    facts = attributes(start)
    assert facts["ingle.endpoint"] == "chat"
    assert facts["ingle.cold_start.load_ms"] > 0
    assert facts["ingle.cold_start.load_ms"] * 1e6 < start.end_time_unix_nano - start.start_time_unix_nano
    assert (attributes(first)["ingle.generation.to"], attributes(second)["ingle.generation.to"]) == (1, 2)
    assert attributes(failed)["error.type"] == "model_not_found"
    chunks = [attributes(event)["ingle.tokens"] for event in replica.events if event.name == "prefill_chunk"]
    assert len(chunks) > 1
    assert sum(chunks) == attributes(replica)["gen_ai.usage.input_tokens"]
    times = [event.time_unix_nano for event in replica.events if event.name == "prefill_chunk"]
    assert times == sorted(times)


def test_running_out_of_memory_is_an_event_with_figures(collector: Collector, model: Path, tmp_path: Path) -> None:
    with platform(tmp_path / "home", collector.http, "http/protobuf") as installation:
        key = installation.up().facts["key"]
        with installation.admin() as client:
            url = create(client, "chat", str(model), min_replicas=1)
        (tmp_path / "faults").write_text("oom-1")
        reply = send(installation, url, key)
        span = until(lambda: collector.nth("chat chat"), "the replica's span")
    (event,) = [event for event in span.events if event.name == "out_of_memory"]
    figures = attributes(event)
    assert figures["ingle.memory.resident_bytes"] > 20e6
    assert figures["ingle.kv.blocks"] > figures["ingle.kv.blocks_used"] >= 0
    assert reply.status_code >= 500 or attributes(span)["error.type"] == "engine_error"


def test_what_is_not_sampled_is_not_sent(collector: Collector, model: Path, tmp_path: Path) -> None:
    sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}
    with platform(tmp_path / "home", collector.http, "http/protobuf", **sampler) as installation:
        program = installation.up()
        with installation.admin() as client:
            url = create(client, "chat", str(model), min_replicas=1)
        assert send(installation, url, program.facts["key"]).status_code == 200
        # a caller that samples is followed
        with installation.tenant(url, program.facts["key"]) as tenant:
            trace = "0af7651916cd43dd8448eb211c80319c"
            headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
            assert tenant.post("/chat/completions", json=chat(max_tokens=2), headers=headers).status_code == 200
        until(lambda: collector.nth("chat chat") and collector.nth("POST /e/"), "both spans")
        assert program.stop() == 0
    assert {span.trace_id.hex() for span in collector.spans} == {trace}


def test_a_protocol_that_is_not_known_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "carrier-pigeon"}
    done = ingle(tmp_path / "home", "up", "--gateway", "127.0.0.1:0", "--admin", "127.0.0.1:0", **more)
    assert done.returncode == 2
    assert "OTEL_EXPORTER_OTLP_PROTOCOL must be grpc or http/protobuf" in done.stderr
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError):
        Tracing("x", exports_of([RegionSettings(name="r")], os.environ))
