"""A clean stop of a whole installation: every replica ends, and the store says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from control_plane.domain import Phase, Replica, ReplicaState
from control_plane.errors import ProviderError
from control_plane.observe.logs import event
from control_plane.providers.base import Provider
from control_plane.store import endpoints, replicas
from control_plane.store.database import Store

_LOOK_SECONDS = 0.05


async def end_all(
    store: Store, providers: Mapping[str, Provider], *, within: float, clock: Callable[[], float] = time.time
) -> None:
    """Terminate every replica and wait for it, `within` seconds at most. Call it once no reconciler runs here."""
    async with store.read() as session:
        live = [replica for replica in await replicas.live_replicas(session) if replica.region in providers]
    try:
        async with asyncio.timeout(within):
            await asyncio.gather(*(_end(store, providers[replica.region], replica, clock) for replica in live))
    except TimeoutError:
        event("stop.replicas_left", within_s=within)


async def _end(store: Store, provider: Provider, replica: Replica, clock: Callable[[], float]) -> None:
    said = ""
    while True:
        try:
            if (await provider.describe(replica.id)).phase is Phase.ABSENT:
                break
            await provider.terminate(replica.id)
        except ProviderError as error:
            if error.message != said:
                said = error.message
                event("stop.terminate_failed", replica=replica.id, reason=said)
        await asyncio.sleep(_LOOK_SECONDS)
    reason = "the platform was stopped"
    async with store.write() as session:
        await replicas.write_replica(
            session,
            replica.id,
            {
                "state": ReplicaState.TERMINATED,
                "terminated_at": clock(),
                "reason_code": "stopped",
                "reason": reason,
                "busy": 0,
            },
        )
        endpoint = await endpoints.get_endpoint_by_id(session, replica.endpoint_id)
        if endpoint is not None:
            endpoints.add_event(
                session, endpoint, clock(), "replica", "stopped", reason, state="terminated", replica_id=replica.id
            )
        await endpoints.bump_routes(session)
