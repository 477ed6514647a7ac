"""Grafana's dashboards, made from the metrics' names. `python -m control_plane.observe.grafana` writes them."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path("infra/grafana")
_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 8
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_OURS = re.compile(r"\b((?:ingle|gen_ai)_[a-z0-9_]+)")

_PLACE = 'region=~"$region",endpoint=~"$endpoint"'
_GATEWAY = f'{{{_PLACE},replica=""}}'
_REPLICA = f'{{{_PLACE},replica=~"$replica",replica!=""}}'
_BY = "region, endpoint"
_NAMED = "{{endpoint}} {{region}}"


@dataclass(frozen=True)
class Panel:
    """One chart: queries with their legends, and Grafana's unit."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str = ""


@dataclass(frozen=True)
class Dashboard:
    name: str
    title: str
    variables: tuple[str, ...]
    panels: tuple[Panel, ...]


def _quantile(share: float, metric: str, where: str, by: str) -> str:
    return f"histogram_quantile({share}, sum by ({by}, le) (rate({metric}_bucket{where}[$__rate_interval])))"


def _rate(metric: str, where: str, by: str = _BY) -> str:
    return f"sum by ({by}) (rate({metric}{where}[$__rate_interval]))"


def _sum(metric: str, where: str, by: str = _BY) -> str:
    return f"sum by ({by}) ({metric}{where})"


def _tokens(kind: str) -> str:
    return _rate("ingle_tokens_total", f'{{{_PLACE},kind="{kind}"}}')


_FIRST = "gen_ai_server_time_to_first_token_seconds"
_TOKEN = "gen_ai_server_time_per_output_token_seconds"  # noqa: S105  # a metric
_DURATION = "gen_ai_server_request_duration_seconds"

_FLEET = Dashboard("fleet", "ingle · fleet", ("region",), (
    Panel("Requests", "reqps", ((_rate("ingle_requests_total", '{region=~"$region"}', "region"), "{{region}}"),)),
    Panel("Failed requests", "percentunit", ((
        f"{_rate('ingle_requests_failed_total', _GATEWAY)} / {_rate('ingle_requests_total', _GATEWAY)}", _NAMED),)),
    Panel("Refusals by code", "reqps", ((_rate("ingle_errors_total", '{region=~"$region"}', "code"), "{{code}}"),)),
    Panel("Time to first token, p95", "s", ((_quantile(0.95, _FIRST, _GATEWAY, _BY), _NAMED),)),
    Panel("Tokens generated", "short", ((_tokens("completion"), _NAMED),)),
    Panel("In flight", "short", ((_sum("ingle_requests_running", _GATEWAY), _NAMED),)),
    Panel("Held while a replica starts", "short", ((_sum("ingle_requests_held", _GATEWAY), _NAMED),)),
    Panel("Replicas ready", "short", ((_sum("ingle_replicas_ready", _GATEWAY), _NAMED),)),
    Panel("Alerts that fire", "short", (("sum by (alert) (ingle_alerts_firing > 0)", "{{alert}}"),),
          "By the controller's own watch."),
    Panel("Age of the gateways' snapshots", "s", (('max by (region) (ingle_snapshot_age_seconds)', "{{region}}"),)),
    Panel("Certificates end in", "s", (("min by (name) (ingle_certificate_not_after_seconds) - time()", "{{name}}"),)),
    Panel("Usage events not yet in the store", "short", (("sum by (region) (ingle_usage_pending)", "{{region}}"),)),
))  # fmt: skip

_ENDPOINT = Dashboard("endpoint", "ingle · endpoint", ("region", "endpoint"), (
    Panel("Time to first token", "s", tuple(
        (_quantile(share, _FIRST, _GATEWAY, _BY), f"p{share * 100:g} {_NAMED}") for share in (0.5, 0.95, 0.99))),
    Panel("Time per output token", "s", tuple(
        (_quantile(share, _TOKEN, f'{{{_PLACE},replica!=""}}', _BY), f"p{share * 100:g} {_NAMED}")
        for share in (0.5, 0.95))),
    Panel("Request duration", "s", tuple(
        (_quantile(share, _DURATION, _GATEWAY, _BY), f"p{share * 100:g} {_NAMED}") for share in (0.5, 0.95))),
    Panel("Requests by outcome", "reqps", ((_rate("ingle_requests_total", _GATEWAY, "outcome, status"),
                                            "{{outcome}} {{status}}"),)),
    Panel("In flight and held", "short", ((_sum("ingle_requests_running", _GATEWAY), "in flight " + _NAMED),
                                          (_sum("ingle_requests_held", _GATEWAY), "held " + _NAMED))),
    Panel("Tokens", "short", ((_rate("ingle_tokens_total", f"{{{_PLACE}}}", "kind"), "{{kind}}"),)),
    Panel("Replicas", "short", ((_sum("ingle_replicas_desired", _GATEWAY), "wanted " + _NAMED),
                                (_sum("ingle_replicas_ready", _GATEWAY), "ready " + _NAMED))),
    Panel("Cold starts by phase, mean", "s", ((
        f"{_rate('ingle_cold_start_seconds_sum', _GATEWAY, 'phase')} / "
        f"{_rate('ingle_cold_start_seconds_count', _GATEWAY, 'phase')}", "{{phase}}"),)),
    Panel("Starts that failed, replicas lost", "short", (
        (_sum("ingle_start_failures_total", _GATEWAY), "failed " + _NAMED),
        (_sum("ingle_replica_losses_total", _GATEWAY), "lost " + _NAMED))),
))  # fmt: skip

