"""Which rung of warmth meets a wait, at what price. Pure.

A rung that was never measured is estimated from the phases of a cold start: an ember has imported, one that is asleep
has loaded too, one that is hot has only the first step to do. What was measured replaces that as soon as there is any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles

from control_plane.domain import Rung
from control_plane.metering.prices import NANO, PriceBook

SHARES = {Rung.COLD: 0.0, Rung.EMBER: 0.02, Rung.ASLEEP: 0.1, Rung.HOT: 1.0}
"""Of what an accelerator costs while it serves: what a resting replica costs where the price book doesn't say.

An assumption, for the memory of its host; whose accelerators stay rented while replicas rest pays all of it.
`TYPE/ember` and `TYPE/asleep` in the price book replace it.
"""
_IMPORTS = ("start", "import")
_LOADS = ("start", "import", "open", "load", "text")
FIRST_STEP = "first_step"
"""Of a cold start whose replica had to prove itself: how long that took to its one token."""
_TURNS_MS = 200.0
"""What the control plane's part of a wake is taken for, before any was measured: two turns of its loop."""
_MANY = 5
"""Measurements from which a percentile is taken; the greatest, of fewer."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way from a rung to ready: milliseconds in all and by phase."""

    total_ms: float
    phases: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Milliseconds to first tokens: of requests that found a replica ready, and of held ones from when they had one."""

    ready: Sequence[float] = ()
    held: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class RungFigures:
    """`first_token_ms`: from a request that finds the endpoint there to its first token. None where nothing tells."""

    rung: Rung
    price_per_hour: float
    measured: int
    """How many ways the figures come from; 0 is an estimate."""
    first_token_ms: float | None
    p95_ms: float | None
    phases: Mapping[str, float] = field(default_factory=dict)
    """Means, in milliseconds."""


def price_per_hour(book: PriceBook, accelerator: str | None, count: int, rung: Rung) -> float:
    """In the book's currency."""
    kind = accelerator or "cpu"
    own = book.accelerators.get(f"{kind}/{rung}", book.accelerators.get(f"*/{rung}"))
    if own is not None:
        return own * max(1, count)
    return SHARES[rung] * book.hours_nano(accelerator, 1.0, count) / NANO


def figures(
    ways: Mapping[Rung, Sequence[Way]], tokens: FirstTokens, book: PriceBook, accelerator: str | None, count: int
) -> list[RungFigures]:
    """By rung, coldest first."""
    starts = ways.get(Rung.COLD, ())
    proofs = [way.phases[FIRST_STEP] for way in starts if FIRST_STEP in way.phases]
    steps = tokens.ready or tokens.held or proofs
    first_step = _median(steps)
    unproved = [_unproved(way) for way in starts]
    found = []
    for rung in Rung:
        price = price_per_hour(book, accelerator, count, rung)
        if rung is Rung.HOT:
            found.append(RungFigures(rung, price, len(tokens.ready), first_step, _high(steps), _step(first_step)))
            continue
        own = unproved if rung is Rung.COLD else ways.get(rung, ())
        used = own or [_estimate(way, rung) for way in unproved]
        totals = [way.total_ms for way in used]
        middle, high = _median(totals), _high(totals)
        step = first_step or 0.0
        found.append(
            RungFigures(
                rung,
                price,
                len(own),
                None if middle is None else middle + step,
                None if high is None else high + step,
                _mean_phases(used) | _step(first_step),
            )
        )
    return found


def choose(found: Sequence[RungFigures], max_wait: float) -> tuple[Rung, str]:
    """The cheapest rung that meets `max_wait` (seconds), and why that one."""
    known = [item for item in found if item.p95_ms is not None]
    if not any(item.rung is Rung.COLD for item in known):
        return Rung.COLD, "nothing was measured yet: looked at again after its first start"
    able = [item for item in known if item.p95_ms is not None and item.p95_ms <= max_wait * 1000]
    if not able:
        return Rung.HOT, f"no colder rung gives a first token within {max_wait:g} s"
    best = min(able, key=lambda item: (item.price_per_hour, list(Rung).index(item.rung)))
    how = f"p95 of {best.measured}" if best.measured else "estimated from cold starts"
    return best.rung, f"a first token after {(best.p95_ms or 0.0) / 1000:.3g} s ({how}), within {max_wait:g} s"


def _unproved(way: Way) -> Way:
    """Without the proof, which only the first replica of a generation gives."""
    left = {name: ms for name, ms in way.phases.items() if name != FIRST_STEP}
    return Way(way.total_ms - way.phases.get(FIRST_STEP, 0.0), left)


def _estimate(cold: Way, rung: Rung) -> Way:
    saved = _IMPORTS if rung is Rung.EMBER else _LOADS
    left = {name: ms for name, ms in cold.phases.items() if name not in saved}
    return Way(sum(left.values()) + _TURNS_MS, left)


def _step(first_step: float | None) -> dict[str, float]:
    return {} if first_step is None else {FIRST_STEP: round(first_step, 1)}


def _mean_phases(ways: Sequence[Way]) -> dict[str, float]:
    """What isn't in a phase of the replica's own is the control plane's: deciding, starting, seeing it ready."""
    if not ways:
        return {}
    sums: dict[str, float] = {}
    for way in ways:
        inner = {name: ms for name, ms in way.phases.items() if name != "total"}
        whole = way.phases.get("total", sum(inner.values()))
        sums["schedule"] = sums.get("schedule", 0.0) + max(0.0, way.total_ms - whole)
        for name, ms in inner.items():
            sums[name] = sums.get(name, 0.0) + ms
    return {name: round(total / len(ways), 1) for name, total in sums.items()}


def _median(values: Sequence[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _high(values: Sequence[float]) -> float | None:
    if len(values) < _MANY:
        return max(values, default=None)
    return quantiles(values, n=20, method="inclusive")[-1]
