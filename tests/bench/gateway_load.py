"""A load generator that costs little itself: kept connections, requests written as bytes, replies told by their end."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

_CHUNKED_END = b"0\r\n\r\n"
_AT_ONCE = 50


@dataclass(frozen=True)
class Place:
    """Where to send to, and how."""

    url: str
    key: str = "none"
    ca_file: str | None = None

    def request(self, body: Mapping[str, Any]) -> bytes:
        content = json.dumps(body).encode()
        parts = urlsplit(self.url)
        head = (
            f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Authorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content

    async def connect(self) -> Connection:
        parts = urlsplit(self.url)
        context = ssl.create_default_context(cafile=self.ca_file) if self.ca_file else None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, parts.hostname or "", parts.port or 443, ssl=context)
        return connection


@dataclass(frozen=True)
class Timed:
    """Seconds from the request to the first byte of the reply's body, and to its end."""

    first: float
    whole: float


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._turn: asyncio.Future[Timed] | None = None
        self._began = self._first = 0.0
        self._head = bytearray()
        self._in_body = False
        self._tail = b""
        self._left: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but descent

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_exception(exc or ConnectionError("closed amid a reply"))

    def send(self, request: bytes) -> asyncio.Future[Timed]:
        if self._transport is None or self._transport.is_closing():
            raise ConnectionError("closed before the request")
        self._turn = asyncio.get_running_loop().create_future()
        self._head.clear()
        self._in_body, self._first, self._tail = False, 0.0, b""
        self._began = time.perf_counter()
        self._transport.write(request)
        return self._turn

    def data_received(self, data: bytes) -> None:
        if self._turn is None or self._turn.done():
            return
        if not self._in_body:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = bytes(self._head[:end]).lower(), bytes(self._head[end + 4 :])
            if not head.startswith(b"http/1.1 200"):
                self._turn.set_exception(RuntimeError(bytes(self._head[:600]).decode()))
                return
            mark = head.find(b"content-length:")
            self._left = int(head[mark + 15 :].split(b"\r\n", 1)[0]) if mark >= 0 else None
            self._in_body = True
            if not data:
                return
        if not self._first:
            self._first = time.perf_counter()
        if self._left is not None:
            self._left -= len(data)
        self._tail = (self._tail + data)[-len(_CHUNKED_END) :]
        if self._left == 0 or (self._left is None and self._tail == _CHUNKED_END):
            now = time.perf_counter()
            self._turn.set_result(Timed(self._first - self._began, now - self._began))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def connected(place: Place, count: int, first: Mapping[str, Any]) -> list[Connection]:
    """Connections on which `first` was asked: one without any request isn't kept for long."""
    request = place.request(first)

    async def one() -> Connection:
        connection = await place.connect()
        await connection.send(request)
        return connection

    opened: list[Connection] = []
    while len(opened) < count:
        opened += await asyncio.gather(*(one() for _ in range(min(_AT_ONCE, count - len(opened)))))
    return opened


async def closed(place: Place, body: Mapping[str, Any], connections: int, seconds: float) -> float:
    """Requests a second that `connections` get, one after the other on each."""
    request = place.request(body)
    done = 0

    async def one(connection: Connection, until: float) -> None:
        nonlocal done
        while time.perf_counter() < until:
            await connection.send(request)
            done += 1

    opened = await connected(place, connections, body)
    await asyncio.gather(*(one(connection, time.perf_counter() + 1.0) for connection in opened))
    done = 0
    began = time.perf_counter()
    await asyncio.gather(*(one(connection, began + seconds) for connection in opened))
    rate = done / (time.perf_counter() - began)
    for connection in opened:
        connection.close()
    return rate


async def paced(request: bytes, rate: float, seconds: float, connections: list[Connection]) -> list[Timed]:
    """Requests that begin at `rate` a second, whatever became of those before. Takes connections, and gives them back.

    Raises IndexError where there are too few.
    """
    found: list[Timed] = []

    async def one(connection: Connection) -> None:
        found.append(await connection.send(request))
        connections.append(connection)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + index / rate - time.perf_counter()))
            group.create_task(one(connections.pop()))
    return found
