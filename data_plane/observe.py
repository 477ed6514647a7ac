"""Metrics and spans of a replica: one set of OpenTelemetry instruments, read as Prometheus text and sent as OTLP.

Names and boundaries follow the GenAI semantic conventions (v0.1.0). No prompt, reply or secret goes in.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from opentelemetry import metrics, propagate, trace
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from prometheus_client import CollectorRegistry, generate_latest

from data_plane.engine.messages import Progress
from data_plane.memory import bandwidth, memory_used
from data_plane.otlp import check_protocols, metric_exporter, span_exporter
from data_plane.vllm_names import Finished, VllmNames

DURATION_BOUNDS = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
FIRST_TOKEN_BOUNDS = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
PER_TOKEN_BOUNDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
_SHUTDOWN_S = 2.0
_MOST_OOMS = 64
STEP_BOUNDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0]


@dataclass(frozen=True)
class RequestTimes:
    """CLOCK_MONOTONIC seconds; 0 where it did not happen."""

    received: float
    scheduled: float
    first_token: float
    finished: float
    chunks: Sequence[tuple[float, int]] = ()
    """When parts of the prompt ran, and of how many tokens."""
    preempted: Sequence[float] = ()
    """When it went on after it had given way to others."""


class Telemetry:
    """The replica's instruments. `read_progress` gives the engine's last word; `names` may be `vllm`: those too."""

    def __init__(
        self, model: str, read_progress: Callable[[], Progress | None], num_blocks: int = 1, names: str = "ingle"
    ) -> None:
        self._registry = CollectorRegistry()
        resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME", "ingle-replica"),
                "service.instance.id": os.environ.get("INGLE_REPLICA", str(os.getpid())),
                "ingle.endpoint": os.environ.get("INGLE_ENDPOINT", model),
                "ingle.region": os.environ.get("INGLE_REGION", ""),
            }
        )
        self._labels = {"gen_ai.request.model": model, "gen_ai.provider.name": "ingle", **_place()}
        self._heard_at = time.monotonic()
        self._moved = 0
        self._out_of_memory = 0
        self._ooms: deque[tuple[float, dict[str, int]]] = deque(maxlen=_MOST_OOMS)
        """When steps ran out of memory, and how much of it was in use then."""
        self._read_progress = read_progress
        self._num_blocks = max(num_blocks, 1)
        exports = bool(os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"))
        if exports:
            check_protocols()
        self._meters = MeterProvider(_readers(self._registry, exports), resource, shutdown_on_exit=False)
        self._tracers = _tracer_provider(resource) if exports else None
        self._tracer = (self._tracers or trace.NoOpTracerProvider()).get_tracer("ingle.replica")
        self._make(self._meters.get_meter("ingle.replica"))
        self._vllm = VllmNames(self._registry, model, read_progress, num_blocks) if names == "vllm" else None

    def size(self, num_blocks: int) -> None:
        """Tell how large the KV cache is, once that is known."""
        self._num_blocks = max(num_blocks, 1)
        if self._vllm is not None:
            self._vllm.num_blocks = num_blocks

    def _make(self, meter: metrics.Meter) -> None:
        def seconds(name: str, bounds: list[float], about: str) -> metrics.Histogram:
            return meter.create_histogram(name, "s", about, explicit_bucket_boundaries_advisory=bounds)

        self._duration = seconds("gen_ai.server.request.duration", DURATION_BOUNDS, "Request, arrival to last token")
        self._first_token = seconds("gen_ai.server.time_to_first_token", FIRST_TOKEN_BOUNDS, "Arrival to first token")
        self._per_token = seconds("gen_ai.server.time_per_output_token", PER_TOKEN_BOUNDS, "Mean time between tokens")
        self._step = seconds("ingle.engine.step.duration", STEP_BOUNDS, "One engine step")
        self._errors = meter.create_counter("ingle.requests.errors", description="Requests refused or failed, by kind")
        self._cancelled = meter.create_counter("ingle.requests.cancelled", description="Requests whose client left")

        def gauge(name: str, about: str, read: Callable[[Progress], float]) -> None:
            meter.create_observable_gauge(name, [self._observe(read)], description=about)

        def counter(name: str, about: str, read: Callable[[Progress], float]) -> None:
            meter.create_observable_counter(name, [self._observe(read)], description=about)

        gauge("ingle.requests.running", "Sequences in the batch", lambda p: p.running)
        gauge("ingle.requests.waiting", "Sequences in the queue", lambda p: p.waiting)
        gauge("ingle.kv.usage", "Share of KV blocks in use", lambda p: p.blocks_used / self._num_blocks)
        gauge("ingle.kv.cached_blocks", "KV blocks findable by prefix", lambda p: p.blocks_cached)
        gauge("ingle.engine.batch_tokens", "Tokens in the last step", lambda p: p.batch_tokens)
        gauge("ingle.prefix.hit_ratio", "Cached share of prompt tokens, since start",
              lambda p: p.counters.cached_tokens / max(p.counters.prefix_queries, 1))  # fmt: skip
        meter.create_observable_gauge(
            "ingle.engine.silent",
            [lambda options: [Observation(time.monotonic() - self._heard_at, self._labels)]],
            "s",
            "Since the engine's loop last turned",
        )
        gauge("ingle.engine.bandwidth_utilization", "Bytes that the last step had to move, over what memory can move",
              lambda p: p.bytes_moved / p.step_s / bandwidth() if p.step_s > 0 else 0.0)  # fmt: skip
        meter.create_observable_counter(
            "ingle.engine.moved",
            [lambda options: [Observation(self._moved, self._labels)]],
            "By",
            "Bytes that steps had to read and write: weights once, keys and values once",
        )
        meter.create_observable_gauge(
            "ingle.memory.used",
            [
                lambda options: [
                    Observation(used, {**self._labels, "kind": kind}) for kind, used in memory_used().items()
                ]
            ],
            "By",
            "Memory in use: of this replica's processes (resident) and of the accelerator, whoever uses it",
        )
        counter("ingle.tokens.prompt", "Prompt tokens computed", lambda p: p.counters.prompt_tokens)
        counter("ingle.tokens.generated", "Tokens generated", lambda p: p.counters.generated_tokens)
        counter("ingle.tokens.cached", "Prompt tokens found in the cache", lambda p: p.counters.cached_tokens)
        counter("ingle.engine.preemptions", "Sequences that gave way", lambda p: p.counters.preemptions)
        counter("ingle.engine.steps", "Steps", lambda p: p.counters.steps)
        counter("ingle.engine.step_errors", "Steps that failed", lambda p: p.counters.step_errors)
        counter("ingle.engine.out_of_memory", "Steps that ran out of memory", lambda p: p.counters.out_of_memory)

    def _observe(self, read: Callable[[Progress], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            progress = self._read_progress()
            return [] if progress is None else [Observation(read(progress), self._labels)]

        return observe

    def stepped(self, progress: Progress) -> None:
        self._heard_at = time.monotonic()
        self._moved += progress.bytes_moved
        if progress.counters.out_of_memory > self._out_of_memory:
            self._out_of_memory = progress.counters.out_of_memory
            figures = {f"ingle.memory.{kind}_bytes": used for kind, used in memory_used().items()}
            figures |= {"ingle.kv.blocks_used": progress.blocks_used, "ingle.kv.blocks": self._num_blocks}
            self._ooms.append((self._heard_at, figures))
        if progress.step_s > 0:
            self._step.record(progress.step_s, self._labels)

    def start_span(self, operation: str, model: str, headers: Mapping[str, str]) -> Span:
        """The request's span, a child of the gateway's. The caller ends it with `finish`."""
        # header names have no case, and many clients write them with capitals
        parent = propagate.extract({name.lower(): value for name, value in headers.items()})
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "ingle",
            "gen_ai.request.model": model,
        }
        return self._tracer.start_span(f"{operation} {model}", parent, SpanKind.SERVER, attributes)

    def finish(
        self, span: Span, operation: str, times: RequestTimes, prompt_tokens: int, completion_tokens: int, error: str
    ) -> None:
        """Record a request's end: histograms, and the span with its events. `error` is a kind, or empty."""
        labels = {**self._labels, "gen_ai.operation.name": operation, **({"error.type": error} if error else {})}
        self._duration.record(times.finished - times.received, labels)
        if times.first_token:
            self._first_token.record(times.first_token - times.received, labels)
            if completion_tokens > 1:
                self._per_token.record((times.finished - times.first_token) / (completion_tokens - 1), labels)
        if self._vllm is not None and not error:
            self._vllm.finished(_finished(times, prompt_tokens, completion_tokens))
        if error == "cancelled":
            self._cancelled.add(1, self._labels)
        elif error:
            self._errors.add(1, {**self._labels, "error.type": error})
        if span.is_recording():
            ooms = [(at, figures) for at, figures in self._ooms if times.received <= at <= times.finished]
            _describe(span, times, prompt_tokens, completion_tokens, error, ooms)
        span.end()

    def refused(self, kind: str) -> None:
        """Count a request that was refused before it had a span."""
        self._errors.add(1, {**self._labels, "error.type": kind})

    def prometheus(self) -> bytes:
        return generate_latest(self._registry)

    def shutdown(self) -> None:
        """Send what is left, for a few seconds at most: a collector that is gone holds up nobody's exit."""
        sending = threading.Thread(target=self._send_the_rest, daemon=True)
        sending.start()
        sending.join(_SHUTDOWN_S)

    def _send_the_rest(self) -> None:
        if self._tracers is not None:
            self._tracers.shutdown()
        self._meters.shutdown(timeout_millis=_SHUTDOWN_S * 1000)


