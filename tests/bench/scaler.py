"""A week's bursty trace under our scaler, beside a naive rule and Knative's: `python -m tests.bench.scaler`.

Each rule's free parameter, how many requests at once a replica should carry, is searched until the share of requests
that keep the bound is the same; then costs may be compared. All else is alike: the traffic, the replicas, the time of a
start, the idle time. Everything is from seeds and in simulated time, so the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

from control_plane.domain import Rung
from control_plane.planning.accelerators import catalogue
from control_plane.planning.fit import Machine, Precision, fit
from control_plane.planning.replay import Outcome, Replay, Rule, Speed, Starts, speed_of
from control_plane.planning.scaler import Ours, endpoint
from control_plane.planning.shapes import known_shapes
from control_plane.planning.traffic import DAILY, Profile, Traffic, generate
from tests.control_plane.planning.rules import Knative, Naive

MODEL, ACCELERATOR = "llama-3.1-8b-instruct", "L4"
IDLE, BOUND, MAX_WAIT = 300.0, 5.0, 120.0
RULES: dict[str, Callable[[float], Rule]] = {
    "ingle": lambda target: Ours(endpoint(target=target, idle_timeout=IDLE, max_wait=MAX_WAIT)),
    "naive": lambda target: Naive(target, IDLE),
    "knative": lambda target: Knative(target, IDLE),
}


@dataclass(frozen=True)
class Stage:
    """What all rules stand on."""

    traffic: Traffic
    speed: Speed
    starts: Starts
    price: float


@dataclass(frozen=True)
class Found:
    rule: str
    attain: float
    target: float
    outcome: Outcome
    cost: float


def stage(rate: float, days: float, seed: int) -> Stage:
    """A daily cycle with quiet nights, weekends, and a dozen bursts a day of eight times the rate."""
    profile = Profile(rate, 600, 200, hours=DAILY, weekend=0.4, bursts_per_day=12, burst_factor=8)
    traffic = generate(profile, days, seed)
    accelerator = catalogue().find(ACCELERATOR)
    assert accelerator is not None
    assert accelerator.price_per_hour is not None
    machine = Machine(accelerator, 1, catalogue().efficiency["gpu"])
    found = fit(known_shapes()[MODEL], Precision.BFLOAT16, 8192, machine)
    cold = catalogue().starts["gpu"].seconds(Rung.COLD, found.weights)
    return Stage(traffic, speed_of(found, traffic.mean_context()), Starts(cold), accelerator.price_per_hour)


def cheapest(on: Stage, rule: str, attain: float, rounds: int, low: float = 1.0, high: float = 120.0) -> Found | None:
    """The greatest target between `low` and `high` for which `attain` of the requests keep the bound, by bisection.

    None where none does.
    """
    best = None
    for _ in range(rounds):
        target = math.sqrt(low * high)
        outcome = Replay(on.traffic, on.speed, on.starts, RULES[rule](target), bound=BOUND, max_wait=MAX_WAIT).run()
        if outcome.within >= attain:
            low = target
            best = Found(rule, attain, round(target, 2), outcome, outcome.replica_hours * on.price)
        else:
            high = target
    return best


def line(found: Found) -> str:
    outcome = found.outcome
    return (
        f"{found.rule:8} {found.target:7.1f} {outcome.within:8.4f} {outcome.ttft_p50:7.2f} {outcome.ttft_p95:7.2f}"
        f" {outcome.starts:7} {outcome.idle_hours:7.1f} {outcome.replica_hours:7.1f} {found.cost:8.2f}"
    )


HEAD = "rule      target   within     p50     p95  starts    idle   hours     cost"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--rate", type=float, default=0.3, help="requests a second, the week's mean")
    parser.add_argument("--attain", type=float, nargs="+", default=[0.97, 0.99])
    parser.add_argument("--rounds", type=int, default=9, help="halvings of the search for a target")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    every: list[tuple[int, Found]] = []
    for seed in range(1, options.seeds + 1):
        on = stage(options.rate, options.days, seed)
        print(f"seed {seed}: {len(on.traffic):,} requests, {MODEL} on {ACCELERATOR}, start {on.starts.cold:.1f} s, "
              f"first token within {BOUND:g} s", file=sys.stderr)  # fmt: skip
        for attain in options.attain:
            print(f"at {attain:g} of requests in time\n{HEAD}", file=sys.stderr)
            for rule in RULES:
                found = cheapest(on, rule, attain, options.rounds)
                if found is not None:
                    every.append((seed, found))
                print(f"{rule:8} never" if found is None else line(found), file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps([{"seed": seed, **asdict(found)} for seed, found in every], indent=2))
        return
    print(f"mean of {options.seeds} seeds, {options.days:g} days; in brackets ingle's figure over that one's")
    print(f"{'in time':>8} {'rule':8} {'cost':>8} {'':9} {'starts':>7} {'idle h':>8}")
    for attain in options.attain:
        means = {rule: [f for _, f in every if f.rule == rule and f.attain == attain] for rule in RULES}
        ours = statistics.mean(found.cost for found in means["ingle"]) if means["ingle"] else math.nan
        for rule, of in means.items():
            if not of:
                print(f"{attain:8g} {rule:8} never")
                continue
            cost = statistics.mean(found.cost for found in of)
            ratio = "" if rule == "ingle" else f"({ours / cost:.3f} ×)"
            print(f"{attain:8g} {rule:8} {cost:8.2f} {ratio:9} {statistics.mean(f.outcome.starts for f in of):7.0f}"
                  f" {statistics.mean(f.outcome.idle_hours for f in of):8.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
