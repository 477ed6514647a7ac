"""Statements that SQLite and PostgreSQL both have, each in a class of its own."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Insert
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from control_plane.store.models import Base


def insert_into(session: AsyncSession, row: type[Base]) -> Any:
    """An INSERT of the dialect at hand, which has ON CONFLICT."""
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    statement: Insert = dialect.insert(row)
    return statement
