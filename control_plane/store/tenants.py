"""Queries on tenants, API keys and admin tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from sqlalchemy import or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.domain import ANYTHING, UNLIMITED, KeyScope, Quota, Role
from control_plane.errors import Conflict, NotFound
from control_plane.store.endpoints import bump_routes
from control_plane.store.ids import new_id
from control_plane.store.models import AdminTokenRow, ApiKeyRow, TenantRow


async def create_tenant(session: AsyncSession, name: str, now: float) -> TenantRow:
    """Raises Conflict where the name is taken."""
    row = TenantRow(id=new_id("ten"), name=name, created_at=now)
    session.add(row)
    try:
        await session.flush()
    except IntegrityError:
        raise Conflict(f"a tenant named {name!r} exists", code="name_taken", param="name") from None
    return row


async def change(session: AsyncSession, row: TenantRow | ApiKeyRow, changes: Mapping[str, object]) -> None:
    """Change limits of a tenant or a key, or a key's scope."""
    for name, value in changes.items():
        setattr(row, name, value)
    await session.flush()
    await bump_routes(session)


async def get_tenant(session: AsyncSession, name: str) -> TenantRow:
    """By name or id. Raises NotFound."""
    row = await session.scalar(select(TenantRow).where(or_(TenantRow.name == name, TenantRow.id == name)))
    if row is None:
        raise NotFound(f"no tenant named {name!r}: `ingle tenant list` shows what there is", param="tenant")
    return row


async def list_tenants(session: AsyncSession, *, after: str = "", limit: int = 1000) -> Sequence[TenantRow]:
    return (
        await session.scalars(select(TenantRow).where(TenantRow.name > after).order_by(TenantRow.name).limit(limit))
    ).all()


async def tenant_quotas(session: AsyncSession) -> dict[str, Quota]:
    """Limits of the tenants that have any, by id."""
    rows = await session.scalars(select(TenantRow))
    return {row.id: row.quota for row in rows if row.quota != UNLIMITED}


async def add_key(
    session: AsyncSession,
    *,
    key_id: str,
    tenant_id: str,
    name: str,
    digest: bytes,
    prefix: str,
    expires_at: float | None,
    now: float,
    quota: Quota = UNLIMITED,
    scope: KeyScope = ANYTHING,
) -> ApiKeyRow:
    row = ApiKeyRow(
        id=key_id,
        tenant_id=tenant_id,
        name=name,
        hash=digest,
        prefix=prefix,
        created_at=now,
        expires_at=expires_at,
        **asdict(quota),
        **{part: None if values is None else list(values) for part, values in asdict(scope).items()},
    )
    session.add(row)
    await session.flush()
    await bump_routes(session)
    return row


async def get_key(session: AsyncSession, key_id: str) -> ApiKeyRow:
    """Raises NotFound."""
    row = await session.get(ApiKeyRow, key_id)
    if row is None:
        raise NotFound(f"no key with id {key_id!r}: `ingle key list` shows what there is", param="id")
    return row


async def list_keys(
    session: AsyncSession, *, tenant_id: str | None = None, after: str = "", limit: int = 1000
) -> Sequence[ApiKeyRow]:
    query = select(ApiKeyRow).where(ApiKeyRow.id > after)
    if tenant_id:
        query = query.where(ApiKeyRow.tenant_id == tenant_id)
    return (await session.scalars(query.order_by(ApiKeyRow.id).limit(limit))).all()


async def usable_keys(session: AsyncSession, now: float) -> Sequence[ApiKeyRow]:
    return (
        await session.scalars(
            select(ApiKeyRow).where(
                ApiKeyRow.revoked_at.is_(None), or_(ApiKeyRow.expires_at.is_(None), ApiKeyRow.expires_at > now)
            )
        )
    ).all()


async def revoke_key(session: AsyncSession, key_id: str, now: float) -> ApiKeyRow:
    row = await get_key(session, key_id)
    if row.revoked_at is None:
        row.revoked_at = now
        await session.flush()
        await bump_routes(session)
    return row


async def end_key_at(session: AsyncSession, row: ApiKeyRow, at: float, successor: str) -> None:
    """Let a rotated key end at `at`, but never later than it would have."""
    row.expires_at = at if row.expires_at is None else min(at, row.expires_at)
    row.rotated_to = successor
    await session.flush()
    await bump_routes(session)


async def add_admin_token(session: AsyncSession, name: str, digest: bytes, role: Role, now: float) -> None:
    session.add(AdminTokenRow(id=new_id("adm"), name=name, hash=digest, role=role, created_at=now))
    await session.flush()


async def find_admin_token(session: AsyncSession, digest: bytes) -> AdminTokenRow | None:
    return await session.scalar(
        select(AdminTokenRow).where(AdminTokenRow.hash == digest, AdminTokenRow.revoked_at.is_(None))
    )
