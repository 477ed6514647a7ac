"""When an alert is pending, fires and ends, and who has yet to hear of it: tables, no clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.alerts.catalogue import CATALOGUE, Severity, alert, slug
from control_plane.alerts.expressions import Vector
from control_plane.alerts.states import (
    FIRING,
    KEEP_RESOLVED,
    MOST_OF_ONE,
    PENDING,
    RESOLVED,
    Receiver,
    advance,
    after_telling,
    due,
    fingerprint,
    matches,
)
from control_plane.domain import AlertState

FULL = alert("KvCacheExhausted")  # lasts 5 minutes
OOM = alert("OutOfMemory")  # at once
LABELS = (("endpoint", "chat"), ("region", "local-eu"))
SEEN: Vector = {LABELS: 0.99}
SEVERITIES = {item.name: item.severity for item in CATALOGUE}


def run(*looks: tuple[float, Vector], item: object = FULL, patience: float = 30.0) -> dict[str, AlertState]:
    states: dict[str, AlertState] = {}
    for now, vector in looks:
        outcome = advance(states, [(item, vector)], now, patience=patience)  # type: ignore[list-item]
        states |= {state.fingerprint: state for state in outcome.changed}
        for gone in outcome.gone:
            del states[gone]
    return states


def test_it_is_pending_before_it_fires() -> None:
    (state,) = run((0, SEEN), (299, SEEN)).values()
    assert (state.state, state.since, state.fired_at) == (PENDING, 0, None)
    (state,) = run((0, SEEN), (299, SEEN), (300, SEEN)).values()
    assert (state.state, state.since, state.fired_at) == (FIRING, 0, 300)
    assert state.summary == "chat in local-eu: 99 % of a replica's KV cache is in use"
    assert state.labels == {"endpoint": "chat", "region": "local-eu"}


def test_some_fire_at_once() -> None:
    (state,) = run((7, SEEN), item=OOM).values()
    assert (state.state, state.fired_at) == (FIRING, 7)


def test_what_passes_was_nothing() -> None:
    assert run((0, SEEN), (200, {})) == {}
    (state,) = run((0, SEEN), (200, {}), (215, SEEN), (350, SEEN)).values()
    assert (state.state, state.since) == (PENDING, 215)


def test_one_look_that_misses_it_ends_nothing() -> None:
    (state,) = run((0, SEEN), (300, SEEN), (315, {}), (330, SEEN)).values()
    assert (state.state, state.fired_at) == (FIRING, 300)
    (state,) = run((0, SEEN), (300, SEEN), (315, {}), (330, {})).values()
    assert (state.state, state.resolved_at) == (RESOLVED, 330)


def test_it_can_fire_again_and_is_then_news() -> None:
    (state,) = run((0, SEEN), (300, SEEN), (330, {}), (400, SEEN), (700, SEEN)).values()
    assert (state.state, state.since, state.fired_at, state.resolved_at) == (FIRING, 400, 700, None)


def test_resolved_ones_are_forgotten_in_the_end() -> None:
    before: tuple[tuple[float, Vector], ...] = ((0, SEEN), (300, SEEN), (330, {}))
    assert run(*before, (330 + KEEP_RESOLVED, {}))
    assert run(*before, (331 + KEEP_RESOLVED, {})) == {}


def test_what_cannot_be_judged_does_not_end() -> None:
    states = run((0, SEEN), (300, SEEN))
    blind = frozenset({FULL.name})
    assert advance(states, [(FULL, {})], 900, patience=30, began=500, blind=blind).changed == []
    # what we have seen ourselves we can judge
    assert advance(states, [(FULL, {})], 900, patience=30, began=100, blind=blind).changed
    (ended,) = advance(states, [(FULL, {})], 900, patience=30).changed
    assert ended.state == RESOLVED


def test_times_shrink_by_the_scale() -> None:
    first = advance({}, [(FULL, SEEN)], 0, scale=0.01, patience=1).changed
    (state,) = advance({first[0].fingerprint: first[0]}, [(FULL, SEEN)], 3, scale=0.01, patience=1).changed
    assert state.state == FIRING


def test_one_alert_has_a_bound_on_its_sets_of_labels() -> None:
    many: Vector = {(("endpoint", f"e{index:04}"), ("region", "r")): 1.0 for index in range(3 * MOST_OF_ONE)}
    assert len(run((0, many))) == MOST_OF_ONE


EVERYTHING = Receiver("ops")
CRITICAL = Receiver("pager", frozenset({Severity.CRITICAL}))
QUIET = Receiver("quiet", resolved=False)


@pytest.mark.parametrize(
    ("state", "told", "silences", "heard"),
    [
        (PENDING, {}, [], []),
        (FIRING, {}, [], [("ops", False), ("quiet", False)]),
        (FIRING, {"ops": 300.0}, [], [("quiet", False)]),
        (FIRING, {"ops": 300.0, "quiet": 300.0}, [], []),
        # it fires anew: 300 was another firing
        (FIRING, {"ops": -200.0, "quiet": 200.0}, [], [("ops", False), ("quiet", False)]),
        (FIRING, {}, [{"alert": "KvCacheExhausted"}], []),
        (FIRING, {}, [{"endpoint": "chat", "region": "local-eu"}], []),
        (FIRING, {}, [{"endpoint": "other"}], [("ops", False), ("quiet", False)]),
        (RESOLVED, {"ops": 300.0, "quiet": 300.0}, [], [("ops", True)]),
        (RESOLVED, {"ops": -300.0}, [], []),
        # nobody heard that it fired
        (RESOLVED, {}, [], []),
        # a silence that came after it fired doesn't hide its end
        (RESOLVED, {"ops": 300.0}, [{"alert": "KvCacheExhausted"}], [("ops", True)]),
    ],
)
def test_who_is_told(
    state: str, told: dict[str, float], silences: list[dict[str, str]], heard: list[tuple[str, bool]]
) -> None:
    key = fingerprint(FULL.name, dict(LABELS))
    one = AlertState(key, FULL.name, dict(LABELS), state, 1.0, "", 0.0, 300.0, 300.0, told=told)
    messages = due([one], SEVERITIES, [EVERYTHING, CRITICAL, QUIET], silences)
    assert [(message.receiver, message.over) for message in messages] == heard
    for message in messages:
        after = after_telling(one, [message.receiver], over=message.over)
        again = due([after], SEVERITIES, [EVERYTHING, CRITICAL, QUIET], silences)
        assert message.receiver not in [other.receiver for other in again]


def test_the_pager_hears_what_is_critical() -> None:
    (state,) = run((0, SEEN), item=OOM).values()
    assert [message.receiver for message in due([state], SEVERITIES, [CRITICAL], [])] == ["pager"]


def test_a_silence_of_nothing_silences_nothing() -> None:
    (state,) = run((0, SEEN), item=OOM).values()
    assert not matches({}, state)
    assert not matches({"endpoint": "chat", "alert": "RequestsFail"}, state)
    assert matches({"endpoint": "chat"}, replace(state, labels={"endpoint": "chat"}))


def test_fingerprints_tell_labels_apart() -> None:
    assert fingerprint("A", {"x": "1", "y": "2"}) == fingerprint("A", {"y": "2", "x": "1"})
    assert len({fingerprint("A", {"x": "1"}), fingerprint("B", {"x": "1"}), fingerprint("A", {"x": "2"})}) == 3
    assert slug("KvCacheExhausted") == "kv-cache-exhausted"
