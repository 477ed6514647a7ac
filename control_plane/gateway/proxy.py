"""Sends a request to a replica and its reply to the client: streams frame by frame, the rest in one piece."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import aiohttp
import msgspec
from aiohttp import web

from control_plane.config import Limits
from control_plane.errors import IngleError, UpstreamError
from control_plane.gateway.activator import Activator
from control_plane.gateway.exchange import Exchange
from control_plane.gateway.router import Target
from control_plane.gateway.snapshot import Key, Route
from control_plane.gateway.sse import EventRelay, error_frame, parse_usage
from control_plane.observe import metrics
from control_plane.observe.logs import event
from control_plane.security.mesh import PLAIN, Link

_MAX_REPLY = 64 * 1024 * 1024
_KEEP_ALIVE = 15.0  # less than any replica's, so that a pooled connection is never one that just closed
_PASSED_BACK = ("retry-after", "openai-processing-ms", "openai-model")
_LOST = "the replica that served this request was lost"


class _NotSent(Exception):
    """The replica never saw the request, or whoever is at its address took it for a stranger's."""


class _Refused(Exception):
    """The replica takes nothing new: it drains, its engine is gone, or (`full`) its queue is full."""

    def __init__(self, full: bool) -> None:
        self.full = full


class _LostBeforeFirstByte(Exception):
    """`connection_closed`: perhaps only the kept connection was, just as the request went out."""

    def __init__(self, connection_closed: bool = False) -> None:
        self.connection_closed = connection_closed


class _Detail(msgspec.Struct):
    code: str | None = None


class _Problem(msgspec.Struct):
    error: _Detail


_decode_problem = msgspec.json.Decoder(_Problem).decode


