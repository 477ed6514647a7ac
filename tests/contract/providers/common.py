"""What tests of any provider do with it."""

from __future__ import annotations

import asyncio

from control_plane.domain import Description, Phase, ReplicaSpec
from control_plane.providers.base import Provider


def spec(replica_id: str, model: str = "fast", *, region: str = "eu-1", gpu: str | None = None) -> ReplicaSpec:
    return ReplicaSpec(replica_id, "chat", region, model, gpu=gpu)


async def becomes(provider: Provider, replica_id: str, phase: Phase) -> Description:
    async with asyncio.timeout(40):
        while (found := await provider.describe(replica_id)).phase is not phase:
            await asyncio.sleep(0.05)
    return found


async def gone(provider: Provider, replica_id: str) -> None:
    async with asyncio.timeout(40):
        while (await provider.describe(replica_id)).phase is not Phase.ABSENT:
            await provider.terminate(replica_id)
            await asyncio.sleep(0.05)
