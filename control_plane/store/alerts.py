"""Queries on alerts, silences and who evaluates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sqlalchemy import delete, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import AlertState
from control_plane.errors import LeaseLost, NotFound
from control_plane.store.ids import new_id
from control_plane.store.models import AlertRow, JobRow, SilenceRow
from control_plane.store.statements import insert_into

_COLUMNS = (
    "alert", "labels", "state", "value", "summary", "since", "seen_at", "fired_at", "resolved_at", "told",
)  # fmt: skip
MOST_ALERTS = 1000
MOST_SILENCES = 500


async def take_job(session: AsyncSession, name: str, owner: str, now: float, seconds: float) -> None:
    """Take or extend a job. Raises LeaseLost while somebody else does it."""
    values = {"owner": owner, "expires_at": now + seconds}
    statement = insert_into(session, JobRow).values(name=name, **values)
    taken = await session.scalar(
        statement.on_conflict_do_update(
            index_elements=["name"], set_=values, where=or_(JobRow.owner == owner, JobRow.expires_at <= now)
        ).returning(JobRow.owner)
    )
    if taken is None:
        raise LeaseLost(f"another process does {name}")


async def leave_job(session: AsyncSession, name: str, owner: str) -> None:
    await session.execute(delete(JobRow).where(JobRow.name == name, JobRow.owner == owner))


async def list_alerts(session: AsyncSession) -> list[AlertState]:
    """Newest first, resolved ones too."""
    rows = await session.scalars(select(AlertRow).order_by(AlertRow.since.desc()).limit(MOST_ALERTS))
    return [AlertState(fingerprint=row.fingerprint, **{name: getattr(row, name) for name in _COLUMNS}) for row in rows]


async def write_alerts(session: AsyncSession, changed: Iterable[AlertState], gone: Iterable[str]) -> None:
    for state in changed:
        values = {name: getattr(state, name) for name in _COLUMNS}
        values |= {"labels": dict(state.labels), "told": dict(state.told)}
        statement = insert_into(session, AlertRow).values(fingerprint=state.fingerprint, **values)
        await session.execute(statement.on_conflict_do_update(index_elements=["fingerprint"], set_=values))
    fingerprints = list(gone)
    if fingerprints:
        await session.execute(delete(AlertRow).where(AlertRow.fingerprint.in_(fingerprints)))


async def forget_alerts(session: AsyncSession, before: float) -> None:
    """Drop those that were over before `before`, however many there are."""
    await session.execute(delete(AlertRow).where(AlertRow.resolved_at < before, AlertRow.state == "resolved"))


async def list_silences(session: AsyncSession, now: float) -> list[SilenceRow]:
    """Those in force, the one that ends first first."""
    rows = await session.scalars(select(SilenceRow).where(SilenceRow.ends_at > now).order_by(SilenceRow.ends_at))
    return list(rows)


async def add_silence(
    session: AsyncSession, matchers: Mapping[str, str], comment: str, actor: str, now: float, ends_at: float
) -> SilenceRow:
    await session.execute(delete(SilenceRow).where(SilenceRow.ends_at <= now - 86_400.0))
    row = SilenceRow(
        id=new_id("sil"), matchers=dict(matchers), comment=comment, created_by=actor, created_at=now, ends_at=ends_at
    )
    session.add(row)
    await session.flush()
    return row


async def end_silence(session: AsyncSession, silence_id: str, now: float) -> SilenceRow:
    """Raises NotFound."""
    row = await session.get(SilenceRow, silence_id)
    if row is None or row.ends_at <= now:
        raise NotFound(f"no silence {silence_id!r}: `ingle alert silences` shows what there is", param="id")
    row.ends_at = now
    await session.flush()
    return row
