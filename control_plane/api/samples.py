"""What replicas' metrics say of an endpoint: totals read from Prometheus text, and rates between two readings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families

Key = TypeVar("Key")
TTFT = "gen_ai_server_time_to_first_token_seconds"
TPOT = "gen_ai_server_time_per_output_token_seconds"
_TOTALS = {
    f"{TPOT}_sum": "tpot_sum",
    f"{TPOT}_count": "tpot_count",
    "ingle_tokens_generated_total": "generated",
    "ingle_tokens_prompt_total": "prompt",
    "ingle_tokens_cached_total": "cached",
}
_GAUGES = {"ingle_requests_running": "running", "ingle_requests_waiting": "waiting", "ingle_kv_usage": "kv_usage"}


@dataclass(frozen=True, slots=True)
class Reading:
    """One replica's metrics at one moment. `ttft` counts, by upper bound in seconds, the first tokens up to it."""

    totals: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    ttft: Mapping[float, float] = field(default_factory=dict)


GATEWAY = "gateway"
"""Beside the replicas: what gateways of this process measured."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Between two moments; None where nothing happened that would tell. Times are in seconds."""

    ttft_p50: float | None = None
    ttft_p95: float | None = None
    tpot: float | None = None
    tokens_per_s: float | None = None
    hit_ratio: float | None = None


def read(text: str) -> Reading:
    """Raises ValueError where it isn't Prometheus text."""
    totals: dict[str, float] = {}
    gauges: dict[str, float] = {}
    ttft: dict[float, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if name := _TOTALS.get(sample.name):
                totals[name] = totals.get(name, 0.0) + sample.value
            elif name := _GAUGES.get(sample.name):
                gauges[name] = gauges.get(name, 0.0) + sample.value
            elif sample.name == f"{TTFT}_bucket":
                bound = float(sample.labels["le"])
                ttft[bound] = ttft.get(bound, 0.0) + sample.value
    return Reading(totals, gauges, ttft)


def rates(before: Mapping[str, Reading], after: Mapping[str, Reading], seconds: float) -> Rates:
    """What all replicas did in `seconds` between two looks, by replica id. One that is new began in between.

    First tokens are as `GATEWAY` saw them, holding included, where it saw any; streams through gateways of other
    processes are known from the replicas alone.
    """
    totals: dict[str, float] = {}
    at_gateway: dict[float, float] = {}
    at_replicas: dict[float, float] = {}
    for replica, reading in after.items():
        old = before.get(replica, Reading())
        _add_growth(totals, old.totals, reading.totals)
        _add_growth(at_gateway if replica == GATEWAY else at_replicas, old.ttft, reading.ttft)
    ttft = at_gateway if any(at_gateway.values()) else at_replicas
    asked = totals.get("prompt", 0.0) + totals.get("cached", 0.0)
    tokens, gaps = totals.get("tpot_count", 0.0), totals.get("tpot_sum", 0.0)
    return Rates(
        ttft_p50=quantile(ttft, 0.5),
        ttft_p95=quantile(ttft, 0.95),
        tpot=gaps / tokens if tokens else None,
        tokens_per_s=totals.get("generated", 0.0) / seconds if seconds > 0 else None,
        hit_ratio=totals.get("cached", 0.0) / asked if asked else None,
    )


def quantile(cumulative: Mapping[float, float], share: float) -> float | None:
    """Where `share` of what a histogram counted lies below, as a straight line within its bucket."""
    bounds = sorted(cumulative.items())
    total = bounds[-1][1] if bounds else 0.0
    if total <= 0:
        return None
    wanted = share * total
    for (low, below), (high, upto) in pairwise([(0.0, 0.0), *bounds]):
        if upto >= wanted:
            if high == float("inf"):
                return low
            return low + (high - low) * ((wanted - below) / (upto - below) if upto > below else 0.0)
    return None


def _add_growth(into: dict[Key, float], old: Mapping[Key, float], new: Mapping[Key, float]) -> None:
    for name, value in new.items():
        then = old.get(name, 0.0)
        into[name] = into.get(name, 0.0) + (value - then if value >= then else value)
