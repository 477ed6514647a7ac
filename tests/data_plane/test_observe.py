"""Metrics that agree with what was sent, and a trace that reaches a real collector."""

from __future__ import annotations

import gzip
import http.server
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.data_plane import tiny
from tests.data_plane.replica import PATIENCE, Replica, eventually, running
from tests.data_plane.text.tokenizers_made import byte_level_fields

CHAT = "/v1/chat/completions"
CANARY = "CANARY-2b7c"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    tiny.write_gguf(tiny.make("llama"), path, **byte_level_fields(tiny.VOCABULARY))
    return path


@pytest.fixture(scope="module")
def replica(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with running(model, tmp_path_factory.mktemp("metrics") / "log", "--name", "tiny") as replica:
        yield replica


def test_metrics_count_what_was_sent(replica: Replica) -> None:
    prompt = [*range(40, 80)]
    for _ in range(2):
        replica.complete(prompt, max_tokens=10, ignore_eos=True)
    replica.chat(CANARY, max_tokens=5, n=2, ignore_eos=True)
    chat = replica.chat(CANARY, max_tokens=5, ignore_eos=True)["usage"]
    assert replica.post(CHAT, {"messages": []}).status_code == 400
    assert replica.post(CHAT, {"messages": [], "model": "other"}).status_code == 404
    eventually(replica.idle)
    found = replica.metrics()
    cached = 39 // 16 * 16 + 2 * ((chat["prompt_tokens"] - 1) // 16 * 16)
    asked = 2 * len(prompt) + 3 * chat["prompt_tokens"]
    assert found["ingle_tokens_generated_total"] == 2 * 10 + 3 * 5
    assert found["ingle_tokens_cached_total"] == cached
    assert found["ingle_tokens_prompt_total"] == asked - cached
    assert found["ingle_prefix_hit_ratio"] == pytest.approx(cached / asked)
    for operation in ("chat", "text_completion"):
        of = f'{{gen_ai_operation_name="{operation}"}}'
        for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
            assert found[f"gen_ai_server_{name}_seconds_count{of}"] == 2
            assert found[f"gen_ai_server_{name}_seconds_sum{of}"] > 0
    assert found["ingle_engine_steps_total"] == found["ingle_engine_step_duration_seconds_count"] > 30
    assert found['ingle_requests_errors_total{error_type="invalid_request"}'] == 1
    assert found['ingle_requests_errors_total{error_type="model_not_found"}'] == 1
    for name in ("requests_running", "requests_waiting", "kv_usage", "engine_preemptions_total",
                 "engine_step_errors_total", "engine_out_of_memory_total"):  # fmt: skip
        assert found[f"ingle_{name}"] == 0
    assert found["ingle_kv_cached_blocks"] > 0


def test_gauges_are_true_soon_after_a_crowd_left_without_further_traffic(replica: Replica) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "ignore_eos": True}
    streams = [replica.open_stream(body) for _ in range(40)]
    eventually(lambda: replica.metrics()["ingle_requests_running"] > 20)
    assert replica.metrics()["ingle_kv_usage"] > 0
    for stream in streams:
        stream.close()

    def empty() -> bool:
        found = replica.metrics()
        return not any(found[f"ingle_{name}"] for name in ("requests_running", "requests_waiting", "kv_usage"))

    eventually(empty)
    assert replica.metrics()["ingle_engine_silent_seconds"] < 5


def test_bandwidth_and_memory(replica: Replica) -> None:
    before = replica.metrics()
    replica.chat("x", max_tokens=10, ignore_eos=True)
    eventually(replica.idle)
    found = replica.metrics()
    assert found["ingle_engine_moved_bytes_total"] > before["ingle_engine_moved_bytes_total"]
    assert found["ingle_engine_bandwidth_utilization"] >= 0
    # two processes of Python
    assert found['ingle_memory_used_bytes{kind="resident"}'] > 20e6


VLLM = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc",
    "prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
    "num_preemptions_total", "time_to_first_token_seconds_bucket", "e2e_request_latency_seconds_bucket",
    "inter_token_latency_seconds_bucket", "time_per_output_token_seconds_bucket", "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum", "request_inference_time_seconds_sum",
    "request_prompt_tokens_bucket", "request_generation_tokens_bucket", "cache_config_info",
)  # fmt: skip


