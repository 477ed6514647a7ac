"""What is sent and when: lengths, prompts and arrivals, all from one seed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from control_plane.errors import InvalidInput

_WORDS = tuple(
    """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother
    area money story fact month lot right study book eye job word business issue side kind head house service friend
    father power hour game line end member law car city community name president team minute idea body information
    back parent face others level office door health person art war history party result change morning reason
    research girl guy moment air teacher force education
    """.split()  # noqa: SIM905
)

_FIXED = re.compile(r"\d+")
_RANGE = re.compile(r"(\d+)-(\d+)")
_NORMAL = re.compile(r"(\d+)~(\d+)")


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts: `128`, `64-256` (uniform) or `128~32` (normal, mean and deviation)."""

    low: int
    high: int
    mean: float = 0.0
    deviation: float = 0.0

    @staticmethod
    def parse(text: str, name: str) -> Lengths:
        text = text.strip()
        if _FIXED.fullmatch(text):
            lengths = Lengths(int(text), int(text))
        elif match := _RANGE.fullmatch(text):
            lengths = Lengths(int(match[1]), int(match[2]))
        elif match := _NORMAL.fullmatch(text):
            mean, deviation = int(match[1]), int(match[2])
            lengths = Lengths(1, mean + 4 * deviation, mean, deviation)
        else:
            raise InvalidInput(f"{name} must be a number, a range like 64-256, or mean~deviation, not {text!r}")
        if not 1 <= lengths.low <= lengths.high <= 1_000_000:
            raise InvalidInput(f"{name} must lie between 1 and 1,000,000 tokens, not {text!r}")
        return lengths

    def draw(self, chance: random.Random) -> int:
        if self.deviation:
            return min(max(round(chance.gauss(self.mean, self.deviation)), self.low), self.high)
        return chance.randint(self.low, self.high)


@dataclass(frozen=True)
class Request:
    """One request to send. `at`: seconds after the start (open loop only)."""

    number: int
    prompt: str
    max_tokens: int
    at: float = 0.0


@dataclass(frozen=True)
class Workload:
    """How requests are made. `shared_prefix`: words that all prompts begin with; `words_per_token` corrects for the
    tokenizer, of which the driver knows nothing."""

    inputs: Lengths
    outputs: Lengths
    shared_prefix: int = 0
    words_per_token: float = 1.0
    seed: int = 0

    def requests(self, arrivals: Iterator[float] | None = None) -> Iterator[Request]:
        """Endless, or as many as there are arrivals."""
        chance = random.Random(self.seed)
        prefix = [chance.choice(_WORDS) for _ in range(self.shared_prefix)]
        for number, at in enumerate(arrivals if arrivals is not None else _forever()):
            words = max(round(self.inputs.draw(chance) * self.words_per_token) - len(prefix), 1)
            own = [chance.choice(_WORDS) for _ in range(words)]
            yield Request(number, " ".join([*prefix, *own]), self.outputs.draw(chance), at)


def _forever() -> Iterator[float]:
    while True:
        yield 0.0


def poisson(rate: float, duration: float, seed: int) -> Iterator[float]:
    """Arrival times of a Poisson process of `rate` a second for `duration` seconds."""
    chance = random.Random(seed + 1)
    at = chance.expovariate(rate)
    while at < duration:
        yield at
        at += chance.expovariate(rate)


def trace(path: Path) -> list[tuple[float, int, int]]:
    """(seconds, input tokens, output tokens) from JSON lines with `timestamp`, `input_length`, `output_length`.

    Timestamps are in milliseconds, as in the published Mooncake traces. Raises InvalidInput naming the line.
    """
    rows: list[tuple[float, int, int]] = []
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise InvalidInput(f"cannot read the trace {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append((float(row["timestamp"]) / 1000, int(row["input_length"]), int(row["output_length"])))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"{path} line {number}: needs timestamp (ms), input_length and output_length") from error
    if not rows:
        raise InvalidInput(f"the trace {path} is empty")
    first = min(row[0] for row in rows)
    return sorted((at - first, ins, outs) for at, ins, outs in rows)


def from_trace(path: Path, workload: Workload) -> Iterator[Request]:
    chance = random.Random(workload.seed)
    for number, (at, inputs, outputs) in enumerate(trace(path)):
        words = max(round(inputs * workload.words_per_token), 1)
        yield Request(number, " ".join(chance.choice(_WORDS) for _ in range(words)), max(outputs, 1), at)
