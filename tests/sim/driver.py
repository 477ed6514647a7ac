"""SQLite as SQLAlchemy's asyncio drivers have it, without a thread: what waits does so in simulated time."""

from __future__ import annotations

import asyncio
import functools
import sqlite3
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from sqlalchemy import Engine
from sqlalchemy.connectors.asyncio import AsyncAdapt_dbapi_cursor
from sqlalchemy.dialects.sqlite.aiosqlite import AsyncAdapt_aiosqlite_dbapi
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import EMPTY_DICT
from sqlalchemy.util.concurrency import await_

from control_plane.store import database
from tests.sim.clock import CURRENT

_LOCK_SECONDS = 5.0


@contextmanager
def simulated_sqlite() -> Generator[None]:
    """Who connects to SQLite meanwhile does so through this driver."""
    with mock.patch.object(AsyncAdapt_aiosqlite_dbapi, "connect", _connect), compiled_once():
        yield


@contextmanager
def compiled_once() -> Generator[None]:
    """Stores that are made meanwhile share what they compile statements to."""
    with mock.patch.object(database, "create_async_engine", _engine):
        yield


def _engine(*arguments: Any, **options: Any) -> AsyncEngine:
    engine, first = create_async_engine(*arguments, **options), _first_engine()
    engine.sync_engine.dialect, engine.sync_engine._compiled_cache = first.dialect, first._compiled_cache
    return engine


@functools.cache
def _first_engine() -> Engine:
    return create_async_engine("sqlite+aiosqlite:///never-opened").sync_engine


def _connect(_: Any, *arguments: Any, **options: Any) -> Connection:
    return Connection(sqlite3.connect(*arguments, **options))


class Connection:
    """One of the simulated process that opened it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.create_function = connection.create_function
        self._process = CURRENT.get()
        if self._process is not None:
            self._process.connections.append(connection)

    @property
    def isolation_level(self) -> str | None:
        return self.connection.isolation_level

    @isolation_level.setter
    def isolation_level(self, value: Any) -> None:
        self.connection.isolation_level = value

    def cursor(self, server_side: bool = False) -> Cursor:
        return Cursor(self)

    def commit(self) -> None:
        self.meet_trouble()
        crossing = None if self._process is None else self._process.crossing
        if crossing is None:
            self.connection.commit()
            return
        await_(crossing("before commit"))
        self._check()
        self.connection.commit()
        await_(crossing("after commit"))

    def rollback(self) -> None:
        if self._process is None or not self._process.dead:
            self.connection.rollback()

    def close(self) -> None:
        self.connection.close()

    terminate = close

    def meet_trouble(self) -> None:
        if self._process is None:
            return
        self._process.check()
        seconds, fails = self._process.trouble()
        if seconds:
            await_(asyncio.sleep(seconds))
            self._process.check()
        if fails:
            raise sqlite3.OperationalError("disk I/O error")

    def once_unlocked(self, function: Callable[..., Any], *arguments: Any) -> None:
        """As SQLite's own busy handler, which would hold up all others too."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _LOCK_SECONDS
        while True:
            try:
                function(*arguments)
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or loop.time() > until:
                    raise
            await_(asyncio.sleep(0.01))
            self._check()

    def _check(self) -> None:
        if self._process is not None:
            self._process.check()


class Cursor(AsyncAdapt_dbapi_cursor):
    """Has fetched all rows once a statement is over."""

    _awaitable_cursor_close = False
    _cursor: Any

    def __init__(self, connection: Connection) -> None:
        self._of = connection
        self._cursor = connection.connection.cursor()
        self._rows = deque()
        self._soft_closed_memoized = EMPTY_DICT

    def execute(self, operation: Any, parameters: Any = ()) -> None:
        if operation.startswith("PRAGMA busy_timeout"):
            operation = "PRAGMA busy_timeout=0"
        self._of.meet_trouble()
        self._of.once_unlocked(self._cursor.execute, operation, parameters)
        if self._cursor.description:
            self._of.meet_trouble()
            self._rows = deque(self._cursor.fetchall())

    def executemany(self, operation: Any, seq_of_parameters: Sequence[Any]) -> None:
        self._of.meet_trouble()
        self._of.once_unlocked(self._cursor.executemany, operation, seq_of_parameters)
