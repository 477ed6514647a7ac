"""Nothing of one request reaches another; `make canaries` looks for longer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.contract import canaries

ROUNDS = 15


def test_each_says_among_others_what_it_said_alone(tmp_path: Path) -> None:
    with canaries.cage(tmp_path) as replica:
        found = asyncio.run(canaries.watch(replica, ROUNDS, 7))
        assert replica.health()["kv_blocks_used"] == 0
    assert found.asked == ROUNDS * canaries.AT_ONCE
    assert found.leaks == []
    assert found.preemptions > 0
    assert found.cancelled > 0
