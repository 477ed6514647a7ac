"""For each alert, series under which it fires and series under which it must not, in promtool's notation."""

from __future__ import annotations

import re
from dataclasses import dataclass

G = 'region="local-eu",endpoint="chat"'
R = f'{G},replica="rep-1"'
FIRST = "gen_ai_server_time_to_first_token_seconds"
HOUR, DAY = 3600, 86_400


@dataclass(frozen=True)
class Case:
    """`series` by selector, a value each `interval` seconds from 0 on; looked at at `at` seconds."""

    alert: str
    fires: bool
    series: dict[str, str]
    at: int
    interval: int = 60

    def __str__(self) -> str:
        return f"{self.alert}-{'fires' if self.fires else 'silent'}"


def expand(notation: str) -> list[float | None]:
    """`0+10x3 5 _ 7x2` → 0 10 20 30 5 None 7 7 7."""
    values: list[float | None] = []
    for part in notation.split():
        if part.startswith("_"):
            values += [None] * int(part[2:] or 1)
            continue
        match = re.fullmatch(r"(-?[\d.e]+)(?:([+-][\d.e]+))?(?:x(\d+))?", part)
        assert match, part
        start, step, times = float(match[1]), float(match[2] or 0), int(match[3] or 0)
        values += [start + step * index for index in range(times + 1)]
    return values


def _pair(alert: str, at: int, firing: dict[str, str], silent: dict[str, str], interval: int = 60) -> list[Case]:
    return [Case(alert, True, firing, at, interval), Case(alert, False, silent, at, interval)]


def _streams(total: str, good: str) -> dict[str, str]:
    return {f"{FIRST}_count{{{G}}}": total, f'{FIRST}_bucket{{{G},le="2.56"}}': good}


def _speed(made: str, running: str) -> dict[str, str]:
    return {f"ingle_tokens_generated_total{{{R}}}": made, f"ingle_requests_running{{{R}}}": running}


