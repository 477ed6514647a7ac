"""Queries on drift: what our records and providers' inventories disagree on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import case, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import ReplicaState
from control_plane.metering import prices
from control_plane.metering.ledger import Difference, Kind, Ours, Theirs, amount_nano, compare
from control_plane.metering.prices import PriceBook
from control_plane.observe.logs import iso
from control_plane.store import spending
from control_plane.store.models import DriftRow, ReplicaRow
from control_plane.store.prices import list_books
from control_plane.store.statements import insert_into

DRIFT_KEPT = 10_000


async def note_drift(
    session: AsyncSession, regions: Collection[str], owned: Mapping[str, Theirs], now: float, tolerance: float
) -> list[str]:
    """Hold the inventory of the provider of `regions` against our rows; note what differs until both agree again.

    Returns the ids of replicas that are new among it.
    """
    rows = await session.execute(
        select(
            ReplicaRow.id,
            ReplicaRow.endpoint_id,
            ReplicaRow.region,
            ReplicaRow.state,
            ReplicaRow.created_at,
            ReplicaRow.terminated_at,
        ).where(
            ReplicaRow.id.in_(list(owned))
            | (ReplicaRow.region.in_(regions) & (ReplicaRow.state != ReplicaState.TERMINATED))
        )
    )
    ours = [
        Ours(row.id, row.endpoint_id, row.region, ReplicaState(row.state), row.created_at, row.terminated_at)
        for row in rows
    ]
    seen_by = " ".join(sorted(regions))[:2048]
    own = (DriftRow.seen_by == seen_by) | (DriftRow.seen_by.is_(None) & DriftRow.region.in_(regions))
    standing = await session.scalars(select(DriftRow).where(DriftRow.settled_at.is_(None), own))
    noted = {(row.replica_id, row.kind): row.since for row in standing}
    found = {(one.replica_id, str(one.kind)): one for one in compare(ours, owned, noted, now, tolerance)}
    for replica_id, kind in noted.keys() - found.keys():
        this = (DriftRow.replica_id == replica_id) & (DriftRow.kind == kind)
        await session.execute(update(DriftRow).where(this).values(settled_at=now))
    books = await list_books(session)
    amounts = await _amounts(session, found.values(), books, now)
    for (replica_id, kind), one in found.items():
        values = {
            "region": one.region or "",
            "endpoint_id": one.endpoint_id,
            "we_say": _word(one.we_say),
            "they_say": _word(one.they_say),
            "amount_nano": amounts.get(replica_id),
            "currency": prices.in_force(books, one.start).currency,
            "seen_by": seen_by,
            "seen_at": now,
            "settled_at": None,
        }
        statement = insert_into(session, DriftRow).values(replica_id=replica_id, kind=kind, since=now, **values)
        began = case((DriftRow.settled_at.is_not(None), now), else_=DriftRow.since)  # one that comes back is another
        changes = {**values, "since": began}
        await session.execute(statement.on_conflict_do_update(index_elements=["replica_id", "kind"], set_=changes))
    if found or noted:
        kept = select(DriftRow.since).order_by(DriftRow.since.desc()).offset(DRIFT_KEPT).limit(1)
        oldest = await session.scalar(kept)
        if oldest is not None:
            await session.execute(delete(DriftRow).where(DriftRow.since <= oldest))
    return [replica_id for replica_id, kind in found.keys() - noted.keys()]


async def _amounts(
    session: AsyncSession, found: Collection[Difference], books: Sequence[PriceBook], now: float
) -> dict[str, int]:
    """By replica, where it is on record: what a stranger runs on isn't known."""
    known = {one.replica_id: one for one in found if one.endpoint_id is not None}
    amounts: dict[str, int] = {}
    after = ""
    while known and (page := await spending.stories(session, 0.0, now, replica_ids=list(known), after=after)):
        for _, story in page:
            amounts[story.replica_id] = amount_nano(known[story.replica_id], story, books)
        after = page[-1][1].replica_id
    return amounts


async def standing_drift(session: AsyncSession) -> dict[str, int]:
    """By region, how many replicas only one side knows of; "" is of those whose provider can't say where they are."""
    query = select(DriftRow.region, func.count().label("many")).where(
        DriftRow.settled_at.is_(None), DriftRow.kind != Kind.TIMES_DIFFER
    )
    return {row.region: row.many for row in await session.execute(query.group_by(DriftRow.region))}


async def list_drift(session: AsyncSession, limit: int) -> Sequence[DriftRow]:
    """Newest first; what isn't settled before all else."""
    order = (func.coalesce(DriftRow.settled_at, 1e18).desc(), DriftRow.since.desc())
    return (await session.scalars(select(DriftRow).order_by(*order).limit(limit))).all()


def _word(said: float | str) -> str:
    return said if isinstance(said, str) else iso(said)
