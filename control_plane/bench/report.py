"""From outcomes to figures: percentiles, rates, goodput, a table, JSON and a plot."""

from __future__ import annotations

import html
import math
from collections import Counter
from dataclasses import asdict, dataclass

from control_plane.bench.driver import Outcome
from control_plane.errors import InvalidInput


@dataclass(frozen=True)
class Slo:
    """A request is good when its TTFT and mean TPOT stay within these seconds."""

    ttft: float = math.inf
    tpot: float = math.inf

    @staticmethod
    def parse(text: str) -> Slo:
        """`ttft=0.5,tpot=0.05`, in seconds."""
        bounds: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            try:
                bounds[name.strip()] = float(value)
            except ValueError as error:
                raise InvalidInput(f"--slo must be like ttft=0.5,tpot=0.05 in seconds, not {text!r}") from error
        if set(bounds) - {"ttft", "tpot"}:
            raise InvalidInput(f"--slo knows ttft and tpot, not {text!r}")
        return Slo(**bounds)

    def holds(self, outcome: Outcome) -> bool:
        return not outcome.error and outcome.ttft <= self.ttft and outcome.tpot <= self.tpot


@dataclass(frozen=True)
class Spread:
    """Milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Summary:
    """One run's figures. Rates are over the time from the first request sent to the last one's end."""

    label: str
    requests: int
    errors: int
    error_kinds: dict[str, int]
    seconds: float
    input_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def summarize(label: str, outcomes: list[Outcome], slo: Slo) -> Summary:
    if not outcomes:
        raise InvalidInput("no request was sent: raise --requests, --rate or --duration")
    good = [outcome for outcome in outcomes if not outcome.error]
    seconds = max(outcome.ended for outcome in outcomes) - min(outcome.sent for outcome in outcomes)
    inputs, outputs = sum(o.input_tokens for o in good), sum(o.output_tokens for o in good)
    return Summary(
        label=label,
        requests=len(outcomes),
        errors=len(outcomes) - len(good),
        error_kinds=dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        seconds=round(seconds, 3),
        input_tokens=inputs,
        output_tokens=outputs,
        output_tokens_per_s=round(outputs / seconds, 2),
        total_tokens_per_s=round((inputs + outputs) / seconds, 2),
        requests_per_s=round(len(good) / seconds, 3),
        goodput_per_s=round(sum(slo.holds(outcome) for outcome in outcomes) / seconds, 3),
        ttft_ms=spread([outcome.ttft for outcome in good]),
        tpot_ms=spread([outcome.tpot for outcome in good if outcome.output_tokens > 1]),
        itl_ms=spread([gap for outcome in good for gap in outcome.gaps]),
        e2e_ms=spread([outcome.ended - outcome.sent for outcome in good]),
    )


def percentile(ordered: list[float], share: float) -> float:
    """By linear interpolation between closest ranks, as numpy does."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * share
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(seconds: list[float]) -> Spread:
    ordered = sorted(seconds)
    mean = sum(ordered) / len(ordered) if ordered else 0.0
    values = (mean, percentile(ordered, 0.5), percentile(ordered, 0.95), percentile(ordered, 0.99))
    return Spread(*(round(value * 1000, 3) for value in values))


ROW = ("load", "requests", "errors", "tokens/s", "req/s", "goodput/s", "TTFT p50", "TTFT p95", "TTFT p99", "TPOT p50",
       "ITL p50", "ITL p95", "ITL p99")  # fmt: skip


def row(summary: Summary) -> tuple[str, ...]:
    """The figures of `ROW`, times in milliseconds."""
    times = (
        summary.ttft_ms.p50, summary.ttft_ms.p95, summary.ttft_ms.p99, summary.tpot_ms.p50,
        summary.itl_ms.p50, summary.itl_ms.p95, summary.itl_ms.p99,
    )  # fmt: skip
    return (
        summary.label,
        str(summary.requests),
        str(summary.errors),
        f"{summary.output_tokens_per_s:.1f}",
        f"{summary.requests_per_s:.2f}",
        f"{summary.goodput_per_s:.2f}",
        *(f"{value:.1f}" for value in times),
    )


def plot(title: str, summaries: list[Summary]) -> str:
    """An HTML page with one picture: TTFT and TPOT (p50, p99) against output tokens a second."""
    lines = [
        ("TTFT p50", "#1f6feb", [(s.output_tokens_per_s, s.ttft_ms.p50) for s in summaries]),
        ("TTFT p99", "#a371f7", [(s.output_tokens_per_s, s.ttft_ms.p99) for s in summaries]),
        ("TPOT p50", "#2da44e", [(s.output_tokens_per_s, s.tpot_ms.p50) for s in summaries]),
        ("TPOT p99", "#bf8700", [(s.output_tokens_per_s, s.tpot_ms.p99) for s in summaries]),
    ]
    right = max((x for _, _, points in lines for x, _ in points), default=1.0) or 1.0
    values = [max(y, 0.1) for _, _, points in lines for _, y in points] or [1.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
    high = max(high, low + 1)

    def at(x: float, y: float) -> tuple[float, float]:
        share = (math.log10(max(y, 10**low)) - low) / (high - low)
        return 70 + 680 * x / right, 390 - 340 * share

    parts = []
    for power in range(low, high + 1):
        _, y = at(0, 10**power)
        parts.append(f'<line x1="70" x2="750" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>')
        parts.append(f'<text x="62" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} ms</text>')
    for step in range(5):
        x = 70 + 680 * step / 4
        parts.append(f'<text x="{x:.1f}" y="412" text-anchor="middle">{right * step / 4:.0f}</text>')
    for place, (name, color, points) in enumerate(lines):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in (at(*p) for p in points)]
        parts.append(f'<text x="{90 + 110 * place}" y="30" fill="{color}">{name}</text>')
    safe = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{safe}</title>'
        "<style>body{font:14px system-ui;margin:2rem;color-scheme:light dark}svg{max-width:100%}"
        "text{font:12px system-ui;fill:currentColor}</style>"
        f'<h1>{safe}</h1><svg viewBox="0 0 780 440" role="img" aria-label="Latency against load">{"".join(parts)}'
        '<text x="410" y="434" text-anchor="middle">output tokens a second</text></svg></html>\n'
    )
