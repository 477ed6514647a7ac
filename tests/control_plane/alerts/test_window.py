"""The evaluator's memory: what it forgets, what it never has more of, and the history made of it."""

from __future__ import annotations

import pytest

from control_plane.alerts import rollup
from control_plane.alerts.expressions import ANY, Aggregate, Context, Match, Over, Series, labels_of
from control_plane.alerts.window import Window
from control_plane.domain import HistoryPoint

CHAT = {"region": "eu", "endpoint": "chat"}
ONE, TWO = labels_of({**CHAT, "replica": "1"}), labels_of({**CHAT, "replica": "2"})


def filled(name: str, values: dict[float, dict[tuple[tuple[str, str], ...], float]], keep: float = 1e6) -> Window:
    window = Window(keep=keep)
    for at, vector in values.items():
        window.add(at, {name: vector})
    return window


def test_what_the_last_look_did_not_see_is_gone_at_once() -> None:
    window = filled("g", {0: {ONE: 1, TWO: 2}, 15: {ONE: 3}})
    assert dict(window.latest("g", 15, 300)) == {ONE: 3}
    assert dict(window.latest("g", 10, 300)) == {ONE: 1, TWO: 2}
    assert dict(window.latest("g", 400, 300)) == {}


def test_old_samples_are_thinned_then_dropped() -> None:
    window = Window(keep=3600, fine=600, coarse=60)
    for at in range(0, 7200, 15):
        window.add(float(at), {"g": {ONE: float(at)}})
    ((_, points),) = window.between("g", 0, 7200)
    times = [at for at, _ in points]
    assert min(times) >= 7185 - 3600
    assert len([at for at in times if at < 7185 - 600]) <= 3000 / 60 + 1
    assert len([at for at in times if at >= 7185 - 600]) == 41
    assert all(value == at for at, value in points)


def test_series_are_bounded() -> None:
    window = Window(keep=60, most=10)
    many = {labels_of({"endpoint": str(index)}): 1.0 for index in range(25)}
    window.add(0, {"g": many})
    assert (len(window), window.dropped) == (10, 15)
    window.add(100, {"g": {}})
    assert len(window) == 0  # nothing of them is left, so that others have room
    window.add(101, {"g": {ONE: 1.0}})
    assert len(window) == 1


def test_counters_that_begin_anew_are_counted_on() -> None:
    window = filled("c", {0: {ONE: 100}, 15: {ONE: 110}, 30: {ONE: 5}, 45: {ONE: 7}})
    grown = Over("increase", Series("c"), 60).value(Context(window, 45))
    assert grown == {ONE: 10 + 5 + 2}
    rate = Aggregate("sum", Over("rate", Series("c", {"replica": ANY}), 60), ("endpoint",)).value(Context(window, 45))
    assert rate == {labels_of({"endpoint": "chat"}): pytest.approx(17 / 45)}


def test_matching() -> None:
    window = filled("g", {0: {ONE: 1, labels_of(CHAT): 2}})
    context = Context(window, 0)
    assert Series("g", {"replica": Match("")}).value(context) == {labels_of(CHAT): 2}
    assert Series("g", {"replica": Match("1|2", "=~")}).value(context) == {ONE: 1}
    assert Series("g", {"replica": Match("1|2", "=~")}).promql() == 'g{replica=~"1|2"}'


def test_history_is_made_of_what_replicas_and_gateways_say() -> None:
    window = Window(keep=7200)
    gateway = labels_of(CHAT)
    for at in range(0, 61, 15):
        part = at / 60
        window.add(float(at), {
            "ingle_tokens_generated_total": {ONE: 300 * part, TWO: 50 + 300 * part},
            "ingle_tokens_prompt_total": {ONE: 60 * part}, "ingle_tokens_cached_total": {ONE: 20 * part},
            f"{rollup.PER_TOKEN}_sum": {ONE: 3 * part}, f"{rollup.PER_TOKEN}_count": {ONE: 30 * part},
            # a replica's own gauge of the same name doesn't count
            "ingle_requests_running": {gateway: 4, ONE: 9}, "ingle_kv_usage": {ONE: 0.2, TWO: 0.6},
            "ingle_requests_total": {labels_of({**CHAT, "status": "200"}): 12 * part},
            "ingle_replicas_ready": {gateway: 2}, "ingle_cost_per_second": {gateway: 0.001},
            rollup.FIRST: {labels_of({**CHAT, "le": le}): count * part
                           for le, count in (("0.1", 50), ("0.2", 90), ("0.4", 100), ("+Inf", 100))},
        })  # fmt: skip
    assert rollup.points(window, 0, 60) == {
        ("eu", "chat"): HistoryPoint(
            0, ttft_p50=0.1, ttft_p95=0.3, tpot=0.1, tokens_per_s=10.0, requests_per_s=0.2, in_flight=4.0,
            kv_usage=0.6, hit_ratio=0.25, replicas=2.0, cost=0.06,
        )
    }  # fmt: skip
    assert rollup.points(window, 3600, 60) == {}


@pytest.mark.parametrize(
    ("buckets", "share", "value"),
    [
        ({}, 0.5, None),
        ({1.0: 0.0, float("inf"): 0.0}, 0.5, None),
        ({1.0: 10.0, float("inf"): 10.0}, 0.5, 0.5),
        ({1.0: 0.0, 2.0: 10.0, float("inf"): 10.0}, 0.95, 1.95),
        ({1.0: 5.0, float("inf"): 10.0}, 0.95, 1.0),
    ],
)
def test_quantiles_of_histograms(buckets: dict[float, float], share: float, value: float | None) -> None:
    assert rollup.quantile(buckets, share) == (None if value is None else pytest.approx(value))
