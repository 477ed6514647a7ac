"""Leases on endpoint rows, with a fencing token that grows each time a lease changes hands.

Work happens outside transactions; a write then counts only if the lease is still the same. On PostgreSQL its server's
clock says when a lease is over, so that controllers whose clocks differ agree on it; SQLite's share a machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, Float, cast, extract, func, literal, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.errors import LeaseLost
from control_plane.store.models import EndpointRow


@dataclass(frozen=True, slots=True)
class Lease:
    """`expires_at` is by the owner's clock."""

    endpoint_id: str
    owner: str
    token: int
    expires_at: float


async def take_lease(session: AsyncSession, endpoint_id: str, owner: str, now: float, seconds: float) -> Lease | None:
    """Take or extend the lease on an endpoint. None while somebody else holds it."""
    moment = _moment(session, now)
    token = await session.scalar(
        update(EndpointRow)
        .where(
            EndpointRow.id == endpoint_id,
            EndpointRow.deleted_at.is_(None),
            or_(EndpointRow.lock_expires_at <= moment, EndpointRow.lock_owner == owner),
        )
        .values(lock_owner=owner, lock_expires_at=moment + seconds, lock_token=EndpointRow.lock_token + 1)
        .returning(EndpointRow.lock_token)
    )
    return None if token is None else Lease(endpoint_id, owner, token, now + seconds)


def _moment(session: AsyncSession, now: float) -> ColumnElement[float]:
    if session.get_bind().dialect.name == "postgresql":
        return cast(extract("epoch", func.clock_timestamp()), Float)
    return literal(now)


async def guard(session: AsyncSession, lease: Lease, now: float) -> None:
    """Fail this transaction unless `lease` still stands. Locks the row until the transaction ends."""
    token = await session.scalar(
        update(EndpointRow)
        .where(
            EndpointRow.id == lease.endpoint_id,
            EndpointRow.lock_token == lease.token,
            EndpointRow.lock_owner == lease.owner,
            EndpointRow.lock_expires_at > _moment(session, now),
        )
        .values(lock_token=lease.token)
        .returning(EndpointRow.lock_token)
    )
    if token is None:
        raise LeaseLost(f"the lease on {lease.endpoint_id} is gone")


async def owners(session: AsyncSession) -> list[str]:
    """All who hold a lease, or held one until they died."""
    rows = await session.scalars(select(EndpointRow.lock_owner).where(EndpointRow.lock_owner.is_not(None)).distinct())
    return [owner for owner in rows if owner is not None]


async def release_leases(session: AsyncSession, owner: str) -> None:
    """Let go of all that `owner` holds, so that another needn't wait for them to expire."""
    await session.execute(
        update(EndpointRow).where(EndpointRow.lock_owner == owner).values(lock_owner=None, lock_expires_at=0.0)
    )
