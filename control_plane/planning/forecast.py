"""What traffic would take and cost, for each machine and each rung of warmth: the replays behind `ingle plan`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pydantic import BaseModel

from control_plane.domain import RESTING_RUNGS, Endpoint, Rung
from control_plane.errors import InvalidInput
from control_plane.planning.accelerators import StartTimes
from control_plane.planning.fit import Fit
from control_plane.planning.replay import HOUR, Replay, Starts, speed_of
from control_plane.planning.scaler import Ours
from control_plane.planning.traffic import Traffic

MONTH = 30 * 24.0
"""Hours that `cost_per_month` is for."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A machine that the model fits, and what an hour of it costs; None where nobody said."""

    fit: Fit
    price_per_hour: float | None
    starts: StartTimes
    resting_per_hour: Mapping[Rung, float | None]


class Forecast(BaseModel):
    """One line of a plan. `within` is the share of requests whose first token came in time. Times in seconds."""

    accelerator: str
    rung: Rung
    within: float
    ttft_p50: float
    ttft_p95: float
    gave_up: int
    starts: int
    wakes: int
    most_replicas: int
    replica_hours: float
    accelerator_hours: float
    idle_hours: float
    resting_hours: float
    cost: float | None
    cost_per_month: float | None
    start_seconds: float
    """From the rung to serving."""


def forecast(
    traffic: Traffic, offers: Iterable[Offer], rungs: Iterable[Rung], endpoint: Endpoint, bound: float
) -> Iterator[Forecast]:
    """Replay `traffic` for each of `offers` on each of `rungs`, one after the other. Raises InvalidInput."""
    rungs = list(rungs)
    for offer in offers:
        speed = speed_of(offer.fit, traffic.mean_context())
        if not offer.fit.fits:
            raise InvalidInput(
                f"the model doesn't fit {offer.fit.machine.name}: try another with -a, or more of them with --count "
                "(`ingle plan fit` shows where it fits)",
                param="accelerator",
            )
        cold = offer.starts.seconds(Rung.COLD, offer.fit.weights)
        for rung in rungs:
            resting = offer.starts.seconds(rung, offer.fit.weights) if rung in RESTING_RUNGS else None
            least = max(1, endpoint.min_replicas) if rung is Rung.HOT else endpoint.min_replicas
            rule = Ours(replace(endpoint, min_replicas=least))
            found = Replay(traffic, speed, Starts(cold, resting), rule, bound=bound, max_wait=endpoint.max_wait).run()
            cost = _cost(offer, rung, found.replica_hours, found.resting_hours)
            yield Forecast(
                accelerator=offer.fit.machine.name,
                rung=rung,
                within=round(found.within, 4),
                ttft_p50=round(found.ttft_p50, 3),
                ttft_p95=round(found.ttft_p95, 3),
                gave_up=found.gave_up,
                starts=found.starts,
                wakes=found.wakes,
                most_replicas=found.most_replicas,
                replica_hours=round(found.replica_hours, 2),
                accelerator_hours=round(found.replica_hours * offer.fit.machine.count, 2),
                idle_hours=round(found.idle_hours, 2),
                resting_hours=round(found.resting_hours, 2),
                cost=None if cost is None else round(cost, 2),
                cost_per_month=None if cost is None else round(cost / (traffic.seconds / HOUR) * MONTH, 2),
                start_seconds=round(offer.starts.seconds(rung, offer.fit.weights), 2),
            )


def _cost(offer: Offer, rung: Rung, hours: float, resting_hours: float) -> float | None:
    if offer.price_per_hour is None:
        return None
    resting = offer.resting_per_hour.get(rung)
    if resting_hours and resting is None:
        return None
    return offer.price_per_hour * hours + (resting or 0.0) * resting_hours


def cheapest(found: Iterable[Forecast], attain: float) -> Forecast | None:
    """Of those that keep the bound for `attain` of the requests."""
    priced = [one for one in found if one.within >= attain and one.cost is not None]
    return min(priced, key=lambda one: one.cost or 0.0, default=None)
