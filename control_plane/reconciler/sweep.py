"""The two sides of the ledger: what providers say that they run, and what our rows say.

What runs without a row that wants it is ended: the row comes first, so such a replica is nobody's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from control_plane.domain import ReplicaState
from control_plane.errors import IngleError, ProviderError, StoreUnavailable
from control_plane.metering.ledger import Theirs
from control_plane.observe import metrics
from control_plane.observe.logs import event
from control_plane.providers.base import Provider
from control_plane.store import drift, replicas
from control_plane.store.database import Store

_AT_ONCE = 16
_SECONDS = 10.0
_ELSEWHERE = "elsewhere"
"""The label of what is in no region of ours, or nobody can say where."""


async def sweep(store: Store, providers: Mapping[str, Provider], now: float, tolerance: float) -> None:
    """Look at each provider's inventory once. One that fails keeps no other from being looked at.

    A replica may have begun `tolerance` seconds before or after our records bill it from.
    """
    for provider in dict.fromkeys(providers.values()):
        regions = sorted(name for name, own in providers.items() if own is provider)
        try:
            await _sweep_one(store, provider, regions, now, tolerance)
        except IngleError as error:
            event("reconciler.sweep_failed", level=logging.WARNING, reason=error.message)
        except Exception as error:
            event("reconciler.fault", level=logging.ERROR, error=error)
    try:
        async with store.read() as session:
            standing = await drift.standing_drift(session)
    except StoreUnavailable as error:
        event("reconciler.sweep_failed", level=logging.WARNING, reason=error.message)
        return
    for region in providers:
        metrics.drift.labels(region).set(standing.pop(region, 0))
    metrics.drift.labels(_ELSEWHERE).set(sum(standing.values()))


async def _sweep_one(store: Store, provider: Provider, regions: Sequence[str], now: float, tolerance: float) -> None:
    orphans = metrics.orphans.labels(",".join(regions))  # begins at 0, so that the first one is seen
    owned = await provider.list_owned()
    async with store.read() as session:
        states = await replicas.replica_states(session, owned)
    slots = asyncio.Semaphore(_AT_ONCE)
    said = await asyncio.gather(*(_ask(slots, provider, replica_id) for replica_id in owned))
    async with store.write() as session:
        fresh = await drift.note_drift(session, regions, dict(zip(owned, said, strict=True)), now, tolerance)
    for replica_id in sorted(fresh):
        event("ledger.drift", level=logging.WARNING, replica=replica_id)
    for replica_id in owned:
        if states.get(replica_id, ReplicaState.TERMINATED) is ReplicaState.TERMINATED:
            event("replica.orphan", level=logging.WARNING, replica=replica_id)
            orphans.inc()
            await provider.terminate(replica_id)


async def _ask(slots: asyncio.Semaphore, provider: Provider, replica_id: str) -> Theirs:
    async with slots:
        try:
            async with asyncio.timeout(_SECONDS):
                told = await provider.describe(replica_id)
        except (ProviderError, TimeoutError):
            return Theirs()
    return Theirs(told.region, told.began_at)
