"""Every alert there is, once. Prometheus rules, the controller's own evaluator and the runbooks are all held to this.

Series of a gateway have no `replica` label, those of a replica have one: the two are never added up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from control_plane.alerts.expressions import (
    ANY,
    NONE,
    Absent,
    Aggregate,
    Expression,
    Match,
    Over,
    Over_,
    SecondsUntil,
    Series,
)

RUNBOOKS = "infra/runbooks"
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0

FIRST_TOKEN_TARGET = 2.56
"""Seconds, a boundary of the histogram: `FIRST_TOKEN_SHARE` of streams begin within it."""
FIRST_TOKEN_SHARE = 0.95
SLOW_START = 60.0
"""Seconds that a cold start may take on average."""

_BY = ("region", "endpoint")
_FIELD = re.compile(r"\{(\w+)\}")
Unit = Literal["ratio", "seconds", "number"]


class Severity(StrEnum):
    CRITICAL = "critical"
    """Tenants feel it, or money or trust is being lost: wake somebody."""
    WARNING = "warning"
    """Look within the working day."""


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires for each set of labels that `expression` has a value for during `lasting` seconds.

    `summary` names labels in braces, and `{value}`.
    """

    name: str
    severity: Severity
    summary: str
    expression: Expression
    lasting: float = 0.0
    unit: Unit = "number"

    @property
    def runbook(self) -> str:
        return f"{RUNBOOKS}/{slug(self.name)}.md"

    def describe(self, labels: Mapping[str, str], value: float) -> str:
        """The summary for one set of labels."""
        words = {**labels, "value": _said(value, self.unit)}
        return _FIELD.sub(lambda match: words.get(match[1], "?"), self.summary)


