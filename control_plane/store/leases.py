"""Leases on endpoint rows, with a fencing token that grows each time a lease is taken or extended.

Work happens outside transactions; a write then counts only if the lease is still the same: so what was seen is never
older than a lease when it is written. On PostgreSQL its server's clock says when a lease is over, so that controllers
whose clocks differ agree on it; SQLite's share a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Float, cast, extract, func, literal, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.errors import LeaseLost
from control_plane.store.endpoints import ENDPOINTS

_AT_ONCE = 500
"""Endpoints in one statement."""


@dataclass(frozen=True, slots=True)
class Lease:
    """`expires_at` is by the owner's clock."""

    endpoint_id: str
    owner: str
    token: int
    expires_at: float


async def take_leases(
    session: AsyncSession, endpoint_ids: Sequence[str], owner: str, now: float, seconds: float
) -> dict[str, Lease]:
    """Take or extend the leases on endpoints; those that somebody else holds aren't among the answer."""
    moment = _moment(session, now)
    found: dict[str, Lease] = {}
    for first in range(0, len(endpoint_ids), _AT_ONCE):
        rows = await session.execute(
            update(ENDPOINTS)
            .where(
                ENDPOINTS.c.id.in_(endpoint_ids[first : first + _AT_ONCE]),
                ENDPOINTS.c.deleted_at.is_(None),
                or_(ENDPOINTS.c.lock_expires_at <= moment, ENDPOINTS.c.lock_owner == owner),
            )
            .values(lock_owner=owner, lock_expires_at=moment + seconds, lock_token=ENDPOINTS.c.lock_token + 1)
            .returning(ENDPOINTS.c.id, ENDPOINTS.c.lock_token)
        )
        found |= {endpoint_id: Lease(endpoint_id, owner, token, now + seconds) for endpoint_id, token in rows}
    return found


async def take_lease(session: AsyncSession, endpoint_id: str, owner: str, now: float, seconds: float) -> Lease | None:
    """One of them; None while somebody else holds it."""
    return (await take_leases(session, [endpoint_id], owner, now, seconds)).get(endpoint_id)


def _moment(session: AsyncSession, now: float) -> ColumnElement[float]:
    if session.get_bind().dialect.name == "postgresql":
        return cast(extract("epoch", func.clock_timestamp()), Float)
    return literal(now)


async def guard(session: AsyncSession, lease: Lease, now: float) -> None:
    """Fail this transaction unless `lease` still stands. Locks the row until the transaction ends."""
    token = await session.scalar(
        update(ENDPOINTS)
        .where(
            ENDPOINTS.c.id == lease.endpoint_id,
            ENDPOINTS.c.lock_token == lease.token,
            ENDPOINTS.c.lock_owner == lease.owner,
            ENDPOINTS.c.lock_expires_at > _moment(session, now),
        )
        .values(lock_token=lease.token)
        .returning(ENDPOINTS.c.lock_token)
    )
    if token is None:
        raise LeaseLost(f"the lease on {lease.endpoint_id} is gone")


async def owners(session: AsyncSession) -> list[str]:
    """All who hold a lease, or held one until they died."""
    rows = await session.scalars(select(ENDPOINTS.c.lock_owner).where(ENDPOINTS.c.lock_owner.is_not(None)).distinct())
    return [owner for owner in rows if owner is not None]


async def release_leases(session: AsyncSession, owner: str) -> None:
    """Let go of all that `owner` holds, so that another needn't wait for them to expire."""
    await session.execute(
        update(ENDPOINTS).where(ENDPOINTS.c.lock_owner == owner).values(lock_owner=None, lock_expires_at=0.0)
    )
