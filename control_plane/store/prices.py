"""Queries on price books."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.metering.prices import PriceBook, TokenPrices
from control_plane.store.endpoints import bump_routes
from control_plane.store.models import PriceRow, table_of

_BOOKS = table_of(PriceRow)
_NEWEST = select(_BOOKS).order_by(_BOOKS.c.version.desc())


def to_book(row: PriceRow | Row[Any]) -> PriceBook:
    return PriceBook(
        row.version,
        row.effective_at,
        row.currency,
        {model: TokenPrices(**prices) for model, prices in row.models.items()},
        row.accelerators,
    )


async def list_books(session: AsyncSession, limit: int = 1000) -> list[PriceBook]:
    """Newest first."""
    rows = await session.execute(_NEWEST.limit(limit))
    return [to_book(row) for row in rows]


async def add_book(
    session: AsyncSession,
    currency: str,
    models: Mapping[str, TokenPrices],
    accelerators: Mapping[str, float],
    now: float,
) -> PriceBook:
    """The next version, in force from now on."""
    newest = await list_books(session, 1)
    row = PriceRow(
        version=newest[0].version + 1 if newest else 1,
        effective_at=now,
        currency=currency,
        models={model: asdict(prices) for model, prices in models.items()},
        accelerators=dict(accelerators),
    )
    session.add(row)
    await session.flush()
    await bump_routes(session)
    return to_book(row)
