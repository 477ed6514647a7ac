"""Connections whose client has shut its sending side: one that still reads gets its reply, one that left is found.

Both look the same (a FIN). So an interim response, which a client must pass over, is sent until the reply begins: to
one that has left it is an error at the next write. TLS has no half-closed connections; this is for plain HTTP.
"""

from __future__ import annotations

import asyncio
from itertools import chain, repeat
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.web_protocol import RequestHandler

_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_PAUSES_S = (0.005, 0.02, 0.1, 0.5)
_PAUSE_S = 1.0


class _Connection(RequestHandler):
    __slots__ = ("_pauses", "_timer")

    def __init__(self, manager: web.Server, *, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        super().__init__(manager, loop=loop, **options)
        self._pauses = chain(_FIRST_PAUSES_S, repeat(_PAUSE_S))
        self._timer: asyncio.TimerHandle | None = None

    def eof_received(self) -> bool | None:  # type: ignore[override]  # asyncio asks whether to stay open
        idle = self._waiter is not None and not self._waiter.done()
        encrypted = self.transport is not None and self.transport.get_extra_info("sslcontext") is not None
        if encrypted or (idle and not self._messages):
            return None
        self.close()  # once the reply is sent
        self._look_later()
        return True

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(next(self._pauses), self._look)

    def _look(self) -> None:
        request = self._current_request
        if self.transport is None or request is None:
            return
        if not request.content.is_eof() or request.version < HttpVersion11:
            self.force_close()  # half a request, or a client that would not know what an interim response is
        elif not request.writer.output_size:  # a reply that has begun is written to anyway
            self.transport.write(_INTERIM)
            self._look_later()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Runs an application on such connections."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )
