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

from control_plane.domain import Address
from control_plane.errors import ProviderError
from control_plane.observe.logs import event

_CONNECT_SECONDS = 30.0
_PATIENCE_SECONDS = 8.0
"""How long calls wait for a connection that is being made; then they fail at once until it is there."""
_COOL_DOWN_SECONDS = 10.0
_CALL_SECONDS = 12.0
_KNOCK_SECONDS = 3.0
_REFUSED_TOKEN = b"InvalidAuthToken"
"""Ray says so on stderr, and tries again for a while."""
_CHUNK = 64 * 1024
_MOST_WAITING = 256
_LINE_BYTES = 8 * 1024 * 1024
_CONNECTED = 0


class RayLink:
    """Calls to one cluster, each answered within `call_seconds`.

    `address` is HOST:PORT of its head; `token_file` holds its authentication token.
    """

    def __init__(
        self,
        address: str,
        namespace: str,
        token_file: Path,
        *,
        call_seconds: float = _CALL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self.namespace = namespace
        self._token_file = token_file
        self._call_seconds = call_seconds
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._connecting_since = 0.0
        self._reader: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = _CONNECTED
        self._closed_until = 0.0
        self._trouble = ""

    async def call(self, verb: str, **arguments: Any) -> Any:
        """Raises ProviderError where the cluster can't be reached, doesn't answer in time, or fails."""
        process = await self._connected()
        if len(self._waiting) >= _MOST_WAITING:
            raise self._unreachable(f"{_MOST_WAITING} calls wait already")
        self._number += 1
        number = self._number
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._call_seconds):
                line = json.dumps({"id": number, "verb": verb, "arguments": arguments})
                self._write(process, line.encode() + b"\n")
                said = await answer
        except TimeoutError:
            self._drop(process, f"{verb} wasn't answered in {self._call_seconds:g} s")
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
        if self._process is not None:
            self._drop(self._process, None)
        # They end with the process.
        await asyncio.gather(*(task for task in (self._reader, self._listener) if task), return_exceptions=True)

    async def _connected(self) -> asyncio.subprocess.Process:
        if self._process is None:
            if self._connecting is None:
                if self._clock() < self._closed_until:
                    raise self._unreachable(self._trouble)
                self._connecting_since = self._clock()
                self._connecting = asyncio.create_task(self._connect())
            left = self._connecting_since + _PATIENCE_SECONDS - self._clock()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(left, 0.0)):
                    await asyncio.shield(self._connecting)
        if self._process is None:
            raise self._unreachable(self._trouble)
        return self._process

    async def _connect(self) -> None:
        process, first = None, b""
        self._trouble = "it hasn't answered yet"
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await self._knock()
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "control_plane.providers.ray_driver", self._address, self.namespace),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    limit=_LINE_BYTES,
                    env=self._environment(),
                    start_new_session=True,
                )
                assert process.stdout is not None  # noqa: S101  # asked for above
                self._listener = asyncio.create_task(self._listen(process))
                first = await process.stdout.readline()
        except OSError as error:  # a time-out is one, too
            self._trouble = error.strerror or self._trouble
        finally:
            self._connecting = None
            if process is not None and not first:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process is None or not first:
            self._closed_until = self._clock() + _COOL_DOWN_SECONDS
            event("ray.unreachable", level=logging.WARNING, address=self._address, reason=self._trouble)
            return
        self._process = process
        self._reader = asyncio.create_task(self._read(process))
        event("ray.connected", address=self._address)

    async def _knock(self) -> None:
        """Raises OSError where nothing listens: Ray itself would go on trying for minutes."""
        address = Address.parse(self._address)
        async with asyncio.timeout(_KNOCK_SECONDS):
            _, writer = await asyncio.open_connection(address.host, address.port)
        writer.close()

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Read what Ray says to nobody in particular, for the one thing that says why there is no connection."""
        assert process.stderr is not None  # noqa: S101  # asked for where it was started
        while said := await process.stderr.read(_CHUNK):
            if _REFUSED_TOKEN in said and self._process is not process:
                self._trouble = f"it refuses the token in {self._token_file}"
                with suppress(ProcessLookupError):
                    process.kill()

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
