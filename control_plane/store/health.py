"""How far away the database is, and what time it is there."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from control_plane.errors import StoreUnavailable
from control_plane.store.schema import sync_engine

_TRIES = 5


@dataclass(frozen=True)
class DatabaseHealth:
    latency_ms: float
    """Of the quickest of a few small queries."""
    ahead: float | None
    """Seconds by which its clock is ahead of ours; None where it has none of its own."""


def measure(url: str) -> DatabaseHealth:
    """Raises StoreUnavailable."""
    engine = sync_engine(url)
    server = engine.dialect.name == "postgresql"
    query = text("SELECT extract(epoch FROM clock_timestamp())" if server else "SELECT 1")
    best, ahead = float("inf"), None
    try:
        with engine.connect() as connection:
            connection.execute(query)
            for _ in range(_TRIES):
                began, at = time.perf_counter(), time.time()
                told = float(connection.execute(query).scalar_one())
                took = time.perf_counter() - began
                if took < best:
                    best, ahead = took, told - (at + took / 2) if server else None
    except DBAPIError as error:
        raise StoreUnavailable(f"the database can't be reached ({type(error.orig).__name__})") from error
    finally:
        engine.dispose()
    return DatabaseHealth(best * 1000, ahead)
