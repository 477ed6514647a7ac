"""The control plane's end of a Ray driver process: starts it, calls it, replaces it. Nothing here waits without end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from control_plane.errors import ProviderError
from control_plane.observe.logs import event

_CONNECT_SECONDS = 30.0
_PATIENCE_SECONDS = 8.0
"""How long calls wait for a connection that is being made; then they fail at once until it is there."""
_COOL_DOWN_SECONDS = 10.0
_CALL_SECONDS = 20.0
_MOST_WAITING = 256
_LINE_BYTES = 8 * 1024 * 1024
_CONNECTED = 0


class RayLink:
    """Calls to one cluster. `address` is HOST:PORT of its head; `token_file` holds its authentication token."""

    def __init__(
        self, address: str, namespace: str, token_file: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = address
        self._namespace = namespace
        self._token_file = token_file
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._connecting_since = 0.0
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = _CONNECTED
        self._closed_until = 0.0

    async def call(self, verb: str, **arguments: Any) -> Any:
        """Raises ProviderError where the cluster can't be reached, doesn't answer in time, or fails."""
        process = await self._connected()
        if len(self._waiting) >= _MOST_WAITING:
            raise self._unreachable(f"{_MOST_WAITING} calls wait already")
        self._number += 1
        number = self._number
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                line = json.dumps({"id": number, "verb": verb, "arguments": arguments})
                self._write(process, line.encode() + b"\n")
                said = await answer
        except TimeoutError:
            self._drop(process, f"{verb} wasn't answered in {_CALL_SECONDS:g} s")
            raise self._unreachable("it doesn't answer") from None
        finally:
            self._waiting.pop(number, None)
        if "code" in said:
            raise ProviderError(str(said["message"]), code=str(said["code"]))
        return said.get("result")

    async def close(self) -> None:
        """End the driver process. Replicas stay."""
        self._closed_until = float("inf")
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        process, reader = self._process, self._reader
        if process is not None:
            self._drop(process, None)
            await process.wait()
        if reader is not None:
            await asyncio.gather(reader, return_exceptions=True)

    async def _connected(self) -> asyncio.subprocess.Process:
        if self._process is None:
            if self._connecting is None:
                if self._clock() < self._closed_until:
                    raise self._unreachable("it couldn't be reached a moment ago")
                self._connecting_since = self._clock()
                self._connecting = asyncio.create_task(self._connect())
            left = self._connecting_since + _PATIENCE_SECONDS - self._clock()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(left, 0.0)):
                    await asyncio.shield(self._connecting)
        if self._process is None:
            raise self._unreachable("no connection yet")
        return self._process

    async def _connect(self) -> None:
        process, first = None, b""
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "control_plane.providers.ray_driver", self._address, self._namespace),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    limit=_LINE_BYTES,
                    env=self._environment(),
                    start_new_session=True,
                )
                assert process.stdout is not None  # noqa: S101  # asked for above
                first = await process.stdout.readline()
        except (TimeoutError, OSError):
            pass
        finally:
            self._connecting = None
            if process is not None and not first:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process is None or not first:
            self._closed_until = self._clock() + _COOL_DOWN_SECONDS
            event("ray.unreachable", level=logging.WARNING, address=self._address)
            return
        self._process = process
        self._reader = asyncio.create_task(self._read(process))
        event("ray.connected", address=self._address)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None  # noqa: S101  # asked for where it was started
        with suppress(ValueError, OSError):  # a line beyond all bounds ends the connection
            while line := await process.stdout.readline():
                said = json.loads(line)
                answer = self._waiting.get(said["id"])
                if answer is not None and not answer.done():
                    answer.set_result(said)
        self._drop(process, "its driver process ended")
        await process.wait()

    def _drop(self, process: asyncio.subprocess.Process, why: str | None) -> None:
        """Be without this process; who waits for it is told."""
        if self._process is not process:
            return
        self._process = None
        if why is not None:
            event("ray.lost", level=logging.WARNING, address=self._address, reason=why)
        with suppress(ProcessLookupError):
            process.kill()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result({"code": "cluster_unreachable", "message": self._unreachable("it went").message})

    def _write(self, process: asyncio.subprocess.Process, line: bytes) -> None:
        assert process.stdin is not None  # noqa: S101  # asked for where it was started
        process.stdin.write(line)

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "INGLE_"))}
        return kept | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token_file),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def _unreachable(self, why: str) -> ProviderError:
        return ProviderError(f"the Ray cluster at {self._address} can't be reached: {why}", code="cluster_unreachable")
