from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.errors import Overloaded, RateLimited
from control_plane.gateway.limits import Limiter
from control_plane.gateway.snapshot import Key


def key(name: str, concurrency: int | None = None) -> Key:
    return Key(name, "t", "", None, concurrency)


def test_one_key_and_all_keys_are_bounded() -> None:
    limiter = Limiter(2, 3, 100)
    headers: dict[str, str] = {}
    with limiter.admit(key("a"), headers), limiter.admit(key("a"), headers):
        assert headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(RateLimited), limiter.admit(key("a"), headers):
            pass
        with limiter.admit(key("b", concurrency=1), headers), pytest.raises(Overloaded), limiter.admit(key("c"), {}):
            pass
        with pytest.raises(RateLimited), limiter.admit(key("b", 1), {}), limiter.admit(key("b", 1), {}):
            pass
    with limiter.admit(key("a"), headers):
        assert headers["x-ratelimit-remaining-requests"] == "1"


@given(st.lists(st.lists(st.integers(1, 60), max_size=4), max_size=20))
def test_memory_is_given_back_however_a_request_ends(bodies: list[list[int]]) -> None:
    limiter = Limiter(10, 10, 100)
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
