"""Requests over time: read from a trace, or made from a profile and a seed. Kept as arrays, 16 bytes a request."""

from __future__ import annotations

import csv
import json
import math
import random
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane.errors import InvalidInput

MOST_REQUESTS = 5_000_000
_MOST_TOKENS = 10_000_000
_LONGEST_LINE = 65_536
DAY = 86_400.0
_CELL = 10.0
"""Seconds for which a profile's rate stands still."""


class Traffic:
    """Requests by their arrival: seconds since the first moment, tokens in, tokens out."""

    def __init__(self) -> None:
        self.at = array("d")
        self.inputs = array("I")
        self.outputs = array("I")

    def __len__(self) -> int:
        return len(self.at)

    def add(self, at: float, inputs: int, outputs: int) -> None:
        self.at.append(at)
        self.inputs.append(inputs)
        self.outputs.append(outputs)

    @property
    def seconds(self) -> float:
        """Until the last arrival, in whole hours: the time that is paid for."""
        return math.ceil((self.at[-1] + 1) / 3600) * 3600.0 if self.at else 0.0

    def mean_context(self) -> float:
        """Tokens that a sequence has on average while it runs."""
        count = max(1, len(self.at))
        return (sum(self.inputs) + sum(self.outputs) / 2) / count

    def sorted(self) -> Traffic:
        """The same by time, counted from the first arrival."""
        order = sorted(range(len(self.at)), key=self.at.__getitem__)
        found = Traffic()
        first = self.at[order[0]] if order else 0.0
        for place in order:
            found.add(self.at[place] - first, self.inputs[place], self.outputs[place])
        return found


@dataclass(frozen=True, slots=True)
class Profile:
    """Traffic in words: `rate` is the week's mean in requests a second, `hours` how a day's hours relate.

    Lengths are log-normal about their means with a deviation of `spread`. Bursts come at random times of the waking
    hours, multiply the rate by `burst_factor`, and last `burst_seconds` on average.
    """

    rate: float
    input_tokens: int
    output_tokens: int
    hours: tuple[float, ...] = (1.0,) * 24
    weekend: float = 1.0
    spread: float = 0.6
    bursts_per_day: float = 0.0
    burst_factor: float = 8.0
    burst_seconds: float = 120.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("rate", 1e-6, 10_000.0), ("input_tokens", 1, _MOST_TOKENS), ("output_tokens", 1, _MOST_TOKENS),
            ("weekend", 0.0, 100.0), ("spread", 0.0, 3.0), ("bursts_per_day", 0.0, 10_000.0),
            ("burst_factor", 1.0, 1000.0), ("burst_seconds", 1.0, DAY),
        ):  # fmt: skip
            if not low <= getattr(self, name) <= high:
                raise InvalidInput(f"{name} must lie between {low:g} and {high:g}", param=name)
        if len(self.hours) != 24 or min(self.hours) < 0 or sum(self.hours) <= 0:
            raise InvalidInput("hours must be 24 numbers, none below 0 and not all 0", param="hours")


DAILY = (0.1, 0.04, 0.02, 0.01, 0.01, 0.03, 0.15, 0.5, 1.0, 1.6, 1.9, 1.9, 1.6, 1.7, 1.9, 1.9, 1.7, 1.4, 1.1, 0.9, 0.8,
         0.6, 0.4, 0.2)  # fmt: skip
"""People of one time zone: busy by day, a few in the evening, hardly anyone at night."""
OFFICE = (0, 0, 0, 0, 0, 0, 0.1, 0.6, 1.6, 2.4, 2.6, 2.3, 1.5, 2.2, 2.6, 2.4, 1.9, 1.0, 0.3, 0.1, 0, 0, 0, 0)
SHAPES: Mapping[str, tuple[float, ...]] = {"flat": (1.0,) * 24, "daily": DAILY, "office": OFFICE}


def generate(profile: Profile, days: float, seed: int) -> Traffic:
    """Arrivals from a Monday's midnight on. The same seed gives the same ones. Raises InvalidInput."""
    if not 0 < days <= 366:
        raise InvalidInput(f"days must lie above 0 and up to 366, not {days:g}", param="days")
    if profile.rate * days * DAY > MOST_REQUESTS:
        raise InvalidInput(f"rate: that is over {MOST_REQUESTS:,} requests; ask for fewer days", param="rate")
    chance = random.Random(seed)  # noqa: S311 -- traffic is drawn from a seed, not from secrets
    bursts = _bursts(profile, days, chance)
    weights = [_weight(profile, cell * _CELL, bursts) for cell in range(math.ceil(days * DAY / _CELL))]
    unit = profile.rate * len(weights) / sum(weights)
    found = Traffic()
    due, passed = chance.expovariate(1.0), 0.0
    for cell, weight in enumerate(weights):
        mass = weight * unit * _CELL
        while passed + mass > due and len(found) < MOST_REQUESTS:
            at = (cell + (due - passed) / mass) * _CELL
            found.add(at, _length(profile.input_tokens, profile.spread, chance),
                      _length(profile.output_tokens, profile.spread, chance))  # fmt: skip
            due += chance.expovariate(1.0)
        passed += mass
    if not found:
        raise InvalidInput("rate: no request comes in that time; ask for more days", param="rate")
    return found


