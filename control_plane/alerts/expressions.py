"""Expressions over time series, read in two ways: `promql` writes them for Prometheus, `value` works them out here.

Only what the catalogue needs. Values are by labels: a vector, as in PromQL. Times and windows are in seconds; `scale`
shortens every window, so that a test sees in seconds what takes hours.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol

Labels = tuple[tuple[str, str], ...]
"""Names and values, by name; none is empty."""
Vector = dict[Labels, float]
Points = Sequence[tuple[float, float]]

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "==": operator.eq,
}  # fmt: skip
_AGGREGATE: Mapping[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}
_LOOK_BACK = 300.0


class Samples(Protocol):
    """Where series come from."""

    def latest(self, name: str, at: float, look_back: float) -> Iterable[tuple[Labels, float]]:
        """Each series of `name` with its value at `at`: that of its last sample of the `look_back` seconds before."""

    def between(self, name: str, start: float, end: float) -> Iterable[tuple[Labels, Points]]:
        """Each series of `name` with its samples in `[start, end]`, in order."""


@dataclass(frozen=True, slots=True)
class Context:
    samples: Samples
    now: float
    scale: float = 1.0


def labels_of(pairs: Mapping[str, str]) -> Labels:
    return tuple(sorted((name, value) for name, value in pairs.items() if value))


def duration(seconds: float, scale: float = 1.0) -> str:
    """As Prometheus writes it, in the largest unit that leaves it whole."""
    ms = round(seconds * scale * 1000)
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"


class Expression(ABC):
    @abstractmethod
    def promql(self, scale: float = 1.0) -> str: ...

    @abstractmethod
    def value(self, context: Context) -> Vector: ...

    @abstractmethod
    def names(self) -> set[str]:
        """The metrics that it reads."""

    def __add__(self, other: Expression | float) -> Expression:
        return Binary("+", self, other)

    def __sub__(self, other: Expression | float) -> Expression:
        return Binary("-", self, other)

    def __mul__(self, other: Expression | float) -> Expression:
        return Binary("*", self, other)

    def __truediv__(self, other: Expression | float) -> Expression:
        return Binary("/", self, other)

    def __gt__(self, other: Expression | float) -> Expression:
        return Binary(">", self, other)

    def __ge__(self, other: Expression | float) -> Expression:
        return Binary(">=", self, other)

    def __lt__(self, other: Expression | float) -> Expression:
        return Binary("<", self, other)

    def equals(self, other: Expression | float) -> Expression:
        return Binary("==", self, other)

    def __and__(self, other: Expression) -> Expression:
        return Binary("and", self, other)

    def __or__(self, other: Expression) -> Expression:
        return Binary("or", self, other)

    def unless(self, other: Expression) -> Expression:
        return Binary("unless", self, other)


@dataclass(frozen=True, slots=True)
class Match:
    """A label's value: exactly `text`, or (not) one of several separated by `|`. A missing label is empty."""

    text: str
    kind: Literal["=", "!=", "=~"] = "="

    def accepts(self, value: str) -> bool:
        if self.kind == "=~":
            return value in self.text.split("|")
        return (value == self.text) == (self.kind == "=")


ANY = Match("", "!=")
NONE = Match("")


@dataclass(frozen=True)
class Series(Expression):
    """A metric as it is now, or as it was `before` seconds ago."""

    name: str
    where: Mapping[str, Match] = field(default_factory=dict)
    before: float = 0.0

    def selector(self) -> str:
        inner = ",".join(f'{label}{match.kind}"{match.text}"' for label, match in self.where.items())
        return f"{self.name}{{{inner}}}" if inner else self.name

    def accepts(self, labels: Labels) -> bool:
        found = dict(labels)
        return all(match.accepts(found.get(label, "")) for label, match in self.where.items())

    def promql(self, scale: float = 1.0) -> str:
        return self.selector() + (f" offset {duration(self.before, scale)}" if self.before else "")

    def value(self, context: Context) -> Vector:
        at = context.now - self.before * context.scale
        found = context.samples.latest(self.name, at, _LOOK_BACK * context.scale)
        return {labels: value for labels, value in found if self.accepts(labels)}

    def names(self) -> set[str]:
        return {self.name}


Over_ = Literal["rate", "increase", "avg_over_time", "max_over_time", "min_over_time"]


