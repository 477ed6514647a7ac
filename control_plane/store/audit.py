"""Queries on audit records and remembered answers to creates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.store.models import AuditRow, IdempotencyRow

IDEMPOTENCY_SECONDS = 86_400.0


def add_audit(
    session: AsyncSession,
    *,
    at: float,
    actor: str,
    role: str,
    action: str,
    target: str,
    request_id: str,
    detail: Mapping[str, Any],
) -> None:
    session.add(
        AuditRow(
            at=at,
            actor=actor,
            role=role,
            action=action,
            target=target[:255],
            request_id=request_id,
            detail=dict(detail),
        )
    )


async def list_audit(session: AsyncSession, *, before: int | None, limit: int) -> Sequence[AuditRow]:
    """Newest first."""
    query = select(AuditRow)
    if before is not None:
        query = query.where(AuditRow.id < before)
    return (await session.scalars(query.order_by(AuditRow.id.desc()).limit(limit))).all()


async def remembered_answer(session: AsyncSession, actor: str, key: str, now: float) -> IdempotencyRow | None:
    await session.execute(delete(IdempotencyRow).where(IdempotencyRow.created_at < now - IDEMPOTENCY_SECONDS))
    return await session.get(IdempotencyRow, (actor, key))


def remember_answer(
    session: AsyncSession,
    *,
    actor: str,
    key: str,
    fingerprint: str,
    status: int,
    response: Mapping[str, Any],
    now: float,
) -> None:
    session.add(
        IdempotencyRow(
            actor=actor, key=key, fingerprint=fingerprint, status=status, response=dict(response), created_at=now
        )
    )
