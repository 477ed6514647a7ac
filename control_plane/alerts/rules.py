"""The catalogue as Prometheus reads it. `python -m control_plane.alerts.rules` writes `infra/alerts/ingle.yml`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

from control_plane.alerts.catalogue import CATALOGUE, Alert
from control_plane.alerts.expressions import duration

FILE = Path("infra/alerts/ingle.yml")
_NOTE = "# Written by `python -m control_plane.alerts.rules`; change control_plane/alerts/catalogue.py instead.\n"
_SAID = {"ratio": "$value | humanizePercentage", "seconds": "$value | humanizeDuration", "number": "$value | humanize"}


def rules(*, scale: float = 1.0, interval: float = 15.0) -> dict[str, Any]:
    """A rule file. `scale` shortens all windows, for tests."""
    group = {
        "name": "ingle",
        "interval": duration(interval, scale),
        "rules": [_rule(item, scale) for item in CATALOGUE],
    }
    return {"groups": [group]}


def _rule(item: Alert, scale: float) -> dict[str, Any]:
    def field(match: re.Match[str]) -> str:
        return "{{ " + (_SAID[item.unit] if match[1] == "value" else f"$labels.{match[1]}") + " }}"

    return {
        "alert": item.name,
        "expr": item.expression.promql(scale),
        **({"for": duration(item.lasting, scale)} if item.lasting else {}),
        "labels": {"severity": str(item.severity)},
        "annotations": {"summary": re.sub(r"\{(\w+)\}", field, item.summary), "runbook": item.runbook},
    }


def text(*, scale: float = 1.0, interval: float = 15.0) -> str:
    return _NOTE + yaml.safe_dump(rules(scale=scale, interval=interval), sort_keys=False, width=10_000)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text())
