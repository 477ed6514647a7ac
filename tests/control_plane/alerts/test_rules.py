"""The catalogue as Prometheus sees it, the catalogue as we see it, and that the two see the same."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from control_plane.alerts.catalogue import CATALOGUE, FIRST_TOKEN_TARGET, alert
from control_plane.alerts.expressions import Context, duration, labels_of
from control_plane.alerts.rules import FILE, text
from control_plane.alerts.window import Window
from control_plane.observe import metrics
from tests.control_plane.alerts.cases import CASES, Case, expand

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_in_the_repository_are_the_catalogues() -> None:
    assert FILE.read_text() == text(), "run: python -m control_plane.alerts.rules"


def test_every_alert_has_cases_of_both_kinds() -> None:
    assert {(case.alert, case.fires) for case in CASES} == {
        (item.name, fires) for item in CATALOGUE for fires in (True, False)
    }


@needs_promtool
def test_prometheus_takes_the_rules() -> None:
    assert f"{len(CATALOGUE)} rules found" in promtool("check", "rules", str(FILE))


@needs_promtool
def test_prometheus_fires_each_alert_when_it_should(tmp_path: Path) -> None:
    tests = []
    for case in CASES:
        state = f'{{alertname="{case.alert}",alertstate="firing"}}'
        question = {
            "expr": f"count by (alertname, alertstate) (ALERTS{state})",
            "eval_time": f"{case.at}s",
            "exp_samples": [{"labels": state, "value": 1}] if case.fires else [],
        }
        series = [{"series": name, "values": values} for name, values in case.series.items()]
        interval = f"{case.interval}s"
        tests.append({"interval": interval, "input_series": series, "promql_expr_test": [question]})
    file = tmp_path / "cases.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(FILE.resolve())], "evaluation_interval": "15s", "tests": tests}))
    promtool("test", "rules", str(file))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_our_evaluation_agrees(case: Case) -> None:
    """The expression has a value all through the time that the alert must last, or somewhere in it has none."""
    item = alert(case.alert)
    window = Window(keep=9 * 3600.0)
    tracks = {_parsed(selector): expand(values) for selector, values in case.series.items()}
    firing_since = None
    for step in range(case.at // case.interval + 1):
        at = float(step * case.interval)
        seen: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for (name, labels), values in tracks.items():
            value = values[step] if step < len(values) else None
            if value is not None:
                seen.setdefault(name, {})[labels] = value
        window.add(at, seen)
        found = item.expression.value(Context(window, at))
        firing_since = None if not found else at if firing_since is None else firing_since
    fires = firing_since is not None and case.at - firing_since >= item.lasting
    assert fires == case.fires
    if fires:
        assert {dict(labels).get("region") for labels in found} <= {"local-eu", None}
        assert "?" not in item.describe(dict(next(iter(found))), 0.5)


def test_the_target_is_a_bucket_that_gateways_have() -> None:
    assert FIRST_TOKEN_TARGET in metrics.DURATION_BUCKETS
    metrics.time_to_first_token.labels("r", "bounds").observe(1.0)
    assert f'le="{FIRST_TOKEN_TARGET:g}"' in metrics.exposition()[0].decode()
    metrics.forget("r", "bounds")
    assert "bounds" not in metrics.exposition()[0].decode()


def test_windows_shrink_by_a_scale() -> None:
    assert duration(3600) == "1h"
    assert duration(3600, 1 / 100) == "36s"
    assert duration(15, 1 / 100) == "150ms"
    assert "[36s]" in text(scale=1 / 100)
    assert "[1h]" not in text(scale=1 / 100)


def _parsed(selector: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    (family,) = text_string_to_metric_families(f"{selector} 1\n")
    (sample,) = family.samples
    return sample.name, labels_of(sample.labels)
