"""Some seeds on every run; `make sim` runs more."""

from __future__ import annotations

import os
import re

import pytest

from tests.sim.test_simulation import simulate

SEEDS = 500


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_seeds_hold() -> None:
    ran = simulate("--seeds", str(SEEDS), "--jobs", str(os.cpu_count() or 1))
    machines = re.search(r"(\d+) machines", ran.splitlines()[-1])
    assert machines is not None
    assert int(machines[1]) > SEEDS
