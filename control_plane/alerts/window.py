"""What the evaluator remembers: samples of the last hours in bounded memory, the older ones further apart.

A series is known by its name and labels. One that was not in the last look is no longer there, as in Prometheus.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping

from control_plane.alerts.expressions import Labels, Points

MOST_SERIES = 20_000
"""Beyond them new series are not taken up; `dropped` counts."""


class Window:
    """`keep` seconds of samples; those older than `fine` seconds at least `coarse` apart."""

    def __init__(self, *, keep: float, fine: float = 2100.0, coarse: float = 60.0, most: int = MOST_SERIES) -> None:
        self._keep = keep
        self._fine = fine
        self._coarse = coarse
        self._most = most
        self._series: dict[str, dict[Labels, _Track]] = {}
        self._count = 0
        self._last = float("-inf")
        self.dropped = 0

    def __len__(self) -> int:
        """How many series there are."""
        return self._count

    def add(self, at: float, samples: Mapping[str, Mapping[Labels, float]]) -> None:
        """All that one look at time `at` saw. Looks come in order."""
        self._last = at
        for name, vector in samples.items():
            known = self._series.setdefault(name, {})
            for labels, value in vector.items():
                track = known.get(labels)
                if track is None:
                    if self._count >= self._most:
                        self.dropped += 1
                        continue
                    track = known[labels] = _Track()
                    self._count += 1
                track.add(at, value)
        self._forget(at)

    def latest(self, name: str, at: float, look_back: float) -> Iterator[tuple[Labels, float]]:
        for labels, track in self._series.get(name, {}).items():
            found = track.before(at)
            if found is None or found[0] < at - look_back:
                continue
            if at >= self._last and found[0] < self._last:
                continue  # the last look did not see it
            yield labels, found[1]

    def between(self, name: str, start: float, end: float) -> Iterator[tuple[Labels, Points]]:
        for labels, track in self._series.get(name, {}).items():
            points = track.between(start, end)
            if points:
                yield labels, points

    def _forget(self, now: float) -> None:
        for known in self._series.values():
            gone: list[Labels] = []
            for labels, track in known.items():
                track.thin(now - self._keep, now - self._fine, self._coarse)
                if not track:
                    gone.append(labels)
            for labels in gone:
                del known[labels]
                self._count -= 1


class _Track:
    """One series: times and values, 16 bytes a sample."""

    __slots__ = ("_times", "_values")

    def __init__(self) -> None:
        self._times = array("d")
        self._values = array("d")

    def __bool__(self) -> bool:
        return bool(self._times)

    def add(self, at: float, value: float) -> None:
        self._times.append(at)
        self._values.append(value)

    def before(self, at: float) -> tuple[float, float] | None:
        place = bisect_right(self._times, at) - 1
        return (self._times[place], self._values[place]) if place >= 0 else None

    def between(self, start: float, end: float) -> list[tuple[float, float]]:
        first, last = bisect_left(self._times, start), bisect_right(self._times, end)
        return list(zip(self._times[first:last], self._values[first:last], strict=True))

    def thin(self, oldest: float, fine: float, coarse: float) -> None:
        """Drop what is older than `oldest`; of what just became older than `fine`, what is too close to its past."""
        first = bisect_left(self._times, oldest)
        if first:
            del self._times[:first], self._values[:first]
        place = bisect_left(self._times, fine) - 1
        while place > 0 and self._times[place] - self._times[place - 1] < coarse:
            del self._times[place], self._values[place]
            place -= 1


def restrict(samples: Iterable[tuple[str, Labels, float]], names: frozenset[str]) -> dict[str, dict[Labels, float]]:
    """Only the metrics called `names`, by name and labels."""
    found: dict[str, dict[Labels, float]] = {}
    for name, labels, value in samples:
        if name in names:
            found.setdefault(name, {})[labels] = value
    return found
