"""What gateways and replicas report, brought together per endpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.domain import Demand, Replica


@dataclass(frozen=True, slots=True)
class Load:
    """One endpoint's load now."""

    in_flight: int
    held: int
    last_finished_at: float

    @property
    def total(self) -> int:
        return self.in_flight + self.held


def combine(reports: Sequence[Demand], replicas: Sequence[Replica], now: float, stale_after: float) -> Load:
    """Sum the gateways' reports.

    A gateway that fell silent may have died with requests open: its counts stop counting after `stale_after`
    seconds, and its last word then counts as the end of them. Replicas know what still runs on them, so work that
    no gateway reports any more still counts.
    """
    in_flight = held = 0
    last = 0.0
    for report in reports:
        last = max(last, report.last_finished_at)
        if now - report.reported_at <= stale_after:
            in_flight += report.in_flight
            held += report.held
        elif report.in_flight or report.held:
            last = max(last, report.reported_at)
    busy = sum(replica.busy for replica in replicas)
    return Load(max(in_flight, busy), held, last)


class PeakWindow:
    """The highest value seen in the last `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._peaks: deque[tuple[float, int]] = deque()

    def add(self, value: int, now: float) -> int:
        """Note `value` and return the peak. Values lower than a later one are dropped, so that this stays short."""
        while self._peaks and self._peaks[-1][1] <= value:
            self._peaks.pop()
        self._peaks.append((now, value))
        while self._peaks[0][0] < now - self._seconds:
            self._peaks.popleft()
        return self._peaks[0][1]
