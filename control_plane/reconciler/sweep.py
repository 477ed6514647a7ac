"""The two sides of the ledger: what providers say that they run, and what our rows say.

What runs without a row that wants it is ended: the row comes first, so such a replica is nobody's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from control_plane.domain import ReplicaState
from control_plane.errors import IngleError
from control_plane.observe import metrics
from control_plane.observe.logs import event
from control_plane.providers.base import Provider
from control_plane.store import replicas, spending
from control_plane.store.database import Store


async def sweep(store: Store, providers: Mapping[str, Provider], now: float) -> None:
    """Look at each provider's inventory once. One that fails keeps no other from being looked at."""
    for provider in dict.fromkeys(providers.values()):
        regions = sorted(name for name, own in providers.items() if own is provider)
        try:
            await _sweep_one(store, provider, regions, now)
        except IngleError as error:
            event("reconciler.sweep_failed", level=logging.WARNING, reason=error.message)
        except Exception as error:
            event("reconciler.fault", level=logging.ERROR, error=error)


async def _sweep_one(store: Store, provider: Provider, regions: Sequence[str], now: float) -> None:
    orphans = metrics.orphans.labels(",".join(regions))  # begins at 0, so that the first one is seen
    owned = await provider.list_owned()
    async with store.read() as session:
        states = await replicas.replica_states(session, owned)
    await _note_drift(store, regions, owned, now)
    for replica_id in owned:
        if states.get(replica_id, ReplicaState.TERMINATED) is ReplicaState.TERMINATED:
            event("replica.orphan", level=logging.WARNING, replica=replica_id)
            orphans.inc()
            await provider.terminate(replica_id)


async def _note_drift(store: Store, regions: Sequence[str], owned: Sequence[str], now: float) -> None:
    async with store.write() as session:
        fresh = await spending.note_drift(session, regions, owned, now)
        standing = await spending.standing_drift(session, regions)
    for region in regions:
        metrics.drift.labels(region).set(standing.get(region, 0))
    for replica_id in sorted(fresh):
        event("ledger.drift", level=logging.WARNING, replica=replica_id)
