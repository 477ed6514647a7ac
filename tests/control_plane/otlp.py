"""A collector that takes OTLP over HTTP and over gRPC, and keeps the spans."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.control_plane.harness import serving


@dataclass
class Collector:
    http: str = ""
    grpc: str = ""
    spans: list[Span] = field(default_factory=list)
    metrics: set[str] = field(default_factory=set)
    regions: set[str] = field(default_factory=set)
    """That something came of."""
    headers: list[dict[str, str]] = field(default_factory=list)

    def nth(self, name: str, index: int = 0) -> Span | None:
        """The span of that name that came after `index` others, once it is here."""
        found = [span for span in list(self.spans) if span.name == name]
        return found[index] if len(found) > index else None

    def take_spans(self, request: Any) -> None:
        for resource in request.resource_spans:
            self._note(resource)
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def _note(self, item: Any) -> None:
        self.regions.add(str(attributes(item.resource).get("ingle.region", "")))

    def take_metrics(self, request: Any) -> None:
        for resource in request.resource_metrics:
            self._note(resource)
            for scope in resource.scope_metrics:
                self.metrics |= {metric.name for metric in scope.metrics}


def attributes(span_or_event: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span_or_event.attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.headers.append(dict(self.headers))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                collector.take_spans(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            else:
                collector.take_metrics(metrics_service_pb2.ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collector.take_spans(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collector.take_metrics(request)
            return metrics_service_pb2.ExportMetricsServiceResponse()

    remote = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), remote)  # type: ignore[no-untyped-call]
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), remote)  # type: ignore[no-untyped-call]
    port = remote.add_insecure_port("127.0.0.1:0")
    remote.start()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.http, collector.grpc = f"http://127.0.0.1:{server.server_port}", f"http://127.0.0.1:{port}"
        try:
            with serving(server):
                yield collector
        finally:
            remote.stop(None)
