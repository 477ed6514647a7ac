"""Exporters by OpenTelemetry's own variables: `OTEL_EXPORTER_OTLP_PROTOCOL` is `http/protobuf` (default) or `grpc`."""

from __future__ import annotations

import os

from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.trace.export import SpanExporter

from data_plane.errors import InvalidArgument

_GENERAL = "OTEL_EXPORTER_OTLP_PROTOCOL"


def check_protocols() -> None:
    """Raises InvalidArgument where a protocol is asked for that isn't known or isn't installed."""
    for signal in ("TRACES", "METRICS"):
        name = f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL"
        protocol = _protocol(signal)
        if protocol not in ("grpc", "http/protobuf"):
            raise InvalidArgument(f"{name} or {_GENERAL} must be grpc or http/protobuf, not {protocol!r}")
        if protocol == "grpc":
            try:
                import opentelemetry.exporter.otlp.proto.grpc  # noqa: F401
            except ImportError:
                raise InvalidArgument(f"{_GENERAL}=grpc needs: pip install 'ingle[grpc]'") from None


def span_exporter() -> SpanExporter:
    if _protocol("TRACES") == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def metric_exporter() -> MetricExporter:
    if _protocol("METRICS") == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as Grpc

        return Grpc()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()


def _protocol(signal: str) -> str:
    general = os.environ.get(_GENERAL) or "http/protobuf"
    return os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or general
