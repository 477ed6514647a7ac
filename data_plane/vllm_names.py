"""The replica's metrics under vLLM's names too, for dashboards, gateways and autoscalers that were made for them.

What vLLM counts and we don't (adapters, speculation, transfers) is absent, not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from data_plane.engine.messages import Progress

_LATENCY = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
_COUNTS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))
_LABELS = ("model_name", "engine")


@dataclass(frozen=True)
class Finished:
    """One request that ended. Times in seconds; None where it did not get that far."""

    total: float
    first_token: float | None
    queued: float | None
    prefill: float | None
    decode: float | None
    prompt_tokens: int
    completion_tokens: int


class VllmNames:
    """Registers itself with `registry`; `read` gives the engine's last word."""

    def __init__(
        self, registry: CollectorRegistry, model: str, read: Callable[[], Progress | None], num_blocks: int
    ) -> None:
        self._values = (model, "0")
        self._read = read
        self.num_blocks = num_blocks

        def histogram(name: str, about: str, buckets: tuple[float, ...] = _LATENCY) -> Histogram:
            made = Histogram(f"vllm:{name}", about, _LABELS, buckets=buckets, registry=registry)
            return made.labels(*self._values)

        self._total = histogram("e2e_request_latency_seconds", "Arrival to last token")
        self._first = histogram("time_to_first_token_seconds", "Arrival to first token")
        self._per_token = histogram("time_per_output_token_seconds", "Mean time between a request's tokens")
        self._between = histogram("inter_token_latency_seconds", "Mean time between a request's tokens")
        self._request_per_token = histogram("request_time_per_output_token_seconds", "The same, by request")
        self._queued = histogram("request_queue_time_seconds", "Arrival to first step")
        self._prefill = histogram("request_prefill_time_seconds", "First step to first token")
        self._decode = histogram("request_decode_time_seconds", "First token to last")
        self._inference = histogram("request_inference_time_seconds", "First step to last token")
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt", _COUNTS)
        self._generation = histogram("request_generation_tokens", "Tokens of a reply", _COUNTS)
        registry.register(self)

    def finished(self, request: Finished) -> None:
        self._total.observe(request.total)
        self._prompt.observe(request.prompt_tokens)
        self._generation.observe(request.completion_tokens)
        for histogram, value in (
            (self._first, request.first_token),
            (self._queued, request.queued),
            (self._prefill, request.prefill),
            (self._decode, request.decode),
        ):
            if value is not None:
                histogram.observe(value)
        if request.prefill is not None and request.decode is not None:
            self._inference.observe(request.prefill + request.decode)
        if request.decode is not None and request.completion_tokens > 1:
            for histogram in (self._per_token, self._between, self._request_per_token):
                histogram.observe(request.decode / (request.completion_tokens - 1))

    def collect(self) -> Iterable[Metric]:
        progress = self._read()
        if progress is None:
            return
        counters = progress.counters
        usage = progress.blocks_used / max(self.num_blocks, 1)
        for name, about, value in (
            ("num_requests_running", "Sequences in the batch", progress.running),
            ("num_requests_waiting", "Sequences in the queue", progress.waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use", usage),
            ("gpu_cache_usage_perc", "The same, by its older name", usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", about, labels=_LABELS)
            gauge.add_metric(self._values, value)
            yield gauge
        for name, about, value in (
            # vLLM's count has the cached ones among them
            ("prompt_tokens", "Tokens of prompts", counters.prompt_tokens + counters.cached_tokens),
            ("generation_tokens", "Tokens generated", counters.generated_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the cache", counters.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the cache", counters.cached_tokens),
            ("num_preemptions", "Sequences that gave way", counters.preemptions),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", about, labels=_LABELS)
            counter.add_metric(self._values, value)
            yield counter
        info = GaugeMetricFamily("vllm:cache_config_info", "Of the KV cache", labels=(*_LABELS, "num_gpu_blocks"))
        info.add_metric((*self._values, str(self.num_blocks)), 1.0)
        yield info