_REPLICAS = Dashboard("replica", "ingle · replica", ("region", "endpoint", "replica"), (
    Panel("Running and waiting", "short", ((_sum("ingle_requests_running", _REPLICA, "replica"), "running {{replica}}"),
                                           (_sum("ingle_requests_waiting", _REPLICA, "replica"),
                                            "waiting {{replica}}"))),
    Panel("Tokens generated", "short", ((_rate("ingle_tokens_generated_total", _REPLICA, "replica"), "{{replica}}"),)),
    Panel("Prompt tokens computed and found", "short", (
        (_rate("ingle_tokens_prompt_total", _REPLICA, "replica"), "computed {{replica}}"),
        (_rate("ingle_tokens_cached_total", _REPLICA, "replica"), "found {{replica}}"))),
    Panel("KV cache in use", "percentunit", ((_sum("ingle_kv_usage", _REPLICA, "replica"), "{{replica}}"),)),
    Panel("Prefix hit ratio, since start", "percentunit", ((_sum("ingle_prefix_hit_ratio", _REPLICA, "replica"),
                                                            "{{replica}}"),)),
    Panel("Step time, p95", "s", ((_quantile(0.95, "ingle_engine_step_duration_seconds", _REPLICA, "replica"),
                                   "{{replica}}"),)),
    Panel("Tokens in a step", "short", ((_sum("ingle_engine_batch_tokens", _REPLICA, "replica"), "{{replica}}"),)),
    Panel("Memory bandwidth", "Bps", ((_rate("ingle_engine_moved_bytes_total", _REPLICA, "replica"), "{{replica}}"),),
          "Bytes that steps had to move: weights once, each sequence's keys and values once."),
    Panel("Memory bandwidth utilization of the last step", "percentunit", (
        (_sum("ingle_engine_bandwidth_utilization", _REPLICA, "replica"), "{{replica}}"),),
          "Over INGLE_MEMORY_BANDWIDTH, or what a copy reaches on that machine."),
    Panel("Memory", "bytes", ((_sum("ingle_memory_used_bytes", _REPLICA, "replica, kind"), "{{kind}} {{replica}}"),)),
    Panel("Preemptions", "short", ((_rate("ingle_engine_preemptions_total", _REPLICA, "replica"), "{{replica}}"),)),
    Panel("Steps out of memory, steps that failed", "short", (
        (_sum("ingle_engine_out_of_memory_total", _REPLICA, "replica"), "out of memory {{replica}}"),
        (_sum("ingle_engine_step_errors_total", _REPLICA, "replica"), "failed {{replica}}"))),
    Panel("Silence of the engine", "s", ((_sum("ingle_engine_silent_seconds", _REPLICA, "replica"), "{{replica}}"),)),
))  # fmt: skip

_COST = Dashboard("cost", "ingle · cost", ("region", "endpoint"), (
    Panel("Cost an hour", "currencyUSD", ((f"3600 * {_sum('ingle_cost_per_second', _GATEWAY)}", _NAMED),)),
    Panel("Cost of the range shown", "currencyUSD", ((
        f"sum by ({_BY}) (avg_over_time(ingle_cost_per_second{_GATEWAY}[$__range])) * $__range_s", _NAMED),)),
    Panel("Cost of a million tokens generated", "currencyUSD", ((
        f"1e6 * {_sum('ingle_cost_per_second', _GATEWAY)} / "
        f"{_tokens('completion')}", _NAMED),)),
    Panel("Budgets used", "percentunit", (("max by (tenant) (ingle_budget_used_ratio)", "{{tenant}}"),)),
    Panel("Tokens that nobody received", "short", ((_tokens("wasted"), _NAMED),)),
    Panel("Cached share of prompts", "percentunit", ((
        f"{_tokens('cached')} / "
        f"{_tokens('prompt')}", _NAMED),)),
))  # fmt: skip

DASHBOARDS = (_FLEET, _ENDPOINT, _REPLICAS, _COST)
_VALUES = {
    "region": "label_values(ingle_requests_running, region)",
    "endpoint": 'label_values(ingle_requests_running{region=~"$region"}, endpoint)',
    "replica": 'label_values(ingle_engine_steps_total{endpoint=~"$endpoint"}, replica)',
}


def queried() -> set[str]:
    """Every metric that a dashboard asks for."""
    texts = [query for board in DASHBOARDS for panel in board.panels for query, _ in panel.queries]
    return {name for text in [*texts, *_VALUES.values()] for name in _OURS.findall(text)}


def render(board: Dashboard) -> str:
    """The dashboard as Grafana imports it."""
    variables: list[dict[str, Any]] = [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}}
    ]
    variables += [
        {
            "name": name,
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": _VALUES[name], "refId": name},
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
        for name in board.variables
    ]
    missing = {name for name in _VALUES if name not in board.variables}
    panels = [_panel(panel, index, missing) for index, panel in enumerate(board.panels)]
    body = {
        "uid": f"ingle-{board.name}",
        "title": board.title,
        "tags": ["ingle"],
        "timezone": "utc",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


def _panel(panel: Panel, index: int, missing: set[str]) -> dict[str, Any]:
    place = {"x": index % _COLUMNS * _WIDTH, "y": index // _COLUMNS * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + at), "datasource": _SOURCE, "expr": _without(query, missing), "legendFormat": legend,
             "exemplar": "time_to_first_token" in query}
            for at, (query, legend) in enumerate(panel.queries)
        ],
    }  # fmt: skip


def _without(query: str, missing: set[str]) -> str:
    """Without the matchers of variables that the dashboard doesn't have."""
    for name in missing:
        query = re.sub(rf',?{name}=~"\${name}"', "", query)
    return query.replace("{,", "{")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    target.mkdir(parents=True, exist_ok=True)
    for board in DASHBOARDS:
        (target / f"{board.name}.json").write_text(render(board))