class Proxy:
    """Owns the pool of connections to replicas.

    `note` is told of each request that goes to a replica, and again before a stream's last frame: what was billed if
    the gateway dies right then. `require_still` raises where a key that waited has ended.
    """

    def __init__(
        self,
        activator: Activator,
        limits: Limits,
        region: str,
        cache_salt: Callable[[str], str],
        *,
        note: Callable[[Exchange], None],
        require_still: Callable[[Key], None],
        link: Link = PLAIN,
    ) -> None:
        self._link = link
        self._activator = activator
        self._note = note
        self._require_still = require_still
        self._region = region
        self._cache_salt = cache_salt
        self._salts: dict[str, str] = {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=limits.upstream_connect, sock_read=limits.upstream_silence
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )

    async def close(self) -> None:
        await self._session.close()

    async def forward(
        self, request: web.BaseRequest, exchange: Exchange, route: Route, key: Key, body: bytes, wait: float
    ) -> web.StreamResponse:
        """Answer `request` from a replica of `route`; `wait` bounds the holding, in seconds.

        Until the first byte another replica is tried: once after a loss, and for as long as `wait` allows where the
        replica never took the request. Raises IngleError until then; afterwards the stream itself says what went wrong.
        """
        try:
            return await self._forward(request, exchange, route, key, body, wait)
        except IngleError as error:
            if exchange.response is None:
                raise
            exchange.outcome, exchange.error = "error", error.code
            return await _end(exchange.response, error_frame(error.body()))

    async def _forward(
        self, request: web.BaseRequest, exchange: Exchange, route: Route, key: Key, body: bytes, wait: float
    ) -> web.StreamResponse:
        tried: set[str] = set()
        lost: _LostBeforeFirstByte | None = None
        while True:
            # where only the connection closed, it may have gone before the request came to it: that is worth a wait
            if lost and not lost.connection_closed and not self._activator.can_take(route, tried):
                raise UpstreamError(f"{_LOST}, and no other is ready")
            target = self._activator.try_take(exchange, route, tried)
            if target is None:
                target = await self._held(request, exchange, route, key, tried, wait, len(body))
            try:
                self._require_still(key)
                exchange.target = target
                if not exchange.dispatched:
                    exchange.dispatched = True
                    self._note(exchange)
                reply = await self._once(request, exchange, target, key, body)
                if exchange.outcome == "upstream_lost":
                    self._activator.failed(route, target)
                else:
                    target.served()
                return reply
            except _NotSent:
                self._activator.failed(route, target)
                tried.add(target.id)
            except _Refused as refusal:
                if refusal.full:
                    self._activator.full(route, target)
                else:
                    tried.add(target.id)
            except _LostBeforeFirstByte as loss:
                if lost:
                    self._activator.failed(route, target)
                    raise UpstreamError(f"{_LOST}, and so was another") from None
                if not loss.connection_closed:
                    self._activator.failed(route, target)
                if not loss.connection_closed or self._activator.can_take(route, {*tried, target.id}):
                    tried.add(target.id)
                lost = loss
                metrics.retries.labels(self._region).inc()
            finally:
                self._activator.done(route, target, exchange.expected_tokens)

    async def _held(
        self,
        request: web.BaseRequest,
        exchange: Exchange,
        route: Route,
        key: Key,
        tried: set[str],
        wait: float,
        size: int,
    ) -> Target:
        before = time.perf_counter()
        holding = self._activator.hold(exchange, route, key, tried, wait - exchange.held, size)
        try:
            if exchange.keep_alive is None:
                return await holding
            return await self._commented(request, exchange, route, asyncio.ensure_future(holding), exchange.keep_alive)
        finally:
            exchange.held += time.perf_counter() - before

    async def _commented(
        self, request: web.BaseRequest, exchange: Exchange, route: Route, held: asyncio.Future[Target], every: float
    ) -> Target:
        """Wait, and let the client's side of the connection see a comment from time to time."""
        try:
            while not (await asyncio.wait({held}, timeout=every))[0]:
                if exchange.response is None:
                    exchange.status = 200
                    exchange.response = await _begin(request, exchange)
                await exchange.response.write(b": held\n\n")
        except BaseException:
            # The client went away: so does its place in the line, or at a replica.
            held.cancel()
            for outcome in await asyncio.gather(held, return_exceptions=True):
                if isinstance(outcome, Target):
                    self._activator.done(route, outcome, exchange.expected_tokens)
            raise
        return held.result()

    async def _once(
        self, request: web.BaseRequest, exchange: Exchange, target: Target, key: Key, body: bytes
    ) -> web.StreamResponse:
        headers = self._headers(request, exchange, target, key)
        try:
            upstream = await self._session.post(
                target.url(exchange.path, self._link.scheme),
                data=body,
                headers=headers,
                allow_redirects=False,
                **self._link.options(target.id),
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _NotSent from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            raise _LostBeforeFirstByte(connection_closed=True) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _LostBeforeFirstByte from error
        try:
            if upstream.status in (401, 403) or 300 <= upstream.status < 400:
                # the replica went, and its port is somebody else's by now; or it has another token than its gateway
                event("replica.stranger", level=logging.WARNING, replica=target.id, status=upstream.status)
                raise _NotSent
            if upstream.status >= 500:
                await _explain(upstream)
            for name in _PASSED_BACK:
                if name in upstream.headers:
                    exchange.headers[name] = upstream.headers[name]
            exchange.status = upstream.status
            if upstream.content_type == "text/event-stream":
                return await self._stream(request, exchange, upstream)
            return await self._whole(exchange, upstream)
        finally:
            # Does nothing to a reply read to its end; cutting any other is what cancels the replica's work.
            upstream.close()

    async def _whole(self, exchange: Exchange, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        if (upstream.content_length or 0) > _MAX_REPLY:
            raise UpstreamError("the replica's reply is too large")
        try:
            body = await upstream.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _LostBeforeFirstByte from error
        usage = upstream.headers.get("x-ingle-usage")
        if usage is not None:
            exchange.usage = parse_usage(usage)
        exchange.outcome = "ok" if upstream.status < 400 else "error"
        if exchange.response is not None:
            return await _end(exchange.response, b"data: " + body.replace(b"\n", b" ") + b"\n\n")
        exchange.headers["content-type"] = upstream.headers.get("content-type", "application/json")
        return web.Response(status=upstream.status, body=body, headers=exchange.headers)

    async def _stream(
        self, request: web.BaseRequest, exchange: Exchange, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        exchange.streamed = True
        relay = EventRelay()
        response = exchange.response
        rest = b""
        while True:
            try:
                chunk = await upstream.content.readany()
            except (aiohttp.ClientError, TimeoutError) as error:
                if exchange.first_byte is None:
                    raise _LostBeforeFirstByte from error
                exchange.outcome = exchange.error = "upstream_lost"
                rest = error_frame(UpstreamError(f"{_LOST} before the reply was complete").body())
                break
            if not chunk:
                exchange.outcome = "ok"
                rest = relay.finish()
                break
            frames = relay.feed(chunk)
            exchange.seen = relay.pieces
            if relay.usage is not exchange.usage:
                exchange.usage = relay.usage
                self._note(exchange)
            if frames:
                if exchange.first_byte is None:
                    exchange.first_byte = exchange.elapsed()
                if response is None:
                    response = await _begin(request, exchange)
                await response.write(frames)
            exchange.delivered = relay.pieces
        if response is None:
            response = await _begin(request, exchange)
        return await _end(response, rest)

    def _headers(self, request: web.BaseRequest, exchange: Exchange, target: Target, key: Key) -> dict[str, str]:
        salt = self._salts.get(key.tenant_id)
        if salt is None:
            salt = self._salts[key.tenant_id] = self._cache_salt(key.tenant_id)
        headers = {
            "Authorization": target.authorization,
            "Content-Type": request.headers.get("Content-Type", "application/json"),
            "Accept": request.headers.get("Accept", "*/*"),
            "x-request-id": exchange.request_id,
            "x-ingle-cache-salt": salt,
            "x-ingle-usage": "1",
            **exchange.span.carrier(),
        }
        if exchange.override_model:
            headers["x-ingle-model"] = "override"
        return headers


async def _explain(upstream: aiohttp.ClientResponse) -> None:
    """Raise what a replica's own 5xx means for the request; return where it is the request's answer."""
    try:
        code = _decode_problem(await upstream.read()).error.code
    except (msgspec.DecodeError, aiohttp.ClientError, TimeoutError):
        code = None
    if upstream.status == 503:
        raise _Refused(full=code == "overloaded")
    if code == "engine_error":
        raise _LostBeforeFirstByte


async def _begin(request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
    exchange.headers |= {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
    }
    response = _Stream(status=exchange.status, headers=exchange.headers)
    await response.prepare(request)
    return response


class _Stream(web.StreamResponse):
    """Its headers go out with its first frame, in one record."""

    _send_headers_immediately = False


async def _end(response: web.StreamResponse, last: bytes) -> web.StreamResponse:
    if last:
        await response.write(last)
    await response.write_eof()
    return response


def error_reply(error: IngleError, exchange: Exchange) -> web.Response:
    """`error` as a reply in OpenAI's shape."""
    headers = exchange.headers
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return web.json_response(error.body(), status=error.status, headers=headers)