def test_vllms_names_say_the_same(model: Path, tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    where = {"INGLE_REPLICA": "rep-1", "INGLE_REGION": "eu", "INGLE_ENDPOINT": "chat"}
    with running(model, tmp_path / "log", "--name", "tiny", "--metrics-names", "vllm", **where) as replica:
        usage = replica.chat("hello", max_tokens=6, ignore_eos=True)["usage"]
        replica.chat("hello", max_tokens=6, ignore_eos=True)
        eventually(replica.idle)
        families = list(text_string_to_metric_families(replica.client.get("/metrics").text))
    samples = {(sample.name, sample.labels.get("le", "")): sample for family in families for sample in family.samples}
    names = {name for name, _ in samples}
    assert {f"vllm:{name}" for name in VLLM} <= names
    found = {name.removeprefix("vllm:"): sample.value for (name, le), sample in samples.items() if not le}
    assert found["generation_tokens_total"] == found["ingle_tokens_generated_total"] == 12
    assert found["prompt_tokens_total"] == found["prefix_cache_queries_total"] == 2 * usage["prompt_tokens"]
    assert found["prefix_cache_hits_total"] == found["ingle_tokens_cached_total"]
    assert found["e2e_request_latency_seconds_count"] == found["request_generation_tokens_count"] == 2
    assert samples["vllm:num_requests_running", ""].labels == {"model_name": "tiny", "engine": "0"}
    own = samples["ingle_tokens_generated_total", ""].labels
    assert (own["replica"], own["region"], own["endpoint"]) == ("rep-1", "eu", "chat")


def test_gauges_show_a_stream_while_it_runs(replica: Replica) -> None:
    with replica.open_stream({"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "ignore_eos": True}):
        eventually(lambda: replica.metrics()["ingle_requests_running"] == 1)
        assert replica.metrics()["ingle_kv_usage"] > 0
    eventually(lambda: replica.metrics()["ingle_requests_running"] == 0)


def test_the_text_is_what_prometheus_reads(replica: Replica) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    response = replica.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert families["gen_ai_server_time_to_first_token_seconds"].type == "histogram"
    assert all(family.documentation for family in families.values())
    assert CANARY not in response.text


class Collector(http.server.BaseHTTPRequestHandler):
    """OTLP over HTTP, as a collector takes it."""

    spans: queue.Queue[Span]
    resources: list[KeyValue]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path == "/v1/traces":
            for batch in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.extend(batch.resource.attributes)
                for scope in batch.scope_spans:
                    for span in scope.spans:
                        self.spans.put(span)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(ExportTraceServiceResponse().SerializeToString())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[http.server.ThreadingHTTPServer]:
    Collector.spans, Collector.resources = queue.Queue(), []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def attributes(pairs: object) -> dict[str, object]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}  # type: ignore[attr-defined]


def test_a_request_is_one_span_under_its_gateways(
    collector: http.server.ThreadingHTTPServer, model: Path, tmp_path: Path
) -> None:
    endpoint = f"http://127.0.0.1:{collector.server_address[1]}"
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100", "INGLE_REPLICA": "replica-7",
        "INGLE_REGION": "local-eu", "INGLE_ENDPOINT": "chatty",
    }  # fmt: skip
    with running(model, tmp_path / "log", "--name", "tiny", **environment) as replica:
        body = {
            "messages": [{"role": "user", "content": CANARY}],
            "max_tokens": 6,
            "temperature": 0,
            "ignore_eos": True,
        }
        usage = replica.chat(CANARY, max_tokens=6, ignore_eos=True)["usage"]
        Collector.spans.get(timeout=PATIENCE)
        with replica.open_stream(body, f"TraceParent: 00-{TRACE}-{PARENT}-01") as connection:
            eventually(lambda: b"[DONE]" in connection.recv(1 << 16))
        span = Collector.spans.get(timeout=PATIENCE)
        gone = replica.open_stream({**body, "max_tokens": 200})
        assert gone.recv(1)
        gone.close()
        cut = Collector.spans.get(timeout=PATIENCE)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert (span.name, span.kind) == ("chat tiny", Span.SPAN_KIND_SERVER)
    named = {event.name for event in span.events}
    assert named == {"queued", "scheduled", "prefill_chunk", "first_token", "finish"}
    times = {event.name: event.time_unix_nano for event in span.events}
    assert times["queued"] <= times["scheduled"] <= times["first_token"] <= times["finish"]
    assert span.start_time_unix_nano - 10**9 < times["queued"] <= times["finish"] < span.end_time_unix_nano + 10**9
    found = attributes(span.attributes)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == "tiny"
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == 6
    latencies = ("time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode", "e2e")
    assert all(float(str(found[f"gen_ai.latency.{name}"])) >= 0 for name in latencies)
    assert "error.type" not in found
    assert attributes(cut.attributes)["error.type"] == "cancelled"
    assert cut.trace_id.hex() != TRACE
    resource = attributes(Collector.resources)
    assert (resource["service.instance.id"], resource["ingle.region"], resource["ingle.endpoint"]) == (
        "replica-7", "local-eu", "chatty",
    )  # fmt: skip
    assert CANARY not in str(span) + str(cut) + (tmp_path / "log").read_text()


def test_giving_way_is_an_event(collector: http.server.ThreadingHTTPServer, model: Path, tmp_path: Path) -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_address[1]}",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    with running(model, tmp_path / "log", "--name", "tiny", "--kv-cache-tokens", "288", **environment) as replica:
        body = {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 150, "ignore_eos": True}
        streams = [replica.open_stream(body) for _ in range(4)]
        spans = [Collector.spans.get(timeout=PATIENCE) for _ in streams]
        preempted = replica.metrics()["ingle_engine_preemptions_total"]
        for stream in streams:
            stream.close()
    events = [event for span in spans for event in span.events if event.name == "preempted"]
    assert preempted > 0
    assert 0 < len(events) <= preempted
    for span in spans:
        assert attributes(span.attributes)["gen_ai.usage.output_tokens"] == 150


def test_a_collector_that_is_gone_harms_nobody(model: Path, tmp_path: Path) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    with running(model, tmp_path / "log", "--name", "tiny", **environment) as replica:
        for _ in range(3):
            replica.chat("x", max_tokens=2)
        assert replica.client.get("/health").status_code == 200
    assert replica.process.returncode == 0
    assert all("event" in event for event in replica.logged())
