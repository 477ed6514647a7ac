"""What the reconciler tells of starts and rollouts that are over: metrics, and traces of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from control_plane.domain import Endpoint, Rung
from control_plane.observe import metrics
from control_plane.observe.tracing import Tracing


def observe_start(
    tracing: Tracing | None,
    endpoint: Endpoint,
    replica_id: str,
    total_ms: float,
    phases: Mapping[str, float],
    now: float,
    rung: Rung = Rung.COLD,
) -> None:
    """A replica became ready at `now`, `total_ms` after it was decided on; from `rung` up."""
    parts = {phase if phase in metrics.PHASES else "other": ms for phase, ms in phases.items()}
    for phase, ms in {**parts, "total": total_ms}.items() if rung is Rung.COLD else ():
        metrics.cold_start.labels(endpoint.region, endpoint.name, phase).observe(ms / 1000)
    if tracing is not None:
        facts = {**_facts(endpoint), "ingle.replica": replica_id, "ingle.rung": str(rung)}
        facts |= {f"ingle.cold_start.{phase}_ms": ms for phase, ms in parts.items()}
        name = "cold_start" if rung is Rung.COLD else "wake"
        tracing.past(endpoint.region, f"{name} {endpoint.name}", now - total_ms / 1000, now, facts, None)


def trace_rollout(tracing: Tracing, endpoint: Endpoint, changes: Mapping[str, Any], now: float) -> None:
    """A rollout is over once what was asked stands, or is given up on."""
    settled = changes.get("observed_generation") == endpoint.generation
    if not settled and changes.get("failed_generation") != endpoint.generation:
        return
    facts = {**_facts(endpoint), "ingle.generation.from": endpoint.observed_generation}
    facts["ingle.generation.to"] = endpoint.generation
    code = None if settled else str(changes.get("reason_code") or "failed")
    tracing.past(endpoint.region, f"rollout {endpoint.name}", endpoint.updated_at, now, facts, code)


def _facts(endpoint: Endpoint) -> dict[str, Any]:
    return {"ingle.endpoint": endpoint.name, "ingle.region": endpoint.region, "ingle.model": endpoint.model}
