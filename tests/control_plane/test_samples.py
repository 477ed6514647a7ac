"""Rates out of two readings of replicas' metrics."""

from __future__ import annotations

import math

import pytest

from control_plane.api.samples import GATEWAY, Rates, Reading, quantile, rates, read

TEXT = """\
# TYPE gen_ai_server_time_to_first_token_seconds histogram
gen_ai_server_time_to_first_token_seconds_bucket{model="m",op="chat",le="0.1"} 2
gen_ai_server_time_to_first_token_seconds_bucket{model="m",op="chat",le="+Inf"} 4
gen_ai_server_time_to_first_token_seconds_bucket{model="m",op="text",le="0.1"} 1
gen_ai_server_time_to_first_token_seconds_bucket{model="m",op="text",le="+Inf"} 1
# TYPE gen_ai_server_time_per_output_token_seconds histogram
gen_ai_server_time_per_output_token_seconds_bucket{model="m",le="+Inf"} 5
gen_ai_server_time_per_output_token_seconds_sum{model="m"} 0.5
gen_ai_server_time_per_output_token_seconds_count{model="m"} 5
# TYPE ingle_tokens_generated_total counter
ingle_tokens_generated_total{model="m"} 120
# TYPE ingle_kv_usage gauge
ingle_kv_usage{model="m"} 0.25
# TYPE something_else gauge
something_else 7
"""


def test_text_is_read_and_series_are_summed() -> None:
    reading = read(TEXT)
    assert reading.totals == {"tpot_sum": 0.5, "tpot_count": 5, "generated": 120}
    assert reading.gauges == {"kv_usage": 0.25}
    assert reading.ttft == {0.1: 3, math.inf: 5}


def test_what_is_no_prometheus_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"."):
        read('x{le="1" 3\n')


@pytest.mark.parametrize(
    ("cumulative", "share", "expected"),
    [
        ({}, 0.5, None),
        ({0.1: 0, math.inf: 0}, 0.5, None),
        ({0.1: 10, math.inf: 10}, 0.5, 0.05),
        ({0.1: 10, 0.2: 20, math.inf: 20}, 0.95, 0.19),
        ({0.1: 0, 0.2: 10, math.inf: 10}, 0.5, 0.15),
        ({0.1: 1, math.inf: 10}, 0.95, 0.1),  # beyond the last bound nothing is known
    ],
)
def test_a_quantile_lies_on_a_line_within_its_bucket(
    cumulative: dict[float, float], share: float, expected: float | None
) -> None:
    found = quantile(cumulative, share)
    assert found is expected is None or found == pytest.approx(expected)


def reading(
    generated: float, *, prompt: float = 0.0, cached: float = 0.0, tpot: tuple[float, float] = (0, 0)
) -> Reading:
    totals = {"generated": generated, "prompt": prompt, "cached": cached, "tpot_sum": tpot[0], "tpot_count": tpot[1]}
    return Reading(totals)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"a": reading(100)}, {"a": reading(150)}, Rates(tokens_per_s=5.0)),
        # one began anew, one is new, one is gone
        ({"a": reading(100)}, {"a": reading(30)}, Rates(tokens_per_s=3.0)),
        ({"a": reading(100)}, {"a": reading(100), "b": reading(20)}, Rates(tokens_per_s=2.0)),
        ({"a": reading(100), "b": reading(9)}, {"a": reading(110)}, Rates(tokens_per_s=1.0)),
        ({}, {}, Rates(tokens_per_s=0.0)),
        (
            {"a": reading(0, prompt=10, cached=0, tpot=(1.0, 10))},
            {"a": reading(0, prompt=40, cached=90, tpot=(1.4, 20))},
            Rates(tokens_per_s=0.0, hit_ratio=0.75, tpot=0.04),
        ),
    ],
)
def test_rates_are_of_what_grew(before: dict[str, Reading], after: dict[str, Reading], expected: Rates) -> None:
    found = rates(before, after, 10.0)
    for name in Rates.__slots__:
        wanted = getattr(expected, name)
        assert getattr(found, name) == (None if wanted is None else pytest.approx(wanted)), name


def test_first_tokens_of_between_only() -> None:
    before = {"a": Reading(ttft={0.1: 100, 0.2: 100, math.inf: 100})}
    after = {"a": Reading(ttft={0.1: 100, 0.2: 110, math.inf: 110})}
    assert rates(before, after, 1.0).ttft_p50 == pytest.approx(0.15)


@pytest.mark.parametrize(("at_gateway", "expected"), [(0, 0.15), (10, 1.5)])
def test_first_tokens_are_the_gateways_where_it_saw_any(at_gateway: int, expected: float) -> None:
    """A gateway of another process tells nothing here: then the replicas' own count."""
    before = {"a": Reading(ttft={0.1: 5, 0.2: 5, math.inf: 5}), GATEWAY: Reading(ttft={1.0: 3, 2.0: 3, math.inf: 3})}
    after = {
        "a": Reading(ttft={0.1: 5, 0.2: 15, math.inf: 15}),
        GATEWAY: Reading(ttft={1.0: 3, 2.0: 3 + at_gateway, math.inf: 3 + at_gateway}),
    }
    assert rates(before, after, 1.0).ttft_p50 == pytest.approx(expected)
