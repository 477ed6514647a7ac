"""From what expressions say to what people are told. Pure: takes states and `now`, returns states and messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from control_plane.alerts.catalogue import Alert, Severity
from control_plane.alerts.expressions import Labels, Vector
from control_plane.domain import AlertState

PENDING, FIRING, RESOLVED = "pending", "firing", "resolved"
KEEP_RESOLVED = 7 * 86_400.0
MOST_OF_ONE = 100
"""Sets of labels of one alert that are taken up at once."""


@dataclass(frozen=True, slots=True)
class Outcome:
    changed: list[AlertState]
    gone: list[str]


@dataclass(frozen=True, slots=True)
class Receiver:
    """What of a receiver decides what it is told."""

    name: str
    severities: frozenset[Severity] = frozenset(Severity)
    resolved: bool = True


@dataclass(frozen=True, slots=True)
class Message:
    receiver: str
    state: AlertState
    over: bool


def fingerprint(alert: str, labels: Mapping[str, str]) -> str:
    text = json.dumps([alert, sorted(labels.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def advance(
    states: Mapping[str, AlertState],
    found: Sequence[tuple[Alert, Vector]],
    now: float,
    *,
    scale: float = 1.0,
    patience: float,
    began: float = 0.0,
    blind: frozenset[str] = frozenset(),
) -> Outcome:
    """One evaluation. `states` by fingerprint; an alert ends when it was not seen for `patience` seconds.

    `blind` are alerts that can't be judged yet, since too little of the past is known since `began`: what another
    process fired of them, and we never saw, doesn't end.
    """
    changed: list[AlertState] = []
    seen: set[str] = set()
    for alert, vector in found:
        for labels, value in sorted(vector.items())[:MOST_OF_ONE]:
            after = _seen(states, alert, labels, value, now, scale)
            seen.add(after.fingerprint)
            changed.append(after)
    gone: list[str] = []
    for state in states.values():
        if state.fingerprint in seen or (state.alert in blind and state.seen_at < began):
            continue
        if state.state == PENDING:
            gone.append(state.fingerprint)
        elif state.state == FIRING and now - state.seen_at >= patience:
            changed.append(replace(state, state=RESOLVED, resolved_at=now))
        elif state.state == RESOLVED and now - (state.resolved_at or 0.0) > KEEP_RESOLVED:
            gone.append(state.fingerprint)
    return Outcome(changed, gone)


def _seen(
    states: Mapping[str, AlertState], alert: Alert, labels: Labels, value: float, now: float, scale: float
) -> AlertState:
    named = dict(labels)
    key = fingerprint(alert.name, named)
    before = states.get(key)
    told = {} if before is None else before.told
    if before is None or before.state == RESOLVED:
        before = AlertState(key, alert.name, named, PENDING, value, "", now, now, told=told)
    state, fired_at = before.state, before.fired_at
    if state == PENDING and now - before.since >= alert.lasting * scale:
        state, fired_at = FIRING, now
    return replace(
        before, state=state, fired_at=fired_at, seen_at=now, value=value, summary=alert.describe(named, value)
    )


def due(
    states: Iterable[AlertState],
    severities: Mapping[str, Severity],
    receivers: Sequence[Receiver],
    silences: Sequence[Mapping[str, str]],
) -> list[Message]:
    """What each receiver has yet to hear. Of one firing it hears once, and of its end only if it heard of it."""
    messages: list[Message] = []
    for state in states:
        silent = any(matches(silence, state) for silence in silences)
        severity = severities.get(state.alert)
        for receiver in receivers:
            told = state.told.get(receiver.name)
            if state.state == FIRING and not silent and severity in receiver.severities and told != state.fired_at:
                messages.append(Message(receiver.name, state, over=False))
            elif state.state == RESOLVED and receiver.resolved and told is not None and told == state.fired_at:
                messages.append(Message(receiver.name, state, over=True))
    return messages


def after_telling(state: AlertState, receivers: Iterable[str], *, over: bool) -> AlertState:
    """Remember that `receivers` know."""
    fired_at = state.fired_at or 0.0
    return replace(state, told={**state.told, **dict.fromkeys(receivers, -fired_at if over else fired_at)})


def matches(silence: Mapping[str, str], state: AlertState) -> bool:
    """Whether all that `silence` names is so: `alert`, or a label."""
    facts = {**state.labels, "alert": state.alert}
    return bool(silence) and all(facts.get(name) == value for name, value in silence.items())
