from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from control_plane.observe.logs import event, iso, set_up_logs
from tests.control_plane.harness import Installation, chat, create


class Collector:
    """An OTLP collector that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_request_is_one_trace_from_the_client_through_the_gateway_to_the_replica(
    fresh: Installation, collector: Collector
) -> None:
    fresh.more = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    program = fresh.up()
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with fresh.admin() as client:
        url = create(client, "chat", idle_timeout=600)
        with fresh.tenant(url, program.facts["key"]) as tenant:
            headers = {"traceparent": f"00-{trace}-{parent}-01"}
            good = tenant.post("/chat/completions", json=chat("CANARY"), headers=headers)
            assert good.status_code == 200
            assert tenant.post("/nonsense", json={}).status_code == 404
        address = client.endpoint("chat").replicas[0].address
    (seen,) = httpx.get(f"http://{address}/requests").json()
    program.stop()
    spans = {span.name: span for span in collector.spans}
    span = next(span for span in collector.spans if span.trace_id.hex() == trace)
    assert span.kind == Span.SPAN_KIND_SERVER
    assert span.parent_span_id.hex() == parent
    assert seen["traceparent"] == f"00-{trace}-{span.span_id.hex()}-01"
    attributes = {item.key: item.value for item in span.attributes}
    assert attributes["http.response.status_code"].int_value == 200
    assert attributes["ingle.request_id"].string_value == good.headers["x-request-id"]
    assert attributes["ingle.endpoint"].string_value == "chat"
    assert len([span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]) == 2
    assert any(item.key == "error.type" for one in spans.values() for item in one.attributes)
    assert "CANARY" not in str(collector.spans)
    assert program.facts["key"] not in str(collector.spans)


def test_logs_are_json_lines_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    root, ours = logging.getLogger(), logging.getLogger("ingle")
    before = root.handlers[:], root.level, ours.level
    try:
        set_up_logs("info")
        event("happened", url="postgresql://u:pa55w@h/d", nested={"a": ["Bearer abcdefghi", 3]}, none=None)
        event("hidden", level=logging.DEBUG)
        try:
            raise ValueError("sk-CANARY-123456")
        except ValueError as error:
            event("broke", level=logging.ERROR, error=error)
        logging.getLogger("library").warning("said %s", "something")
    finally:
        root.handlers[:], root.level, _ = before
        ours.setLevel(before[2])
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["happened", "broke", "said something"]
    assert lines[0]["nested"] == {"a": ["[redacted]", 3]}
    assert "pa55w" not in json.dumps(lines)
    assert "CANARY" not in json.dumps(lines)
    assert "ValueError" in lines[1]["trace"]
    assert lines[2]["logger"] == "library"


def test_times_are_iso_to_the_millisecond() -> None:
    assert iso(0.0) == "1970-01-01T00:00:00.000Z"
    assert iso(1796062245.118) == "2026-11-30T18:10:45.118Z"
    assert iso(1.9999) == "1970-01-01T00:00:01.999Z"
