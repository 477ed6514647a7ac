"""Queries for backups: whose records there are, and what is on record of backups themselves."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select, union
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.store.models import AuditRow, EndpointRow, UsageHourRow

CREATED, RESTORED = "backup.create", "backup.restore"
PAGE = 100


async def regions_of_records(session: AsyncSession) -> list[str]:
    """Every region that an endpoint was in, or was used in."""
    query = union(select(EndpointRow.region), select(UsageHourRow.region))
    return sorted((await session.scalars(query)).all())


async def backups_since(session: AsyncSession, at: float, after: int) -> Sequence[AuditRow]:
    """Records of backups made at `at` or later, those after number `after` first."""
    query = select(AuditRow).where(AuditRow.action == CREATED, AuditRow.at >= at, AuditRow.seq > after)
    return (await session.scalars(query.order_by(AuditRow.seq).limit(PAGE))).all()
