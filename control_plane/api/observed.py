"""What the admin API takes and gives of alerts, silences and history."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from control_plane.api.fields import PLAIN
from control_plane.api.schemas import Input


class AlertSilenceCreate(Input):
    """Alerts of which nobody is told for a while: those that match all of `matchers` (`alert`, or a label)."""

    matchers: dict[
        Annotated[str, Field(max_length=64, pattern=PLAIN)], Annotated[str, Field(max_length=255, pattern=PLAIN)]
    ] = Field(min_length=1, max_length=10)
    seconds: Annotated[float, Field(ge=1, le=86_400 * 30, description="how long from now")]
    comment: Annotated[str, Field(max_length=1000, pattern=PLAIN)] = ""


class AlertSilence(BaseModel):
    id: str
    matchers: dict[str, str]
    comment: str
    created_by: str
    created_at: str
    ends_at: str


class Alert(BaseModel):
    """An alert for one set of labels; `silenced` where a silence covers it now."""

    id: str
    name: str
    severity: Literal["critical", "warning"]
    state: Literal["pending", "firing", "resolved"]
    summary: str
    labels: dict[str, str]
    value: float
    since: str
    fired_at: str | None
    resolved_at: str | None
    silenced: bool
    runbook: str


class AlertRule(BaseModel):
    name: str
    severity: Literal["critical", "warning"]
    summary: str
    for_seconds: float
    expression: str
    """PromQL."""
    runbook: str


class History(BaseModel):
    """How an endpoint was in the `step` seconds from `at` (seconds since the epoch) on. Times are in seconds."""

    at: int
    step: int
    ttft_p50: float | None
    ttft_p95: float | None
    tpot: float | None
    tokens_per_s: float | None
    requests_per_s: float | None
    in_flight: float | None
    held: float | None
    kv_usage: float | None
    hit_ratio: float | None
    replicas: float | None
    cost: float | None
    """Of the replicas, for the whole while, in the price book's currency."""