CASES: list[Case] = [
    *_pair("FirstTokenBudgetBurnsFast", 2 * HOUR, _streams("0+10x120", "0+1x120"), _streams("0+10x120", "0+9.8x120")),
    # slow for an hour, and well again: no longer
    Case("FirstTokenBudgetBurnsFast", False, _streams("0+10x130", "0+1x110 119+10x19"), 130 * 60),
    # too few to say anything
    Case("FirstTokenBudgetBurnsFast", False, _streams("0+0.1x120", "0+0x120"), 2 * HOUR),
    *_pair("FirstTokenBudgetBurnsSlowly", 8 * HOUR, _streams("0+10x480", "0+6x480"), _streams("0+10x480", "0+8x480")),
    *_pair("ThroughputDropped", 50 * 60, _speed("0+6000x35 210000+1800x30", "4x70"), _speed("0+6000x70", "4x70")),
    # fewer tokens because fewer ask
    Case("ThroughputDropped", False, _speed("0+6000x35 210000+1800x30", "4x35 1x30"), 50 * 60),
    *_pair("QueueGrows", 20 * 60, {f"ingle_requests_waiting{{{R}}}": "1+2x30"},
           {f"ingle_requests_waiting{{{R}}}": "30x30"}),
    *_pair("KvCacheExhausted", 10 * 60, {f"ingle_kv_usage{{{R}}}": "0.99x20"}, {f"ingle_kv_usage{{{R}}}": "0.9x20"}),
    *_pair("PreemptionStorm", 20 * 60, {f"ingle_engine_preemptions_total{{{R}}}": "0+60x30"},
           {f"ingle_engine_preemptions_total{{{R}}}": "0+10x30"}),
    *_pair("OutOfMemory", 10 * 60, {f"ingle_engine_out_of_memory_total{{{R}}}": "0x8 1x10"},
           {f"ingle_engine_out_of_memory_total{{{R}}}": "3x20"}),
    *_pair("RequestsFail", 15 * 60,
           {f'ingle_requests_total{{{G},status="200",outcome="ok"}}': "0+90x20",
            f'ingle_requests_total{{{G},status="502",outcome="error"}}': "0+10x20",
            f"ingle_requests_failed_total{{{G}}}": "0+10x20"},
           {f'ingle_requests_total{{{G},status="200",outcome="ok"}}': "0+90x20",
            f"ingle_requests_failed_total{{{G}}}": "0+1x20"}),
    *_pair("EngineStuck", 5 * 60, {f"ingle_engine_silent_seconds{{{R}}}": "0.2x4 9x3"},
           {f"ingle_engine_silent_seconds{{{R}}}": "0.2x10"}),
    *_pair("ColdStartSlow", 30 * 60,
           {f'ingle_cold_start_seconds_sum{{{G},phase="total"}}': "0+90x40",
            f'ingle_cold_start_seconds_count{{{G},phase="total"}}': "0+1x40"},
           {f'ingle_cold_start_seconds_sum{{{G},phase="total"}}': "0+5x40",
            f'ingle_cold_start_seconds_count{{{G},phase="total"}}': "0+1x40"}),
    *_pair("ColdStartFails", 15 * 60, {f"ingle_start_failures_total{{{G}}}": "0+1x20"},
           {f"ingle_start_failures_total{{{G}}}": "4x20", f"ingle_endpoint_failed{{{G}}}": "0x20"}),
    Case("ColdStartFails", True, {f"ingle_endpoint_failed{{{G}}}": "1x20"}, 10 * 60),
    *_pair("ReplicasFlap", 15 * 60, {f"ingle_replica_losses_total{{{G}}}": "0+1x20"},
           {f"ingle_replica_losses_total{{{G}}}": "0x5 1x15"}),
    # 90 days of life, 20 of them left; then 40 left
    *_pair("CertificateEnds", 10 * 60,
           {'ingle_certificate_not_after_seconds{name="gateway-local-eu"}': f"{20 * DAY}x20",
            'ingle_certificate_not_before_seconds{name="gateway-local-eu"}': f"{-70 * DAY}x20"},
           {'ingle_certificate_not_after_seconds{name="gateway-local-eu"}': f"{40 * DAY}x20",
            'ingle_certificate_not_before_seconds{name="gateway-local-eu"}': f"{-50 * DAY}x20"}),
    *_pair("KeysExpire", 5 * 60, {"ingle_keys_expiring": "2x10"}, {"ingle_keys_expiring": "0x10"}),
    *_pair("SpendLimitNear", 5 * 60, {'ingle_spend_used_ratio{region="local-eu",endpoint="chat"}': "0.85x10"},
           {'ingle_spend_used_ratio{region="local-eu",endpoint="chat"}': "0.5x10"}),
    *_pair("RecordsDrift", 12 * 60, {'ingle_drift{region="local-eu"}': "1x24"},
           {'ingle_drift{region="local-eu"}': "0x24"}),
    *_pair("BudgetNearlySpent", 5 * 60, {'ingle_budget_used_ratio{tenant="default"}': "0.95x10"},
           {'ingle_budget_used_ratio{tenant="default"}': "0.5x10"}),
    *_pair("OrphanFound", 10 * 60, {'ingle_orphans_total{region="local-eu"}': "0x5 1x10"},
           {'ingle_orphans_total{region="local-eu"}': "2x20"}),
    *_pair("QuotaReached", 10 * 60, {'ingle_quota_refusals_total{region="local-eu"}': "0x5 1x10"},
           {'ingle_quota_refusals_total{region="local-eu"}': "2x20"}),
    *_pair("AuditChainBroken", 5 * 60, {"ingle_audit_faults": "1x10"}, {"ingle_audit_faults": "0x10"}),
    *_pair("ReplicaMetricsMissing", 15 * 60,
           {f"ingle_replicas_ready{{{G}}}": "1x20"},
           {f"ingle_replicas_ready{{{G}}}": "1x20", f"ingle_engine_steps_total{{{R}}}": "0+5x20"}),
    *_pair("GatewayMetricsMissing", 15 * 60,
           {f"ingle_replicas_ready{{{G}}}": "0x20"}, {'ingle_snapshot_age_seconds{region="local-eu"}': "1x20"}),
]  # fmt: skip
