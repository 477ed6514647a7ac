"""Sends requests and watches the clock: closed loop (so many at once) or open loop (at their times, come what may)."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from control_plane.bench.workload import Request


@dataclass
class Outcome:
    """One request as the client saw it, in seconds of one monotonic clock; `arrivals` holds each text chunk's."""

    number: int
    sent: float
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent if self.arrivals else 0.0

    @property
    def tpot(self) -> float:
        """Mean time a token after the first."""
        if self.output_tokens < 2 or not self.arrivals:
            return 0.0
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True)
class Target:
    """Where to send. `url` ends in /v1; `extra` is merged into every body."""

    url: str
    model: str
    api_key: str = ""
    chat: bool = False
    verify: ssl.SSLContext | bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0


class Driver:
    """Holds the connections. Outcomes come back in order of request number."""

    def __init__(self, target: Target, most_open: int) -> None:
        self._target = target
        self._most_open = most_open
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Driver:
        connector = aiohttp.TCPConnector(limit=self._most_open, ssl=self._target.verify)
        headers = {"Authorization": f"Bearer {self._target.api_key}"} if self._target.api_key else {}
        timeout = aiohttp.ClientTimeout(total=self._target.timeout_s, sock_connect=30)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=timeout, read_bufsize=1 << 20
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def closed(self, requests: Iterator[Request], count: int, concurrency: int) -> list[Outcome]:
        """`count` requests, `concurrency` of them at any time."""
        outcomes: list[Outcome] = []
        left = iter([request for request, _ in zip(requests, range(count), strict=False)])

        async def worker() -> None:
            for request in left:
                outcomes.append(await self.send(request))

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
        return sorted(outcomes, key=lambda outcome: outcome.number)

    async def open(self, requests: Iterable[Request]) -> list[Outcome]:
        """Each request at its time, whether or not the earlier ones have ended."""
        started = time.monotonic()
        tasks: list[asyncio.Task[Outcome]] = []
        async with asyncio.TaskGroup() as group:
            for request in requests:
                await asyncio.sleep(max(started + request.at - time.monotonic(), 0))
                tasks.append(group.create_task(self.send(request)))
        return sorted((task.result() for task in tasks), key=lambda outcome: outcome.number)

    async def send(self, request: Request) -> Outcome:
        target = self._target
        body: dict[str, Any] = {
            "model": target.model,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **target.extra,
        }
        if target.chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        path = "/chat/completions" if target.chat else "/completions"
        outcome = Outcome(request.number, time.monotonic())
        assert self._session is not None  # noqa: S101
        try:
            async with self._session.post(target.url.rstrip("/") + path, json=body) as response:
                if response.status != 200:
                    outcome.error = f"HTTP {response.status}"
                    await response.read()
                else:
                    await _watch(response, outcome)
        except TimeoutError:
            outcome.error = "timed out"
        except (aiohttp.ClientError, OSError) as error:
            outcome.error = type(error).__name__
        outcome.ended = time.monotonic()
        return outcome


async def _watch(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    counted = 0
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            outcome.error = "error in the stream"
            return
        usage = event.get("usage")
        if usage:
            outcome.input_tokens = usage["prompt_tokens"]
            outcome.output_tokens = usage["completion_tokens"]
        for choice in event.get("choices") or []:
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                outcome.arrivals.append(time.monotonic())
                counted += 1
    # servers that send no usage are counted by their chunks
    outcome.output_tokens = outcome.output_tokens or counted
