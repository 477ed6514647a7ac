"""The two sides of the ledger: our records and a provider's word on the same replicas, and how they differ. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from control_plane.domain import ReplicaState, Rung
from control_plane.metering.bill import Story, bill
from control_plane.metering.prices import PriceBook

_SURE = frozenset({ReplicaState.READY, ReplicaState.RESTING, ReplicaState.UNHEALTHY})
"""One that is on its way into or out of being may be missing on either side."""


class Kind(StrEnum):
    OURS_MISSING = "ours_missing"
    THEIRS_MISSING = "theirs_missing"
    TIMES_DIFFER = "times_differ"


@dataclass(frozen=True, slots=True)
class Ours:
    """A replica as recorded, billed from `began_at` until `ended_at`. Times are seconds since the epoch."""

    replica_id: str
    endpoint_id: str
    region: str
    state: ReplicaState
    began_at: float
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class Theirs:
    """What a provider says of a replica; None where it can't say."""

    region: str | None = None
    began_at: float | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """What the sides don't agree on, and the while that only one of them counts: `start` to `end`, by us or by them."""

    replica_id: str
    kind: Kind
    region: str | None
    endpoint_id: str | None
    we_say: float | str
    they_say: float | str
    start: float
    end: float
    by_us: bool


def compare(
    ours: Iterable[Ours],
    theirs: Mapping[str, Theirs],
    noted: Mapping[tuple[str, str], float],
    now: float,
    tolerance: float,
) -> list[Difference]:
    """`noted`: since when a difference is known, by replica and kind. Beginnings may be `tolerance` seconds apart."""
    found: list[Difference] = []
    recorded = {one.replica_id: one for one in ours}
    for one in recorded.values():
        said = theirs.get(one.replica_id)
        same = (one.region, one.endpoint_id)
        if said is None:
            if one.state in _SURE:
                kind = Kind.THEIRS_MISSING
                since = noted.get((one.replica_id, kind), now)
                found.append(Difference(one.replica_id, kind, *same, one.state, "nothing", since, now, True))
        elif one.state is ReplicaState.TERMINATED:
            ended = now if one.ended_at is None else one.ended_at
            kind, word = Kind.OURS_MISSING, said.began_at or "it is there"
            found.append(Difference(one.replica_id, kind, *same, one.state, word, ended, now, False))
        elif said.began_at is not None and abs(said.began_at - one.began_at) > tolerance:
            kind, times = Kind.TIMES_DIFFER, (one.began_at, said.began_at)
            by_us = one.began_at < said.began_at
            found.append(Difference(one.replica_id, kind, *same, *times, min(times), max(times), by_us))
    for replica_id in sorted(theirs.keys() - recorded.keys()):
        said = theirs[replica_id]
        word, began = said.began_at or "it is there", said.began_at or now
        kind = Kind.OURS_MISSING
        found.append(Difference(replica_id, kind, said.region, None, "nothing", word, began, now, False))
    return found


def amount_nano(found: Difference, story: Story, books: Sequence[PriceBook]) -> int:
    """What it comes to, in billionths: above 0 is billed and isn't there, below 0 is there and isn't billed."""
    if not found.by_us:
        story = replace(story, steps=[(found.start, Rung.HOT)], end=None)
    total = sum(line.amount_nano for line in bill([story], books, found.start, found.end))
    return total if found.by_us else -total
