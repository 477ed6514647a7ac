"""Queries on the history of endpoints: points of a minute for a day, of an hour for six weeks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import HistoryPoint
from control_plane.store.models import HistoryRow
from control_plane.store.statements import insert_into

KEPT = {60: 26 * 3600, 3600: 42 * 86_400}
"""Seconds that points are kept, by how many seconds they tell of."""
MOST_POINTS = 2000


async def add_points(session: AsyncSession, step: int, at: int, points: Mapping[str, HistoryPoint]) -> None:
    """Write what endpoints, by id, were like in the `step` seconds from `at` on. One that is there stays."""
    if points:
        statement = insert_into(session, HistoryRow).on_conflict_do_nothing()
        rows = [
            {"endpoint_id": endpoint_id, "step": step, **asdict(point), "at": at}
            for endpoint_id, point in points.items()
        ]
        await session.execute(statement, rows)


async def forget_points(session: AsyncSession, now: float) -> None:
    for step, seconds in KEPT.items():
        await session.execute(delete(HistoryRow).where(HistoryRow.step == step, HistoryRow.at < now - seconds))


async def list_points(
    session: AsyncSession, endpoint_id: str, step: int, since: float, until: float
) -> Sequence[HistoryPoint]:
    """Points of `step` seconds that begin in `[since, until)`, oldest first, `MOST_POINTS` at most."""
    rows = await session.scalars(
        select(HistoryRow)
        .where(
            HistoryRow.endpoint_id == endpoint_id,
            HistoryRow.step == step,
            HistoryRow.at >= since,
            HistoryRow.at < until,
        )
        .order_by(HistoryRow.at)
        .limit(MOST_POINTS)
    )
    names = HistoryPoint.__dataclass_fields__
    return [HistoryPoint(**{name: getattr(row, name) for name in names}) for row in rows]


async def last_point(session: AsyncSession, step: int) -> int:
    """When the newest point of `step` seconds begins; 0 where there is none."""
    return await session.scalar(select(func.max(HistoryRow.at)).where(HistoryRow.step == step)) or 0
