"""What the gateway asks of a connection before it reads a request: a place, and headers that come in time."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from control_plane.observe import metrics


class Door(web.Server):
    """At most `most` connections; each has `header_seconds` for the headers of a request from their first byte on."""

    def __init__(self, handler: Any, *, region: str, most: int, header_seconds: float, **options: Any) -> None:
        super().__init__(handler, **options)
        self._region = region
        self._most = most
        self._header_seconds = header_seconds

    def __call__(self) -> RequestHandler:
        if len(self._connections) >= self._most:
            metrics.connections_refused.labels(self._region).inc()
            return _Refusal()  # type: ignore[return-value]  # asyncio takes any protocol
        return _Connection(self, header_seconds=self._header_seconds, loop=self._loop, **self._kwargs)


class _Refusal(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


class _Connection(RequestHandler):
    __slots__ = ("_header_seconds", "_header_timer")

    def __init__(self, manager: Door, *, header_seconds: float, **options: Any) -> None:
        super().__init__(manager, **options)
        self._header_seconds = header_seconds
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages or self._request_in_progress:
            self._headers_came()
        elif data and self._header_timer is None:
            self._await_headers()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._headers_came()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        self._header_timer = self._loop.call_later(self._header_seconds, self.force_close)

    def _headers_came(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