def _bursts(profile: Profile, days: float, chance: random.Random) -> list[tuple[float, float]]:
    """(start, end) of each burst, by start; as many by the hour as the hour's weight says."""
    if not profile.bursts_per_day:
        return []
    starts, at = [], 0.0
    peak = max(profile.hours)
    mean = sum(profile.hours) / 24
    while True:
        at += chance.expovariate(profile.bursts_per_day * peak / mean / DAY)
        if at >= days * DAY:
            break
        if chance.random() < profile.hours[int(at % DAY // 3600)] / peak:
            starts.append((at, at + chance.expovariate(1 / profile.burst_seconds)))
    return starts


def _weight(profile: Profile, at: float, bursts: list[tuple[float, float]]) -> float:
    while bursts and bursts[0][1] <= at:
        bursts.pop(0)
    weight = profile.hours[int(at % DAY // 3600)] * (profile.weekend if int(at // DAY) % 7 >= 5 else 1.0)
    return weight * (profile.burst_factor if bursts and bursts[0][0] <= at else 1.0)


def _length(mean: int, spread: float, chance: random.Random) -> int:
    if not spread:
        return mean
    drawn = chance.lognormvariate(math.log(mean) - spread * spread / 2, spread)
    return max(1, min(_MOST_TOKENS, round(drawn)))


_COLUMNS: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = (
    ("arrival_s", (("arrival_s", 1.0), ("timestamp", 0.001))),
    ("input_tokens", (("input_tokens", 1.0), ("input_length", 1.0))),
    ("output_tokens", (("output_tokens", 1.0), ("output_length", 1.0))),
)
"""Names of a field, and what a value of it is multiplied by: Mooncake's traces count in milliseconds."""


def read_trace(path: Path) -> Traffic:
    """A CSV file with a header, or JSON lines: `arrival_s`, `input_tokens`, `output_tokens`; other fields are let be.

    Mooncake's `timestamp` (milliseconds), `input_length` and `output_length` are taken too. Raises InvalidInput naming
    the line and the field.
    """
    found = Traffic()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = _lines(file.readline, path)
            rows = _json_rows(lines, path) if path.suffix in (".jsonl", ".ndjson", ".json") else _csv_rows(lines, path)
            for number, row in rows:
                if len(found) >= MOST_REQUESTS:
                    raise InvalidInput(f"{path} has over {MOST_REQUESTS:,} requests: split it", param="trace")
                found.add(*_request(row, f"{path} line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"cannot read the trace {path}: {error}", param="trace") from None
    if not found:
        raise InvalidInput(f"the trace {path} has no request in it", param="trace")
    return found.sorted()


def _lines(readline: Callable[[int], str], path: Path) -> Iterator[str]:
    number = 0
    while line := readline(_LONGEST_LINE):
        number += 1
        if len(line) >= _LONGEST_LINE:
            raise InvalidInput(f"{path} line {number} is longer than {_LONGEST_LINE} characters", param="trace")
        yield line


def _json_rows(lines: Iterator[str], path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise InvalidInput(f"{path} line {number} is not JSON", param="trace") from None
        if not isinstance(row, dict):
            raise InvalidInput(f"{path} line {number} is not a JSON object", param="trace")
        yield number, row


def _csv_rows(lines: Iterator[str], path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(lines)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise InvalidInput(f"{path} line {reader.line_num}: {error}", param="trace") from None


def _request(row: Mapping[str, Any], where: str) -> tuple[float, int, int]:
    values = []
    for field, names in _COLUMNS:
        name, unit = next(((name, unit) for name, unit in names if row.get(name) is not None), ("", 0.0))
        if not name:
            raise InvalidInput(f"{where}: {field} is missing", param=field)
        try:
            value = float(row[name]) * unit
        except (TypeError, ValueError):
            raise InvalidInput(f"{where}: {name} must be a number, not {str(row[name])[:40]!r}", param=field) from None
        least, most = (-1e12, 1e12) if field == "arrival_s" else (1, _MOST_TOKENS)
        if not least <= value <= most:
            raise InvalidInput(f"{where}: {name} must lie between {least:g} and {most:g}, not {value:g}", param=field)
        values.append(value)
    return values[0], int(values[1]), int(values[2])
