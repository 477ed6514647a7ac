"""An event loop whose time is simulated, and processes that run on it and die: the same seed gives the same run."""

from __future__ import annotations

import asyncio
import contextvars
import selectors
import sqlite3
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any


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

    `trouble` says, before each statement and before its answer, how many seconds it takes and whether it then fails.
    """

    def __init__(self, name: str, trouble: Callable[[], tuple[float, bool]]) -> None:
        self.name = name
        self.dead = False
        self.trouble = trouble
        self.connections: list[sqlite3.Connection] = []
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
            connection.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check(self) -> None:
        if self.dead:
            raise Died


CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
