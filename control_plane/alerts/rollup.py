"""From samples to the history of endpoints. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from control_plane.alerts.expressions import Points, Samples
from control_plane.domain import HistoryPoint

FIRST = "gen_ai_server_time_to_first_token_seconds_bucket"
PER_TOKEN = "gen_ai_server_time_per_output_token_seconds"  # noqa: S105  # a metric
READ = frozenset(
    {
        FIRST, f"{PER_TOKEN}_sum", f"{PER_TOKEN}_count", "ingle_requests_total", "ingle_tokens_generated_total",
        "ingle_tokens_prompt_total", "ingle_tokens_cached_total", "ingle_requests_running", "ingle_requests_held",
        "ingle_kv_usage", "ingle_replicas_ready", "ingle_cost_per_second",
    }
)  # fmt: skip
Place = tuple[str, str]
"""Region and endpoint."""


@dataclass
class _Sums:
    grown: dict[str, float] = field(default_factory=dict)
    means: dict[str, list[float]] = field(default_factory=dict)
    buckets: dict[float, float] = field(default_factory=dict)


_COUNTERS: dict[str, bool] = {
    f"{PER_TOKEN}_sum": True, f"{PER_TOKEN}_count": True, "ingle_tokens_generated_total": True,
    "ingle_tokens_prompt_total": True, "ingle_tokens_cached_total": True, "ingle_requests_total": False,
}  # fmt: skip
"""Whether it is a replica's, or a gateway's."""
_GAUGES: dict[str, bool] = {
    "ingle_requests_running": False, "ingle_requests_held": False, "ingle_kv_usage": True,
    "ingle_replicas_ready": False, "ingle_cost_per_second": False,
}  # fmt: skip


def points(samples: Samples, at: int, step: int) -> dict[Place, HistoryPoint]:
    """How each endpoint was in the `step` seconds from `at` on."""
    places: dict[Place, _Sums] = {}

    def of(name: str, replica: bool) -> Iterable[tuple[_Sums, dict[str, str], Points]]:
        for labels, found in samples.between(name, at, at + step):
            named = dict(labels)
            if "endpoint" in named and "region" in named and ("replica" in named) == replica:
                yield places.setdefault((named["region"], named["endpoint"]), _Sums()), named, found

    for name, replica in _COUNTERS.items():
        for sums, _, found in of(name, replica):
            sums.grown[name] = sums.grown.get(name, 0.0) + _grown(found)
    for name, replica in _GAUGES.items():
        for sums, _, found in of(name, replica):
            sums.means.setdefault(name, []).append(sum(value for _, value in found) / len(found))
    for sums, named, found in of(FIRST, False):
        bound = float(named["le"])
        sums.buckets[bound] = sums.buckets.get(bound, 0.0) + _grown(found)
    return {place: _point(sums, at, step) for place, sums in places.items()}


def _point(sums: _Sums, at: int, step: int) -> HistoryPoint:
    grown, means = sums.grown, sums.means
    prompt, cached = grown.get("ingle_tokens_prompt_total", 0.0), grown.get("ingle_tokens_cached_total", 0.0)
    tokens = grown.get("ingle_tokens_generated_total")
    requests = grown.get("ingle_requests_total")
    cost = _total(means.get("ingle_cost_per_second"))
    kv = means.get("ingle_kv_usage")
    values: dict[str, Any] = {
        "ttft_p50": quantile(sums.buckets, 0.5),
        "ttft_p95": quantile(sums.buckets, 0.95),
        "tpot": _ratio(grown.get(f"{PER_TOKEN}_sum"), grown.get(f"{PER_TOKEN}_count")),
        "tokens_per_s": None if tokens is None else tokens / step,
        "requests_per_s": None if requests is None else requests / step,
        "in_flight": _total(means.get("ingle_requests_running")),
        "held": _total(means.get("ingle_requests_held")),
        "kv_usage": max(kv) if kv else None,
        "hit_ratio": _ratio(cached, prompt + cached),
        "replicas": _total(means.get("ingle_replicas_ready")),
        "cost": None if cost is None else cost * step,
    }
    return HistoryPoint(at, **{name: None if value is None else round(value, 9) for name, value in values.items()})


def quantile(buckets: dict[float, float], share: float) -> float | None:
    """Where `share` of what a cumulative histogram counted lies, on a line within its bucket; None where it is empty.

    What lies beyond the last bound is said to lie at it.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    wanted, low, below = share * total, 0.0, 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= wanted:
            if bound == float("inf"):
                return low
            return low + (bound - low) * ((wanted - below) / (count - below) if count > below else 1.0)
        low, below = bound, count
    return low


def _grown(found: Points) -> float:
    return sum(now - then if now >= then else now for (_, then), (_, now) in pairwise(found))


def _total(values: list[float] | None) -> float | None:
    return sum(values) if values else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