def _finished(times: RequestTimes, prompt_tokens: int, completion_tokens: int) -> Finished:
    total = times.finished - times.received
    if not times.first_token:
        return Finished(total, None, None, None, None, prompt_tokens, completion_tokens)
    return Finished(
        total,
        first_token=times.first_token - times.received,
        queued=times.scheduled - times.received,
        prefill=times.first_token - times.scheduled,
        decode=times.finished - times.first_token,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )


def _place() -> dict[str, str]:
    """Where in an installation this replica is: labels that tell its series from a gateway's."""
    known = {"replica": "INGLE_REPLICA", "endpoint": "INGLE_ENDPOINT", "region": "INGLE_REGION"}
    return {label: os.environ[name] for label, name in known.items() if os.environ.get(name)}


def _describe(
    span: Span,
    times: RequestTimes,
    prompt_tokens: int,
    completion_tokens: int,
    error: str,
    ooms: Sequence[tuple[float, Mapping[str, int]]],
) -> None:
    to_wall = time.time() - time.monotonic()
    for name, at in (("scheduled", times.scheduled), ("first_token", times.first_token), ("finish", times.finished)):
        if at:
            span.add_event(name, timestamp=int((at + to_wall) * 1e9))
    for at, tokens in times.chunks:
        span.add_event("prefill_chunk", {"ingle.tokens": tokens}, int((at + to_wall) * 1e9))
    for at in times.preempted:
        span.add_event("preempted", timestamp=int((at + to_wall) * 1e9))
    for at, figures in ooms:
        span.add_event("out_of_memory", dict(figures), int((at + to_wall) * 1e9))
    span.add_event("queued", timestamp=int((times.received + to_wall) * 1e9))
    span.set_attribute("gen_ai.usage.input_tokens", prompt_tokens)
    span.set_attribute("gen_ai.usage.output_tokens", completion_tokens)
    span.set_attribute("gen_ai.latency.e2e", times.finished - times.received)
    if times.first_token:
        span.set_attribute("gen_ai.latency.time_in_queue", times.scheduled - times.received)
        span.set_attribute("gen_ai.latency.time_to_first_token", times.first_token - times.received)
        span.set_attribute("gen_ai.latency.time_in_model_prefill", times.first_token - times.scheduled)
        span.set_attribute("gen_ai.latency.time_in_model_decode", times.finished - times.first_token)
    if error:
        span.set_attribute("error.type", error)
        span.set_status(Status(StatusCode.ERROR))


def _readers(registry: CollectorRegistry, exports: bool) -> list[MetricReader]:
    readers: list[MetricReader] = [
        PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=registry)
    ]
    if exports:
        readers.append(PeriodicExportingMetricReader(metric_exporter()))
    return readers


def _tracer_provider(resource: Resource) -> TracerProvider:
    # which share is sampled is said by OTEL_TRACES_SAMPLER, which the SDK reads
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(span_exporter()))
    return provider
