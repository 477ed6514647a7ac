"""Traces, exported over OTLP to where each region's may go; free of cost where that is nowhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from control_plane.errors import ConfigError
from control_plane.observe.exports import HEADERS, Export, Why

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

SERVICE_NAME = "service.name"


class Tracing:
    """One per process, for spans of the regions in `exports`; `close` sends what is still buffered.

    Raises ConfigError for a protocol that isn't known or isn't installed.
    """

    def __init__(self, service: str, exports: Mapping[str, Export]) -> None:
        self._providers: dict[str, TracerProvider] = {}
        for region, export in exports.items():
            if export.endpoint is not None:
                self._providers[region] = _provider(service, region, export)

    def server_span(
        self, region: str, name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]
    ) -> ServerSpan:
        """The span of one request, a child of the caller's span if `headers` name one. Must be ended."""
        return ServerSpan(self._providers.get(region), name, headers, attributes)

    def past(
        self, region: str, name: str, start: float, end: float, attributes: Mapping[str, Any], error: str | None
    ) -> None:
        """A trace of its own, of something that is over: a cold start, a rollout. Times are seconds since the epoch."""
        provider = self._providers.get(region)
        if provider is None:
            return
        from opentelemetry.context import Context
        from opentelemetry.trace import Status, StatusCode

        tracer = provider.get_tracer("ingle.controller")
        span = tracer.start_span(name, Context(), attributes=dict(attributes), start_time=int(start * 1e9))
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(int(end * 1e9))

    def close(self) -> None:
        for provider in self._providers.values():
            provider.shutdown()


def _provider(service: str, region: str, export: Export) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service, "ingle.region": region}))
    hidden = HEADERS if export.why is Why.REGION else ()
    kept = {name: os.environ.pop(name) for name in hidden if name in os.environ}  # read when an exporter is made
    try:
        provider.add_span_processor(BatchSpanProcessor(_exporter(export)))
    finally:
        os.environ.update(kept)
    return provider


def _exporter(export: Export) -> SpanExporter:
    endpoint = export.place_of("traces") if export.why is Why.REGION else None
    if export.protocol == "grpc":
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc
        except ImportError:
            raise ConfigError("OTEL_EXPORTER_OTLP_PROTOCOL=grpc needs: pip install 'ingle[grpc]'") from None
        return Grpc(endpoint, timeout=5)
    if export.protocol != "http/protobuf":
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL must be grpc or http/protobuf, not {export.protocol!r}")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint, timeout=5)


class ServerSpan:
    """A SERVER span, or only a carrier of the caller's trace where nothing is exported."""

    __slots__ = ("_context", "_incoming", "_span")

    def __init__(
        self, provider: TracerProvider | None, name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]
    ) -> None:
        self._span = None
        self._incoming = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
        if provider is None:
            return
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(self._incoming)
        tracer = provider.get_tracer("ingle.gateway")
        self._span = tracer.start_span(name, parent, trace.SpanKind.SERVER, dict(attributes))
        self._context = trace.set_span_in_context(self._span)

    def carrier(self) -> dict[str, str]:
        """Headers that make the next hop's span a child of this one."""
        if self._span is None:
            return self._incoming
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, self._context)
        return carrier

    def exemplar(self) -> dict[str, str] | None:
        """What leads from a measurement to this trace, where it is exported."""
        if self._span is None:
            return None
        context = self._span.get_span_context()
        return {"trace_id": f"{context.trace_id:032x}"} if context.trace_flags.sampled else None

    def end(self, attributes: Mapping[str, Any], error: str | None) -> None:
        if self._span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(dict(attributes))
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()
