"""An event loop whose time is simulated, and SQLite run inside it: the same seed gives the same run."""

from __future__ import annotations

import asyncio
import contextvars
import selectors
import sqlite3
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from typing import Any

import aiosqlite.core

LOCK_SECONDS = 5.0


class Stuck(RuntimeError):
    """Nothing can happen any more: every task waits for another."""


class _NoFiles(selectors.BaseSelector):
    """There are no sockets here: to wait is to move the clock."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("every task waits, and no timer is set")
        self._loop.now += max(0.0, timeout)
        return []

    def register(self, *_: Any) -> Any: ...
    def unregister(self, *_: Any) -> Any: ...
    def get_map(self) -> Any:
        return {}


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Seconds pass when all wait for them. What would run in a thread runs at once."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_NoFiles(self))
        self._clock_resolution = 1e-7

    def time(self) -> float:
        return self.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self.create_future()
        try:
            future.set_result(func(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


class Died(asyncio.CancelledError):
    """The process that asks is dead: nothing of it goes on."""


class Process:
    """What ends at once when it is killed: tasks, and transactions that weren't committed.

    `trouble` is awaited before each statement, and may wait or raise as a database in trouble does.
    """

    def __init__(self, name: str, trouble: Callable[[], Awaitable[None]]) -> None:
        self.name = name
        self.dead = False
        self.trouble = trouble
        self.connections: list[aiosqlite.core.Connection] = []
        self.crossing: Callable[[str], Awaitable[None]] | None = None
        """Awaited before and after each commit, with which of both it is."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        context = contextvars.copy_context()
        context.run(CURRENT.set, self)
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def kill(self) -> None:
        self.dead = True
        for connection in self.connections:
            with suppress(sqlite3.Error):
                if connection._connection is not None:
                    connection._connection.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check(self) -> None:
        if self.dead:
            raise Died


_CLEANING = frozenset({"rollback", "close"})
"""What a connection that breaks does by itself."""
CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


async def _execute(self: Any, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """A statement of a simulated process. Who finds the database locked waits in simulated time."""
    process = CURRENT.get()
    if getattr(function, "__name__", "") in _CLEANING:
        return function(*arguments, **options)
    if process is not None:
        process.check()
        await process.trouble()
        process.check()
    if arguments and isinstance(arguments[0], str) and arguments[0].startswith("PRAGMA busy_timeout"):
        arguments = ("PRAGMA busy_timeout=0", *arguments[1:])
    loop = asyncio.get_running_loop()
    until = loop.time() + LOCK_SECONDS
    if process is not None and process.crossing is not None and getattr(function, "__name__", "") == "commit":
        await process.crossing("before commit")
        process.check()
        result = function(*arguments, **options)
        await process.crossing("after commit")
        return result
    while True:
        try:
            return function(*arguments, **options)
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or loop.time() > until:
                raise
        await asyncio.sleep(0.01)
        if process is not None:
            process.check()


class _AtOnce:
    """In the place of the thread's queue: what is put there is done."""

    def put_nowait(self, item: tuple[asyncio.Future[Any] | None, Callable[[], Any]]) -> None:
        future, function = item
        try:
            result = function()
        except Exception as error:
            if future is not None:
                future.set_exception(error)
            return
        if future is not None:
            future.set_result(result)


async def _connect(self: Any) -> Any:
    self._tx = _AtOnce()
    self._connection = self._connector()
    process = CURRENT.get()
    if process is not None:
        process.connections.append(self)
    return self


def _await(self: Any) -> Generator[Any, None, Any]:
    return _connect(self).__await__()


def _stop(self: Any) -> asyncio.Future[Any] | None:
    self._running = False
    if self._connection is not None:
        self._connection.close()
        self._connection = None
    return None


@contextmanager
def inline_sqlite() -> Generator[None]:
    """The driver without its threads, for as long as this lasts."""
    connection = aiosqlite.core.Connection
    replaced = {"_execute": _execute, "__await__": _await, "stop": _stop}
    kept = {name: getattr(connection, name) for name in replaced}
    for name, function in replaced.items():
        setattr(connection, name, function)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(connection, name, function)