@dataclass(frozen=True)
class Over(Expression):
    """A function of the last `seconds` of a series. Counters that began anew are counted on."""

    function: Over_
    series: Series
    seconds: float

    def promql(self, scale: float = 1.0) -> str:
        before = f" offset {duration(self.series.before, scale)}" if self.series.before else ""
        return f"{self.function}({self.series.selector()}[{duration(self.seconds, scale)}]{before})"

    def value(self, context: Context) -> Vector:
        end = context.now - self.series.before * context.scale
        found = context.samples.between(self.series.name, end - self.seconds * context.scale, end)
        result: Vector = {}
        for labels, points in found:
            value = self._of(points) if self.series.accepts(labels) else None
            if value is not None:
                result[labels] = value
        return result

    def _of(self, points: Points) -> float | None:
        values = [value for _, value in points]
        if self.function == "avg_over_time":
            return sum(values) / len(values) if values else None
        if self.function == "max_over_time":
            return max(values, default=None)
        if self.function == "min_over_time":
            return min(values, default=None)
        if len(values) < 2:
            return None
        grown = sum(now - then if now >= then else now for then, now in pairwise(values))
        elapsed = points[-1][0] - points[0][0]
        return grown / elapsed if self.function == "rate" else grown

    def names(self) -> set[str]:
        return self.series.names()


@dataclass(frozen=True)
class Aggregate(Expression):
    """One value for each combination of the labels `by`."""

    operation: Literal["sum", "max", "min"]
    of: Expression
    by: tuple[str, ...]

    def promql(self, scale: float = 1.0) -> str:
        return f"{self.operation} by ({', '.join(self.by)}) ({self.of.promql(scale)})"

    def value(self, context: Context) -> Vector:
        groups: dict[Labels, list[float]] = {}
        for labels, value in self.of.value(context).items():
            groups.setdefault(tuple(pair for pair in labels if pair[0] in self.by), []).append(value)
        return {labels: _AGGREGATE[self.operation](values) for labels, values in groups.items()}

    def names(self) -> set[str]:
        return self.of.names()


@dataclass(frozen=True)
class Binary(Expression):
    """Two vectors with the same labels, or a vector and a number."""

    sign: str
    left: Expression
    right: Expression | float

    def promql(self, scale: float = 1.0) -> str:
        right = f"{self.right:g}" if isinstance(self.right, int | float) else _grouped(self.right, scale)
        return f"{_grouped(self.left, scale)} {self.sign} {right}"

    def value(self, context: Context) -> Vector:
        left = self.left.value(context)
        right = self.right if isinstance(self.right, int | float) else self.right.value(context)
        if isinstance(right, dict):
            if self.sign == "and":
                return {labels: value for labels, value in left.items() if labels in right}
            if self.sign == "unless":
                return {labels: value for labels, value in left.items() if labels not in right}
            if self.sign == "or":
                return {**right, **left}
        result: Vector = {}
        for labels, one in left.items():
            other = right.get(labels) if isinstance(right, dict) else right
            if other is None:
                continue
            if self.sign in _COMPARE:
                if _COMPARE[self.sign](one, other):
                    result[labels] = one
            elif self.sign == "/":
                if other:
                    result[labels] = one / other
            else:
                result[labels] = {"+": one + other, "-": one - other, "*": one * other}[self.sign]
        return result

    def names(self) -> set[str]:
        right = set() if isinstance(self.right, int | float) else self.right.names()
        return self.left.names() | right


@dataclass(frozen=True)
class SecondsUntil(Expression):
    """How far ahead of now a series of times (seconds since the epoch) is."""

    of: Expression

    def promql(self, scale: float = 1.0) -> str:
        return f"{_grouped(self.of, scale)} - time()"

    def value(self, context: Context) -> Vector:
        return {labels: value - context.now for labels, value in self.of.value(context).items()}

    def names(self) -> set[str]:
        return self.of.names()


@dataclass(frozen=True)
class Absent(Expression):
    """1 where there is no such series at all."""

    series: Series

    def promql(self, scale: float = 1.0) -> str:
        return f"absent({self.series.promql(scale)})"

    def value(self, context: Context) -> Vector:
        return {} if self.series.value(context) else {(): 1.0}

    def names(self) -> set[str]:
        return self.series.names()


def _grouped(expression: Expression, scale: float) -> str:
    text = expression.promql(scale)
    return f"({text})" if isinstance(expression, Binary | SecondsUntil) else text


def reach(expression: Expression) -> float:
    """How many seconds of the past an expression looks at."""
    match expression:
        case Series(before=before):
            return before
        case Over(series=series, seconds=seconds):
            return series.before + seconds
        case Aggregate(of=inner) | SecondsUntil(of=inner):
            return reach(inner)
        case Absent(series=series):
            return series.before
        case Binary(left=left, right=right):
            return max(reach(left), 0.0 if isinstance(right, int | float) else reach(right))
    raise TypeError(f"{type(expression).__name__} is no expression of ours")
