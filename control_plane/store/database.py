"""The database of an installation: SQLite in one process or PostgreSQL for more, behind the same two doors.

`read()` and `write()` give a session in one transaction. After a write commits, whoever subscribed to what it touched
is woken: in this process at once, in others by PostgreSQL's notifications while `listen` runs there. Polling is what is
left where those fail.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

from sqlalchemy import Connection, event, func, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from control_plane.errors import ConfigError, Conflict, StoreUnavailable, Unprocessable
from control_plane.observe import logs

TIMEOUT = 5.0
"""Seconds that anything waits for the database: a connection, a lock, a statement."""
ABANDONED = 10.0
"""Seconds after which PostgreSQL ends a transaction that nobody goes on with: whoever began it was stopped, or is cut
off, and what it has locked is locked for all."""

_TOPICS = "ingle_topics"
_CHANNEL = "ingle"
_SILENCE = 30.0
"""Seconds without a notification after which the line is tried."""
_LISTEN_AGAIN = 1.0


class Poke:
    """Wakes one waiter; pokes that come meanwhile are one poke."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, timeout: float) -> bool:
        """Until poked, or for `timeout` seconds. Returns whether it was poked."""
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True


class Store:
    """Connections to the database at `url`. Raises ConfigError for a URL that it can't serve."""

    def __init__(self, url: str) -> None:
        self.engine = _engine(url)
        self.sqlite = self.engine.dialect.name == "sqlite"
        self._writer = self.engine.execution_options(ingle_write=True)
        self._write_lock = asyncio.Lock()
        self._pokes: dict[str, list[Poke]] = {}
        self._name = os.urandom(8).hex()
        """Whose notifications are our own."""

    def subscribe(self, *topics: str) -> Poke:
        """A poke that is set after each commit in this process that touched one of `topics`."""
        poke = Poke()
        for topic in topics:
            self._pokes.setdefault(topic, []).append(poke)
        return poke

    @asynccontextmanager
    async def read(self, patience: float = TIMEOUT) -> AsyncIterator[AsyncSession]:
        """A session for reading, for at most `patience` seconds. Raises StoreUnavailable."""
        # A server that is there but silent answers no statement and no time-out of its own.
        with _translated():
            async with asyncio.timeout(patience), AsyncSession(self.engine, expire_on_commit=False) as session:
                yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """A session in one transaction, committed at the end. Raises StoreUnavailable."""
        with _translated():
            # SQLite has one writer: queueing for it here is fair and free of the busy handler's sleeps.
            turn = self._write_lock if self.sqlite else nullcontext()
            async with (
                asyncio.timeout(TIMEOUT),
                turn,
                AsyncSession(self._writer, expire_on_commit=False) as session,
                session.begin(),
            ):
                yield session
                topics = session.info.get(_TOPICS, ())
                if topics and not self.sqlite:
                    payload = ",".join((self._name, *sorted(topics)))
                    await session.execute(select(func.pg_notify(_CHANNEL, payload)))
        self._tell(topics)

    async def listen(self) -> None:
        """Wake subscribers for what other processes commit, until cancelled. SQLite has nothing to listen to."""
        if self.sqlite:
            return
        import psycopg

        url = self.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        while True:
            try:
                connecting = psycopg.AsyncConnection.connect(url, autocommit=True, connect_timeout=int(TIMEOUT))
                async with await connecting as line:
                    await line.execute(f"LISTEN {_CHANNEL}".encode())
                    self._tell(self._pokes)  # nobody knows what was missed
                    while True:
                        async for notice in line.notifies(timeout=_SILENCE):
                            sender, *topics = notice.payload.split(",")
                            if sender != self._name:
                                self._tell(topics)
                        async with asyncio.timeout(TIMEOUT):
                            await line.execute(b"SELECT 1")
            except (psycopg.Error, OSError, TimeoutError) as error:
                logs.event("store.not_listening", level=logging.WARNING, reason=type(error).__name__)
                await asyncio.sleep(_LISTEN_AGAIN)

    def _tell(self, topics: Iterable[str]) -> None:
        for topic in topics:
            for poke in self._pokes.get(topic, ()):
                poke.set()

    async def close(self) -> None:
        await self.engine.dispose()


def touch(session: AsyncSession, *topics: str) -> None:
    """Say that this transaction changes `topics`."""
    session.info.setdefault(_TOPICS, set()).update(topics)


class _translated:
    """Turns the database's errors into ours."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, IntegrityError):
            raise Conflict(
                "another change got in between: look again, then repeat", code="concurrent_change"
            ) from error
        if isinstance(error, DataError):
            raise Unprocessable("a value can't be stored: it is too long or has characters that text can't") from error
        if isinstance(error, DBAPIError | PoolTimeout | OSError | sqlite3.Error):
            raise StoreUnavailable(f"the database can't be reached ({type(error).__name__})", retry_after=2) from error


def sync_url(url: str) -> str:
    """The same database through a driver that migrations can use."""
    return url.replace("sqlite+aiosqlite:", "sqlite:", 1)


class _Connection(sqlite3.Connection):
    """Ends its transaction before it closes.

    SQLite keeps a connection that closes with an unfinished statement, and its lock, until that statement is collected:
    a write that was cancelled would keep all others out.
    """

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self.rollback()
        super().close()


def _engine(url: str) -> AsyncEngine:
    try:
        parsed = make_url(url)
        if parsed.drivername == "sqlite+aiosqlite":
            options = {"timeout": TIMEOUT, "factory": _Connection}
            engine = create_async_engine(parsed, connect_args=options, pool_size=8, pool_timeout=TIMEOUT)
            event.listen(engine.sync_engine, "connect", _set_up_sqlite)
            event.listen(engine.sync_engine, "begin", _begin_sqlite)
            return engine
        if parsed.drivername == "postgresql+psycopg":
            seconds = {
                "statement_timeout": TIMEOUT,
                "lock_timeout": TIMEOUT,
                "idle_in_transaction_session_timeout": ABANDONED,
            }
            limits = " ".join(f"-c {name}={int(value * 1000)}" for name, value in seconds.items())
            return create_async_engine(
                parsed,
                connect_args={"connect_timeout": int(TIMEOUT), "options": limits},
                pool_pre_ping=True,
                pool_size=8,
                pool_timeout=TIMEOUT,
                pool_recycle=300,
            )
    except ArgumentError:
        pass
    raise ConfigError(
        "database_url must start with sqlite+aiosqlite:/// or postgresql+psycopg://", param="database_url"
    )


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    # The driver's own transaction handling begins lazily, as a reader: we begin explicitly instead.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", f"busy_timeout={int(TIMEOUT * 1000)}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    write = connection.get_execution_options().get("ingle_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
