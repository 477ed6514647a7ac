"""Prices and replica hours: pure."""

from __future__ import annotations

import pytest

from control_plane.metering.cost import Life, hours
from control_plane.metering.prices import FREE, NANO, PriceBook, TokenPrices, in_force

BOOK = PriceBook(
    2, 100.0, "USD", {"m": TokenPrices(1.0, 0.5, 2.0), "*": TokenPrices(3.0, 3.0, 3.0)}, {"cpu": 0.5, "*": 4.0}
)


@pytest.mark.parametrize(
    ("model", "prompt", "cached", "completion", "nano"),
    [
        ("m", 1_000_000, 0, 0, NANO),
        ("m", 1_000_000, 1_000_000, 0, NANO // 2),
        ("m", 10, 4, 5, (6 * 1000 + 4 * 500 + 5 * 2000)),
        ("other", 1, 0, 1, 6000),
        ("m", 0, 0, 0, 0),
    ],
)
def test_tokens_cost_what_the_book_says(model: str, prompt: int, cached: int, completion: int, nano: int) -> None:
    assert BOOK.tokens_nano(model, prompt, cached, completion) == nano
    assert FREE.tokens_nano(model, prompt, cached, completion) == 0


def test_hours_cost_by_accelerator_and_count() -> None:
    assert BOOK.hours_nano(None, 2.0, 0) == NANO
    assert BOOK.hours_nano("h200", 0.5, 2) == 4 * NANO
    assert FREE.hours_nano("h200", 1.0, 1) == 0


def test_the_book_in_force_is_the_newest_that_had_begun() -> None:
    older = PriceBook(1, 0.0, "USD", {}, {})
    assert in_force([BOOK, older], 99.9) is older
    assert in_force([BOOK, older], 100.0) is BOOK
    assert in_force([], 5.0) is FREE


def test_idle_hours_are_those_without_a_request() -> None:
    hour = 3600.0
    lives = [Life("a", 0.0, 4 * hour), Life("b", 2 * hour, None), Life("c", 0.0, hour)]
    work = [
        ("a", 0.0, hour),
        ("a", 0.5 * hour, 1.5 * hour),  # overlaps the one before
        ("b", 1.9 * hour, 3 * hour),  # reported a little early
        ("gone", 2 * hour, 3 * hour),
        ("a", 3 * hour, 9 * hour),  # runs on beyond the replica's end
    ]
    found = hours(lives, work, since=hour, until=6 * hour)
    assert found.alive == pytest.approx(3 + 4)
    assert found.busy == pytest.approx(0.5 + 1 + 1)
    assert found.idle == pytest.approx(found.alive - found.busy)
    assert hours([], work, 0, hour) == hours(lives, [], 8 * hour, 8 * hour)
