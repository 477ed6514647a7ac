from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from data_plane.text.stop import StopMatcher

SMALL = st.text("ab ", max_size=12)
STOPS = st.lists(st.text("ab ", min_size=1, max_size=4), max_size=4).map(tuple)


def cut(text: str, borders: list[int]) -> list[str]:
    places = sorted({0, len(text), *(border % (len(text) + 1) for border in borders)})
    return [text[start:end] for start, end in pairwise(places)]


def first_end(text: str, stops: tuple[str, ...]) -> str:
    """The text before the stop that is complete first: a longer one that began earlier may have lost the race."""
    for end in range(len(text) + 1):
        ended = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(ended)]
    return text


@given(SMALL, STOPS, st.lists(st.integers(0, 20), max_size=8))
@example("xaab", ("aab", "ab"), [1, 2, 3])
@example("abc", ("abc", "b"), [])
def test_what_comes_out_is_the_text_before_the_first_stop_however_it_is_cut(
    text: str, stops: tuple[str, ...], borders: list[int]
) -> None:
    matcher = StopMatcher(stops)
    pieces = cut(text, borders)
    sent = ""
    for piece in pieces:
        sent += matcher.feed(piece)
        assert first_end(text, stops).startswith(sent)
    sent += matcher.finish()
    assert sent == first_end(text, stops)
    assert (matcher.matched is not None) == any(stop in text for stop in stops)


@given(SMALL, STOPS)
def test_character_by_character_nothing_is_held_that_cannot_become_a_stop(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    sent = seen = ""
    for char in text:
        sent += matcher.feed(char)
        seen += char
        if matcher.matched is not None:
            break
        held = seen[len(sent) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_after_a_match_nothing_more_comes_out() -> None:
    matcher = StopMatcher(("STOP",))
    assert [matcher.feed(piece) for piece in ("one ST", "OP two", "three")] == ["one ", "", ""]
    assert matcher.finish() == ""
    assert matcher.matched == "STOP"


def test_a_near_miss_is_given_back_at_the_end() -> None:
    matcher = StopMatcher(("STOP\x01",))
    assert matcher.feed("one STOP") == "one "
    assert matcher.finish() == "STOP"
