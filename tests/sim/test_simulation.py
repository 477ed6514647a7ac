"""Crashes and exits; and the invariants themselves: do they notice what is wrong?"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from control_plane.autoscaler import loop
from control_plane.domain import Rung
from control_plane.store import drift, leases, spending
from tests.sim.cloud import Provider
from tests.sim.crash import points, run_point
from tests.sim.report import Broken
from tests.sim.run import run_seed


def test_a_seed_is_a_run() -> None:
    assert run_seed(7) == run_seed(7)


def test_failures_at_every_point_leave_nothing_behind() -> None:
    """A part of `python -m tests.sim --crashes 1`."""
    killed = 0
    for point, warmth in points(24, first=5):
        killed += run_point(point, warmth).kills
    assert killed > 10


def test_controllers_that_exit_leave_nothing_behind() -> None:
    """A part of `python -m tests.sim --exits 500`."""
    exited = re.search(r"(\d+) controllers exited", simulate("--exits", "12"))
    assert exited is not None
    assert int(exited[1]) > 6  # a life has its own course, and may be over before its point comes


def simulate(*options: str) -> str:
    """In a process that may fork, as it has no threads."""
    ran = subprocess.run([sys.executable, "-m", "tests.sim", *options], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def first_broken(seeds: range) -> str:
    for seed in seeds:
        try:
            run_seed(seed)
        except Broken as error:
            return str(error)
    return ""


def test_writes_of_those_who_lost_their_lease_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def anyone(*_: Any) -> None: ...

    monkeypatch.setattr(leases, "guard", anyone)
    assert first_broken(range(27, 60)) != ""


def test_a_provider_that_forgets_what_it_started_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ensure = Provider.ensure

    async def forgetful(self: Provider, spec: Any) -> None:
        self._cloud.machines.pop(spec.replica_id, None)
        await ensure(self, spec)

    monkeypatch.setattr(Provider, "ensure", forgetful)
    # few replicas are asked for twice
    assert "times" in first_broken(range(28, 60))


def test_a_stop_that_never_comes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any) -> None: ...

    monkeypatch.setattr(loop, "enforce_spend", never)
    assert "has spent its limit" in first_broken(range(45, 60))


def test_a_ledger_that_overlooks_strangers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: Any) -> list[str]:
        return []

    monkeypatch.setattr(drift, "note_drift", nothing)
    assert "is no drift in the ledger" in first_broken(range(1, 30))


def test_a_bill_that_knows_no_rungs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def hot(*_: Any) -> Rung:
        return Rung.HOT

    monkeypatch.setattr(spending, "rung_of", hot)
    assert "over what the cloud charges" in first_broken(range(75, 90))
