"""Deletes what has been kept for as long as its endpoint asks for: usage events and endpoint events.

The hours that usage is summed by stay, as do audit records. A run is bounded; what it didn't reach is left to the next.
"""

from __future__ import annotations

from control_plane.domain import Endpoint
from control_plane.observe import metrics
from control_plane.observe.logs import event
from control_plane.store import endpoints, usage
from control_plane.store.database import Store

BATCH = 1000
_MOST_BATCHES = 100
DEFAULT_SECONDS = 90 * 86_400.0
"""For what belongs to endpoints that were gone for as long as they kept anything."""


async def enforce_retention(store: Store, known: list[Endpoint], now: float, *, batch: int = BATCH) -> dict[str, int]:
    """Returns how many usage events and endpoint events were deleted. Raises StoreUnavailable.

    `known` are endpoints that are there, and those that were deleted: what they left is kept no longer either.
    """
    deleted = {"usage_events": 0, "endpoint_events": 0}
    oldest = max([DEFAULT_SECONDS, *(endpoint.retention for endpoint in known)])
    bounds: list[tuple[str | None, float]] = [(endpoint.id, endpoint.retention) for endpoint in known]
    bounds.append((None, oldest))  # no endpoint keeps anything for longer
    left = _MOST_BATCHES
    names = {endpoint.id: endpoint for endpoint in known}
    for endpoint_id, seconds in bounds:
        own = dict.fromkeys(deleted, 0)
        for kind, delete in (("usage_events", usage.delete_events), ("endpoint_events", endpoints.delete_events)):
            gone = batch
            while gone == batch and left:
                left -= 1
                async with store.write() as session:
                    gone = await delete(session, endpoint_id, now - seconds, batch)
                own[kind] += gone
        if any(own.values()) and endpoint_id is not None:
            # what was deleted when is a part of the evidence, and kept as long as the next events are
            told = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in own.items() if count)
            async with store.write() as session:
                endpoints.add_event(
                    session, names[endpoint_id], now, "retention", None, f"{told} older than {seconds:g} s"
                )
        for kind, count in own.items():
            deleted[kind] += count
    for kind, count in deleted.items():
        metrics.deleted.labels(kind).inc(count)
    if any(deleted.values()):
        event("retention.deleted", records=deleted, complete=left > 0)
    return deleted
