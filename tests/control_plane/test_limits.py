"""What may be open at once, and a gateway's part of a limit: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.errors import Overloaded, RateLimited
from control_plane.gateway.authenticate import source_address, within
from control_plane.gateway.bucket import Bucket, Part
from control_plane.gateway.limits import Bound, Limiter
from control_plane.store.limits import Grant, Kind, window_end, window_start


def test_one_key_and_all_keys_are_bounded() -> None:
    limiter = Limiter(2, 100)
    a, b = Bound("key:a", 2, False, "key"), Bound("key:b", 1, False, "key")
    with limiter.admit(a), limiter.admit(a), limiter.admit(b):
        for bound in (a, b):
            with pytest.raises(RateLimited), limiter.admit(bound):
                pass
    with limiter.admit(a):
        pass
    with limiter.place(), limiter.place(), pytest.raises(Overloaded), limiter.place():
        pass
    with limiter.place():
        pass


def test_a_shared_bound_counts_what_other_gateways_have_open() -> None:
    limiter = Limiter(100, 100)
    bound = Bound("tenant:t", 3, True, "tenant")
    limiter.hear({"tenant:t": 2})
    with limiter.admit(bound):
        assert limiter.report() == {"tenant:t": 1}
        with pytest.raises(RateLimited), limiter.admit(bound):
            pass
    assert limiter.report() == {"tenant:t": 0}  # told once that it is over
    assert limiter.report() == {}
    limiter.hear({})
    with limiter.admit(bound), limiter.admit(bound), limiter.admit(bound):
        pass


@given(st.lists(st.lists(st.integers(1, 60), max_size=4), max_size=20))
def test_memory_is_given_back_however_a_request_ends(bodies: list[list[int]]) -> None:
    limiter = Limiter(10, 100)
    for chunks in bodies:
        try:
            with limiter.room() as take:
                for size in chunks:
                    take(size)
            assert sum(chunks) <= 100
        except Overloaded:
            assert sum(chunks) > 100
    with limiter.room() as take:
        take(100)
        with pytest.raises(Overloaded):
            take(1)


def test_windows_begin_with_their_first_use_and_budgets_with_the_month() -> None:
    assert window_start(Kind.REQUESTS, 0.0, 1000.0) == 1000.0
    assert window_start(Kind.REQUESTS, 1000.0, 1059.9) == 1000.0
    assert window_start(Kind.REQUESTS, 1000.0, 1060.0) == 1060.0
    assert window_start(Kind.TOKENS, 1000.0, 999.0) == 1000.0  # a clock that is behind
    assert window_start(Kind.TOKENS, 2000.0, 1000.0) == 1000.0  # a clock that was put right
    december = 1_796_083_200.0  # 2026-12-01
    assert window_start(Kind.BUDGET, 0.0, december + 5) == december
    assert window_start(Kind.BUDGET, 0.0, december - 1) == 1_793_491_200.0
    assert window_end(Kind.BUDGET, december) == 1_798_761_600.0


def test_what_is_used_beyond_the_estimate_is_owed_and_what_is_left_comes_back() -> None:
    bucket = Bucket("key:k", Kind.TOKENS, 200, True)
    bucket.adopt(Grant(60, 60, 1000.0))
    bucket.left -= 60
    part = Part(bucket, 60, bucket.started_at)
    assert bucket.remaining(1001.0) == 140
    part.settle(20, 1002.0)
    assert bucket.left == 40
    assert bucket.remaining(1002.0) == 140  # never more than was told before
    bucket.left -= 40
    Part(bucket, 40, bucket.started_at).settle(100, 1003.0)
    assert bucket.left == -60
    ask = bucket.ask(10, 10)
    assert (ask.owed, bucket.left) == (60, 0)
    bucket.untold(ask)
    assert bucket.left == -60
    # A new window: debts stay, leftovers don't.
    bucket.adopt(Grant(0, 0, 1060.0))
    assert bucket.left == -60
    bucket.left = 30
    part = Part(bucket, 10, 1060.0)
    bucket.adopt(Grant(5, 5, 1200.0))
    assert bucket.left == 5
    part.settle(0, 1201.0)
    assert bucket.left == 5


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 30)), max_size=60))
def test_a_gateway_alone_never_gives_more_than_the_limit_in_a_window(takes: list[tuple[int, float]]) -> None:
    bucket = Bucket("key:k", Kind.TOKENS, 100, True)
    now, spent = 1000.0, dict[float, int]()
    for amount, later in takes:
        now += later
        if not bucket.has(amount, now):
            bucket.alone(amount, amount, now)
        if bucket.has(amount, now):
            bucket.left -= amount
            spent[bucket.started_at] = spent.get(bucket.started_at, 0) + amount
    assert all(used <= 100 for used in spent.values())
    assert all(later - sooner >= 60 for sooner, later in zip(sorted(spent), sorted(spent)[1:], strict=False))


@pytest.mark.parametrize(
    ("peer", "forwarded", "source"),
    [
        ("10.0.0.9", "1.2.3.4", "1.2.3.4"),
        ("10.0.0.9", "6.6.6.6, 1.2.3.4, 10.0.0.7", "1.2.3.4"),  # only what our own proxies wrote counts
        ("1.1.1.1", "10.0.0.1", "1.1.1.1"),
        ("10.0.0.9", "", "10.0.0.9"),
        ("10.0.0.9", " , ", "10.0.0.9"),
        ("10.0.0.9", "nonsense", "nonsense"),
        ("10.0.0.9", "6.6.6.6|1.2.3.4", "1.2.3.4"),  # two headers
    ],
)
def test_only_trusted_proxies_say_where_a_request_came_from(peer: str, forwarded: str, source: str) -> None:
    assert source_address(peer, forwarded.split("|"), ["10.0.0.0/8"]) == source
    assert source_address(peer, forwarded.split("|"), []) == peer


def test_addresses_within_networks() -> None:
    assert within("10.1.2.3", ["10.0.0.0/8"])
    assert within("::ffff:10.1.2.3", ["10.0.0.0/8"])
    assert within("2001:db8::1", ["10.0.0.0/8", "2001:db8::/32"])
    for source in ("11.1.2.3", "::1", "nonsense", "", None):
        assert not within(source, ["10.0.0.0/8"])
