"""Queries on audit records and remembered answers to creates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.chain import BEFORE_ALL, Record
from control_plane.store.models import AuditRow, CounterRow, IdempotencyRow

Seal = Callable[[int, Mapping[str, Any], str], tuple[str, str]]
"""Number, content and the hash before → a record's hash and signature."""
IDEMPOTENCY_SECONDS = 86_400.0


async def add_audit(
    session: AsyncSession,
    seal: Seal,
    *,
    at: float,
    actor: str,
    role: str,
    action: str,
    target: str,
    request_id: str,
    detail: Mapping[str, Any],
) -> None:
    """Append a record to the chain. Until this transaction ends, others that append wait."""
    seq = await session.scalar(
        update(CounterRow)
        .where(CounterRow.name == "audit")
        .values(value=CounterRow.value + 1)
        .returning(CounterRow.value)
    )
    if seq is None:
        raise RuntimeError("the counter of audit records is gone")
    last = await session.scalar(select(AuditRow.hash).where(AuditRow.seq < seq).order_by(AuditRow.seq.desc()).limit(1))
    row = AuditRow(
        at=at,
        actor=actor,
        role=role,
        action=action,
        target=target[:255],
        request_id=request_id,
        detail=dict(detail),
        seq=seq,
        previous=last or BEFORE_ALL,
    )
    row.hash, row.signature = seal(seq, _content(row), row.previous or "")
    session.add(row)
    await session.flush()


def _content(row: AuditRow) -> dict[str, Any]:
    fields = ("at", "actor", "role", "action", "target", "request_id", "detail")
    return {field: getattr(row, field) for field in fields}


async def chain(session: AsyncSession, *, after: int, limit: int) -> list[tuple[int, Record]]:
    """Records of the chain by where they stand in the table, with their ids, those after id `after` first."""
    rows = await session.scalars(
        select(AuditRow).where(AuditRow.id > after, AuditRow.seq.is_not(None)).order_by(AuditRow.id).limit(limit)
    )
    return [
        (row.id, Record(row.seq or 0, _content(row), row.previous or "", row.hash or "", row.signature or ""))
        for row in rows
    ]


async def chain_length(session: AsyncSession) -> int:
    """How many records were ever appended."""
    return await session.scalar(select(CounterRow.value).where(CounterRow.name == "audit")) or 0


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
