"""Names of metrics and attributes, and the metrics of this process. Histograms are in seconds."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# The conventions' boundaries, with more below 10 ms.
DURATION_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
COLD_START_BUCKETS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 900.0)

request_duration = Histogram(
    "gen_ai_server_request_duration_seconds",
    "Time from a request's arrival at the gateway to the end of its reply",
    ("region", "endpoint"),
    buckets=DURATION_BUCKETS,
)
time_to_first_token = Histogram(
    "gen_ai_server_time_to_first_token_seconds",
    "Time from a request's arrival at the gateway to the first byte of its streamed reply",
    ("region", "endpoint"),
    buckets=DURATION_BUCKETS,
)
requests = Counter("ingle_requests", "Requests answered", ("region", "endpoint", "status", "outcome"))
refusals = Counter("ingle_errors", "Requests that the gateway refused or failed, by code", ("region", "code"))
failed = Counter(
    "ingle_requests_failed",
    "Requests that ended in a 5xx, or whose replica was lost in mid-stream",
    ("region", "endpoint"),
)
running = Gauge("ingle_requests_running", "Requests being proxied", ("region", "endpoint"))
held = Gauge("ingle_requests_held", "Requests held while a replica starts", ("region", "endpoint"))
tokens = Counter("ingle_tokens", "Tokens metered", ("region", "endpoint", "kind"))
retries = Counter("ingle_upstream_retries", "Requests sent again to another replica", ("region",))
snapshot_age = Gauge("ingle_snapshot_age_seconds", "Age of the store's last word to the gateway", ("region",))
usage_pending = Gauge("ingle_usage_pending", "Usage events not yet in the store", ("region",))
usage_dropped = Counter("ingle_usage_dropped", "Usage events lost because the spool was full", ("region",))
certificate_not_after = Gauge("ingle_certificate_not_after_seconds", "When a served certificate ends", ("name",))
certificate_not_before = Gauge("ingle_certificate_not_before_seconds", "When a served certificate began", ("name",))
certificate_faults = Counter("ingle_certificate_faults", "Certificate files that couldn't be loaded", ("name",))
certificate_broken = Gauge("ingle_certificate_broken", "1 while a newer certificate can't be served", ("name",))
connections_refused = Counter("ingle_connections_refused", "Connections beyond the bound", ("region",))
deleted = Counter("ingle_records_deleted", "Records deleted because their retention was over", ("kind",))
replicas_desired = Gauge("ingle_replicas_desired", "Replicas wanted", ("region", "endpoint"))
replicas_ready = Gauge("ingle_replicas_ready", "Replicas ready", ("region", "endpoint"))
cold_start = Histogram(
    "ingle_cold_start_seconds",
    "Time from intent to ready (phase total), and the parts of it that the replica tells",
    ("region", "endpoint", "phase"),
    buckets=COLD_START_BUCKETS,
)
start_failures = Counter("ingle_start_failures", "Replicas that never became ready", ("region", "endpoint"))
replica_losses = Counter("ingle_replica_losses", "Replicas that served and were lost", ("region", "endpoint"))
endpoint_failed = Gauge("ingle_endpoint_failed", "1 while an endpoint is given up on", ("region", "endpoint"))
orphans = Counter("ingle_orphans", "Replicas found running that nobody wanted", ("region",))
quota_refusals = Counter("ingle_quota_refusals", "Replicas refused: the cloud account's quota is used up", ("region",))
cost_per_second = Gauge("ingle_cost_per_second", "What an endpoint's replicas cost a second", ("region", "endpoint"))
keys_expiring = Gauge("ingle_keys_expiring", "Keys used lately that expire within a week and have no successor")
spend_used = Gauge(
    "ingle_spend_used_ratio", "Share of what an endpoint's replicas may cost this month", ("region", "endpoint")
)
drift = Gauge(
    "ingle_drift", "Replicas that only a provider or only our records know of, by the former's region", ("region",)
)
budget_used = Gauge("ingle_budget_used_ratio", "Share of this month's budget that a tenant has used", ("tenant",))
audit_faults = Gauge("ingle_audit_faults", "Faults found in the audit chain")
alerts_firing = Gauge("ingle_alerts_firing", "Alerts of the controller's own evaluator", ("alert", "severity"))

PHASES = frozenset({"total", "start", "import", "open", "load", "restore", "text", "first_step"})
"""Names that a cold start's parts have in metrics; whatever else a replica calls a part is `other`."""

_OF_ENDPOINTS: tuple[Any, ...] = (
    request_duration, time_to_first_token, requests, failed, running, held, tokens, replicas_desired, replicas_ready,
    cold_start, start_failures, replica_losses, endpoint_failed, cost_per_second, spend_used,
)  # fmt: skip


def expect(region: str, endpoint: str) -> None:
    """Let a gateway's counters of an endpoint begin at 0, so that the first failure is seen as one."""
    for metric in (failed, running, held):
        metric.labels(region, endpoint)
    for kind in ("prompt", "completion", "cached", "wasted"):
        tokens.labels(region, endpoint, kind)


def forget(region: str, endpoint: str) -> None:
    """Drop all series of an endpoint that is gone: labels are bounded by the endpoints that there are."""
    for metric in _OF_ENDPOINTS:
        metric.remove_by_labels({"region": region, "endpoint": endpoint})


def exposition(accept: str = "") -> tuple[bytes, str]:
    """All metrics of this process, and the type of that text: OpenMetrics, which has exemplars, where it is wanted."""
    if "application/openmetrics-text" in accept:
        text: bytes = openmetrics.generate_latest(REGISTRY)  # type: ignore[no-untyped-call]
        return text, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(REGISTRY), CONTENT_TYPE