def slug(name: str) -> str:
    """`KvCacheExhausted` → `kv-cache-exhausted`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def _said(value: float, unit: Unit) -> str:
    if unit == "ratio":
        return f"{value * 100:.0f} %"
    return f"{value:.3g}" + (" s" if unit == "seconds" else "")


def _gateway(name: str, **where: Match) -> Series:
    return Series(name, {"replica": NONE, **where})


def _replica(name: str, before: float = 0.0, **where: Match) -> Series:
    return Series(name, {"replica": ANY, **where}, before)


def _sum(of: Expression, *by: str) -> Expression:
    return Aggregate("sum", of, by or _BY)


def _max(of: Expression, *by: str) -> Expression:
    return Aggregate("max", of, by or _BY)


def _grown(series: Series, seconds: float) -> Expression:
    return _sum(Over("increase", series, seconds))


def _slow_share(seconds: float) -> Expression:
    """The share of streams that began later than they should, over the share that may."""
    total = _grown(_gateway("gen_ai_server_time_to_first_token_seconds_count"), seconds)
    name = "gen_ai_server_time_to_first_token_seconds_bucket"
    good = _grown(_gateway(name, le=Match(f"{FIRST_TOKEN_TARGET:g}")), seconds)
    return (total - good) / total / round(1 - FIRST_TOKEN_SHARE, 6)


def _burning(times: float, long: float, short: float) -> Expression:
    """The budget of slow streams is used `times` as fast as it may be, over a long window and still now."""
    enough = _grown(_gateway("gen_ai_server_time_to_first_token_seconds_count"), long) >= 20
    return (_slow_share(long) > times) & (_slow_share(short) > times) & enough


def _over_replicas(function: Over_, name: str, seconds: float, before: float = 0.0) -> Expression:
    return _sum(Over(function, _replica(name, before), seconds))


def _slower() -> Expression:
    """Tokens a second fell by 40 % in half an hour, while as many sequences run as then."""
    now, then = 0.0, 30 * MINUTE
    window = 5 * MINUTE
    made = _over_replicas("rate", "ingle_tokens_generated_total", window, now)
    made_then = _over_replicas("rate", "ingle_tokens_generated_total", window, then)
    run = _over_replicas("avg_over_time", "ingle_requests_running", window, now)
    run_then = _over_replicas("avg_over_time", "ingle_requests_running", window, then)
    return (made / made_then < 0.6) & (run / run_then >= 0.8) & (run_then >= 0.5)


def _waiting(seconds: float, before: float = 0.0) -> Expression:
    return _over_replicas("avg_over_time", "ingle_requests_waiting", seconds, before)


def _failing() -> Expression:
    all_ = _grown(_gateway("ingle_requests_total"), 5 * MINUTE)
    failed = _grown(_gateway("ingle_requests_failed_total"), 5 * MINUTE)
    return (failed / all_ > 0.05) & (all_ >= 10)


def _slow_starts() -> Expression:
    total = Match("total")
    took = _grown(_gateway("ingle_cold_start_seconds_sum", phase=total), HOUR)
    starts = _grown(_gateway("ingle_cold_start_seconds_count", phase=total), HOUR)
    return took / starts > SLOW_START


def _certificate_ends() -> Expression:
    ends = _max(_gateway("ingle_certificate_not_after_seconds"), "name")
    begins = _max(_gateway("ingle_certificate_not_before_seconds"), "name")
    left = SecondsUntil(ends)
    # ours are renewed when a third is left: less than a quarter means that this failed
    return (left / (ends - begins) < 0.25) & (left < 21 * DAY)


def _unscraped() -> Expression:
    return (_max(_gateway("ingle_replicas_ready")) > 0).unless(_sum(_replica("ingle_engine_steps_total")))


_WARNING, _CRITICAL = Severity.WARNING, Severity.CRITICAL

CATALOGUE: tuple[Alert, ...] = (
    Alert("FirstTokenBudgetBurnsFast", _CRITICAL,
          "{endpoint} in {region}: streams begin so late that the budget of slow ones goes {value} times too fast",
          _burning(14.4, HOUR, 5 * MINUTE), 2 * MINUTE),
    Alert("FirstTokenBudgetBurnsSlowly", _WARNING,
          "{endpoint} in {region}: for hours, the budget of slow streams goes {value} times too fast",
          _burning(6.0, 6 * HOUR, 30 * MINUTE), 15 * MINUTE),
    Alert("ThroughputDropped", _WARNING,
          "{endpoint} in {region} makes {value} of the tokens of half an hour ago, with as many requests",
          _slower(), 5 * MINUTE, "ratio"),
    Alert("QueueGrows", _WARNING, "{endpoint} in {region}: {value} requests wait at replicas, and more and more",
          (_waiting(2 * MINUTE) > 8) & (_waiting(2 * MINUTE) / _waiting(2 * MINUTE, 5 * MINUTE) > 1.2),
          2 * MINUTE),
    Alert("KvCacheExhausted", _WARNING, "{endpoint} in {region}: {value} of a replica's KV cache is in use",
          _max(_replica("ingle_kv_usage")) > 0.95, 5 * MINUTE, "ratio"),
    Alert("PreemptionStorm", _WARNING, "{endpoint} in {region}: {value} sequences a second give way and begin anew",
          _over_replicas("rate", "ingle_engine_preemptions_total", 5 * MINUTE) > 0.5, 5 * MINUTE),
    Alert("OutOfMemory", _CRITICAL, "{endpoint} in {region}: {value} steps ran out of memory in 10 minutes",
          _over_replicas("increase", "ingle_engine_out_of_memory_total", 10 * MINUTE) > 0),
    Alert("RequestsFail", _CRITICAL, "{endpoint} in {region}: {value} of requests fail",
          _failing(), 2 * MINUTE, "ratio"),
    Alert("EngineStuck", _CRITICAL, "{endpoint} in {region}: a replica's engine gave no sign for {value}",
          _max(Over("max_over_time", _replica("ingle_engine_silent_seconds"), MINUTE)) > 5, 0.0, "seconds"),
    Alert("ColdStartSlow", _WARNING, "{endpoint} in {region}: cold starts take {value} on average",
          _slow_starts(), 0.0, "seconds"),
    Alert("ColdStartFails", _CRITICAL, "{endpoint} in {region}: {value} starts failed in 15 minutes",
          (_grown(_gateway("ingle_start_failures_total"), 15 * MINUTE) > 2)
          | (_max(_gateway("ingle_endpoint_failed")) > 0)),
    Alert("ReplicasFlap", _CRITICAL, "{endpoint} in {region}: {value} replicas that served were lost in 15 minutes",
          _grown(_gateway("ingle_replica_losses_total"), 15 * MINUTE) > 2),
    Alert("CertificateEnds", _CRITICAL, "the certificate {name} ends soon: {value} of its life is left",
          _certificate_ends(), MINUTE, "ratio"),
    Alert("KeysExpire", _WARNING, "{value} API keys that are in use expire within a week",
          _max(_gateway("ingle_keys_expiring")) > 0),
    Alert("BudgetNearlySpent", _WARNING, "tenant {tenant} has used {value} of this month's budget",
          _max(_gateway("ingle_budget_used_ratio"), "tenant") > 0.9, 0.0, "ratio"),
    Alert("SpendLimitNear", _WARNING, "{endpoint} in {region} has cost {value} of what its replicas may this month",
          _max(_gateway("ingle_spend_used_ratio")) > 0.8, 0.0, "ratio"),
    Alert("RecordsDrift", _WARNING, "in {region}, {value} replicas are known to our records alone, or to the provider",
          _max(_gateway("ingle_drift"), "region") > 0, 5 * MINUTE),
    Alert("OrphanFound", _WARNING, "in {region}, {value} replicas that nobody wanted were found running and ended",
          _sum(Over("increase", _gateway("ingle_orphans_total"), 15 * MINUTE), "region") > 0),
    Alert("QuotaReached", _WARNING, "in {region}, {value} replicas were refused: the cloud account's quota is used up",
          _sum(Over("increase", _gateway("ingle_quota_refusals_total"), 15 * MINUTE), "region") > 0),
    Alert("AuditChainBroken", _CRITICAL, "the audit chain has {value} faults",
          _max(_gateway("ingle_audit_faults")) > 0),
    Alert("ReplicaMetricsMissing", _WARNING,
          "{endpoint} in {region}: {value} replicas are ready, and no metrics come from them",
          _unscraped(), 5 * MINUTE),
    Alert("GatewayMetricsMissing", _CRITICAL, "no gateway's metrics come any more",
          Absent(Series("ingle_snapshot_age_seconds")), 5 * MINUTE),
)  # fmt: skip


def alert(name: str) -> Alert:
    """Raises KeyError."""
    return {item.name: item for item in CATALOGUE}[name]


def series_needed() -> frozenset[str]:
    """The metrics that the catalogue reads."""
    return frozenset(name for item in CATALOGUE for name in item.expression.names())
